"""A constant has one form, which follows from its content; where that is a digest, the bytes lie elsewhere."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import canonical
from monitor.programs import facts_of
from monitor.programs.constants import APART_BYTES, Constant, apart, parse_constants, with_content
from monitor.programs.program import Program, read_program
from tests.guards import off
from tests.monitor.programs.tracing import trace

FORMS = {
    "none": (np.zeros(0, np.float32), "data", 0, True),
    "one": (np.array([1.5], np.float32), "data", 4, True),
    "one of 16 bytes": (np.array([1 + 2j]), "data", 16, True),
    "few": (np.array([1, 2, 3], np.float32), "data", 12, False),
    "a byte less": (np.arange(15, dtype=np.uint8), "data", 15, False),
    "16 bytes": (np.arange(16, dtype=np.uint8), "sha256", 64, False),
    "many": (np.arange(1000, dtype=np.int64), "sha256", 64, False),
    "many equal": (np.full(1000, 0.5, np.float32), "data", 4, True),
    "zeros of both signs": (np.array([0.0, -0.0, 0.0, 0.0], np.float32), "sha256", 64, False),
}


def constant(array: np.ndarray) -> Constant:
    return Constant.of(str(array.dtype), array.tobytes())


@pytest.mark.parametrize("name", FORMS)
def test_the_form_follows_from_the_content(name):
    array, kind, length, is_uniform = FORMS[name]
    made = constant(array)
    data: Any = made.to_json()
    assert set(data) == {"dtype", "elements", kind}
    assert len(data[kind]) == (length if kind == "sha256" else -(-length // 3) * 4)
    assert (made.is_uniform, made.elements, made.length) == (is_uniform, array.size, array.nbytes)
    read = Constant.from_json(data)
    assert (read.to_json(), read.sha256, read.is_uniform) == (data, made.sha256, is_uniform)
    assert made.sha256 == hashlib.sha256(array.tobytes()).hexdigest()
    assert read == made
    if kind == "data":
        assert read.content == array.tobytes()
        assert read.tensor().tolist() == array.tolist()
    else:
        (full,) = with_content([read], array.tobytes())
        assert full.tensor().tolist() == array.tolist()


def test_whoever_has_the_digest_alone_cannot_execute():
    named = Constant.from_json(constant(np.arange(8.0)).to_json())
    with pytest.raises(EvidenceError, match="only the digest of a constant of 64 bytes is shown here"):
        named.tensor()


def test_constants_differ_where_their_bytes_do():
    one, other = constant(np.arange(8.0)), constant(np.arange(8.0) + 1)
    names = [Constant.from_json(each.to_json()) for each in (one, other)]
    assert (one != other, names[0] != names[1], one != names[1], one == names[0]) == (True, True, True, True)
    same = constant(np.ones(8)), Constant.from_json(constant(np.ones(8)).to_json())
    assert same[0] == same[1]
    assert same[0] != constant(np.ones(9))
    assert same[0] != constant(np.ones(16, np.float32))
    assert len({one, names[0]}) == 1


MALFORMED: dict[str, dict[str, Any]] = {
    "equal elements written out": {"data": "AAAAAAAAAAA=", "elements": 2},
    "written out, and too many": {"data": "AAECAwQFBgcICQoLDA0ODw==", "elements": 4},
    "digest of few": {"sha256": "0" * 64, "elements": 3},
    "digest of one": {"sha256": "0" * 64, "elements": 1},
    "digest in capitals": {"sha256": "A" * 64, "elements": 4},
    "another length": {"data": "AAECAwQFBgc=", "elements": 3},
    "fewer than none": {"data": "", "elements": -1},
    "a fraction": {"data": "AAAAAA==", "elements": 2.0},
    "no base64": {"data": "AAAA", "elements": 1},
    "both": {"data": "AAAAAA==", "sha256": "0" * 64, "elements": 1},
    "neither": {"elements": 1},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_another_form_is_refused(name):
    with pytest.raises(EvidenceError, match="a program's constant is malformed"):
        Constant.from_json({"dtype": "float32", **MALFORMED[name]})


@pytest.mark.parametrize("name", ["equal elements written out", "written out, and too many"])
def test_guard_off_two_forms_of_one_constant_are_read(name):
    with off("constants in one form"):
        assert Constant.from_json({"dtype": "float32", **MALFORMED[name]}).elements


def test_nothing_is_made_of_a_constant_that_is_too_large():
    huge = {"dtype": "float32", "elements": 1 << 40, "data": "AAAAAA=="}
    with pytest.raises(EvidenceError, match="bytes of a program's constants; at most"):
        Constant.from_json(huge)
    half = {**huge, "elements": limits.CONSTANTS_BYTES.most // 8}
    assert len(parse_constants([half, half])) == 2
    with pytest.raises(EvidenceError, match="bytes of a program's constants; at most"):
        parse_constants([half, half, half])


TABLE, FEW, EQUAL = torch.linspace(0, 1, 64), torch.tensor([0.5, 1.0, 2.0]), torch.full((64,), 0.25)


def body(state, batch):
    state["weight/w"].copy_((batch["x"] * TABLE).sum() + FEW.sum() * EQUAL.sum())


@pytest.fixture(scope="module")
def program() -> Program:
    return trace(body, {"weight/w": torch.zeros(())}, {"x": torch.ones(64)})


def test_a_program_holds_digests_and_its_own_digest_binds_the_bytes(program):
    table = TABLE.numpy().tobytes()
    assert [each.content for each in apart(program.constants)] == [table]
    assert (program.apart, program.apart_bytes) == (table, len(table))
    assert table[:APART_BYTES] not in program.encoded
    read = Program.decode(program.encoded)
    assert (read.encoded, read.digest, read.apart_bytes) == (program.encoded, program.digest, len(table))
    assert facts_of(read, ()) == facts_of(program, ())
    assert read.structure() == program.structure()
    with pytest.raises(EvidenceError, match="is shown here, not the constant"):
        _ = read.apart
    full = read.complete(table)
    assert (full.digest, full.apart) == (program.digest, table)
    other = (TABLE + 1).numpy().tobytes()
    changed = tuple(Constant.of(each.dtype, other) if each.unit is None else each for each in program.constants)
    assert replace(program, constants=changed).digest != program.digest
    with pytest.raises(EvidenceError, match="does not have the digest that its program gives"):
        read.complete(other)
    for wrong in (table[:-1], table + b"\0", b""):
        with pytest.raises(EvidenceError, match=f"have {len(wrong)} bytes, not {len(table)}"):
            read.complete(wrong)
    with off("constants as named"):
        assert read.complete(other).constants != program.constants


def test_a_program_that_was_read_stands_in_for_no_constants(program):
    table = TABLE.numpy().tobytes()
    full = read_program(program.encoded, table)
    assert full is read_program(bytes(bytearray(program.encoded)), table)  # its bytes say which one it is
    with pytest.raises(EvidenceError, match="is shown here, not the constant"):
        _ = read_program(program.encoded).apart
    for wrong in ((TABLE + 2).numpy().tobytes(), table[:-1]):
        with pytest.raises(EvidenceError):
            read_program(program.encoded, wrong)


def test_a_digest_of_equal_elements_is_refused_by_who_has_the_bytes(program):
    """Otherwise an inspectorate would take a number for a table, and a program would have two digests."""
    ones = bytes(256)
    form = canonical.decode(program.encoded)
    named = {"dtype": "float32", "elements": 64, "sha256": hashlib.sha256(ones).hexdigest()}
    form["constants"] = [named if "sha256" in each else each for each in form["constants"]]
    read = Program.decode(canonical.encode(form))
    with pytest.raises(EvidenceError, match="a constant only by its digest, although all elements"):
        read.complete(ones)
    with off("constants as named"):
        assert read.complete(ones).digest != read.digest


def test_more_than_a_program_may_hold_is_not_recorded(monkeypatch):
    monkeypatch.setattr(limits, "CONSTANTS_BYTES", limits.Limit(255, "bytes of a program's constants"))
    with pytest.raises(CallerError, match="reads a float32 tensor of 256 bytes that no recorded operator"):
        trace(body, {"weight/w": torch.zeros(())}, {"x": torch.ones(64)})
