"""A countersigned statement is about what it holds, subject for subject."""

from __future__ import annotations

from dataclasses import replace

import pytest

from firmware_sim import Digest
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import SigningKey, open_sealed, seal
from monitor.declaration.countersignature import COUNTERSIGNED, Admitted, Countersigned, in_force
from monitor.declaration.statement import Declaration, StateEntry

KEY = SigningKey.from_private_bytes(bytes(range(32)))
PROGRAM = "ab" * 32
DECLARATION = Declaration.from_json(
    {
        "form": "declaration/1",
        "numerics": "exact",
        "seed": 1,
        "checkpoint_every": 1,
        "shares": [1],
        "optimizer": "torch.optim.sgd.SGD",
        "groups": [{"lr": 0.1}],
        "parameters": [["w"]],
        "state": [["weight", "w", "float32", [3]]],
        "schedule": None,
        "length": None,
        "recipe": None,
        "origin": {"state": str(Digest("sha256", bytes(32))), "parent": None, "initialisation": None},
        "keep": None,
    }
)


@pytest.fixture
def signed():
    cost = Admitted(flop=1, most_flop=2, bytes=3)
    return Countersigned(
        lab="lab", run="ef" * 32, declaration=DECLARATION, programs={PROGRAM: cost}, signed="2026-01-01T00:00:00Z"
    )


def altered(signed, change) -> bytes:
    statement = open_sealed(signed.sign(KEY), COUNTERSIGNED, KEY.verifying)
    change(statement["subject"], statement["predicate"])
    return seal(COUNTERSIGNED, statement, KEY)


CHANGES = {
    "another digest of a program": lambda subjects, _: subjects[1]["digest"].update(sha256="cd" * 32),
    "another declaration": lambda subjects, _: subjects[0]["digest"].update(sha256="cd" * 32),
    "another run": lambda subjects, _: subjects[2]["digest"].update(sha256="cd" * 32),
    "a subject too few": lambda subjects, _: subjects.pop(),
}
TWICE = {
    "two costs of one program": lambda _, predicate: predicate["programs"].insert(0, [PROGRAM, 0, 0, 0]),
    "a name twice": lambda _, predicate: predicate["free"].extend(["lr", "lr"]),
    "names in another order": lambda _, predicate: predicate["free"].extend(["weight_decay", "lr"]),
    "a path twice": lambda _, predicate: predicate["direct_paths"].extend(["buffer/a", "buffer/a"]),
}


@pytest.mark.parametrize("change", TWICE.values(), ids=TWICE)
def test_it_has_one_form(signed, change):
    with pytest.raises(EvidenceError, match="twice, or in another order"):
        Countersigned.open(altered(signed, change), KEY.verifying)


def test_it_is_read_back(signed):
    assert Countersigned.open(signed.sign(KEY), KEY.verifying) == signed
    assert DECLARATION.state == (StateEntry(kind="weight", name="w", dtype="float32", shape=(3,)),)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_subjects_are_what_it_holds(signed, change):
    with pytest.raises(EvidenceError, match="are not those of its content"):
        Countersigned.open(altered(signed, change), KEY.verifying)


@pytest.mark.parametrize(
    "change",
    [
        {"number": 0},
        {"number": 1, "since": 2},
        {"since": True},
        {"signed": "2026-01-01"},
        {"signed": 3},
        {"run": "ef"},
        {"simulated": 1},
    ],
)
def test_numbers_steps_and_dates_have_one_form(signed, change):
    with pytest.raises(EvidenceError, match="countersigned declaration"):
        Countersigned.open(altered(signed, lambda _, predicate: predicate.update(change)), KEY.verifying)


@pytest.mark.parametrize(
    ("since", "steps", "numbers"),
    [
        ((1,), 0, (1,)),
        ((1, 4), 3, (1,)),
        ((1, 4), 4, (1, 2)),
        ((1, 1), 4, (2,)),
        ((1, 4, 2), 9, (1, 3)),
        ((1, 4, 6), 5, (1, 2)),
        ((1, 4, 6), -1, (1,)),
    ],
)
def test_a_later_statement_takes_the_place_of_earlier_ones_from_its_step_on(signed, since, steps, numbers):
    every = [replace(signed, number=number, since=step) for number, step in enumerate(since, start=1)]
    assert tuple(each.number for each in in_force(every, steps)) == numbers
