"""Large constants of a run's programs lie apart, and are the ones that were agreed."""

from __future__ import annotations

import pytest
import torch

from firmware_sim import limits
from inspector.inspection.agreement import agreement_of
from inspector.inspection.disclosure import ThinRun, thin_copy
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.review import review, show
from inspector.inspection.verdict import Outcome
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.programs.constants import Constant
from monitor.transcript import RunFolder
from monitor.transcript.draft import Draft
from monitor.transcript.manifest import Entry
from tests.guards import off

SETTINGS = Settings(samples=1, seed="x", devices=("sse41",))
TABLE, OTHER = (torch.linspace(start, 2, 32) for start in (0.5, 1.0))


@pytest.fixture
def looked_up(record_loop):
    """A loop whose loss weighs what the model gives by a table."""

    def record(table=TABLE, **options):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def body(model, optimizer, batch):
            optimizer.zero_grad()
            (model(batch["x"]) * table).square().mean().backward()
            optimizer.step()

        batches = [{"x": batch} for batch in torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(1))]
        options = {"checkpoint_every": 2, "chips": 1, **options}
        return record_loop(model, optimizer, batches, body, **options)

    return record


@pytest.fixture
def judge(devices):
    def run(recorded):
        return inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=devices.run)

    return run


def the_program(run):
    (path,) = (run / "programs").iterdir()
    return path


def the_constants(run):
    (path,) = (run / "constants").iterdir()
    return path


def test_an_honest_run_is_accepted_and_holds_the_table_once(looked_up, judge):
    recorded = looked_up()
    verdict = judge(recorded)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    table = TABLE.numpy().tobytes()
    assert the_constants(recorded.run).read_bytes() == table
    assert the_constants(recorded.run).stem == the_program(recorded.run).stem
    holders = [path for path in recorded.run.rglob("*") if path.is_file() and table in path.read_bytes()]
    assert holders == [the_constants(recorded.run)]


def test_who_reviews_a_program_sees_how_large_its_table_is_without_it(looked_up):
    recorded = looked_up()
    (alone,) = show(the_program(recorded.run))
    assert {"dtype": "float32", "bytes": 128, "uniform": False} in alone.facts.constants
    (page,) = show(recorded.run)
    assert page.facts == alone.facts
    verdict = review(recorded.run, recorded.trust)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert verdict.evidence["execution"]["constant_bytes"] == sum(each["bytes"] for each in page.facts.constants)


def test_an_inspectorate_reads_the_program_without_its_table(looked_up, tmp_path):
    recorded = looked_up()
    thin_copy(recorded.run, tmp_path / "thin")
    assert not (tmp_path / "thin" / "constants").exists()
    full, thin = (
        kind(folder, recorded.trust.labs["lab"])
        for kind, folder in ((RunFolder, recorded.run), (ThinRun, tmp_path / "thin"))
    )
    (digest,) = full.programs()
    assert agreement_of(thin, recorded.trust).programs.keys() == {digest}
    assert full.program(digest).apart == TABLE.numpy().tobytes()
    assert thin.program(digest).digest == digest
    assert thin.program(digest).apart_bytes == 128
    assert full.program(digest) == thin.program(digest)


def test_a_lab_that_trains_with_another_table_than_was_agreed_is_rejected(looked_up, judge, monkeypatch):
    """Its program has the digest of the agreed table; the file holds the one that it took."""
    agreed, true_of = Constant.of("float32", TABLE.numpy().tobytes()), Constant.of

    def of(dtype, content):
        made = true_of(dtype, content)
        if content != OTHER.numpy().tobytes():
            return made
        return Constant(made.dtype, made.elements, content, agreed.sha256)

    with monkeypatch.context() as patched, off("constants as named"):
        patched.setattr(Constant, "of", of)
        forged = looked_up(OTHER)
    honest = looked_up(name="honest")
    assert the_program(forged.run).read_bytes() == the_program(honest.run).read_bytes()
    verdict = judge(forged)
    assert verdict.outcome is Outcome.REJECT
    assert "a constant of 128 bytes does not have the digest that its program gives" in verdict.reasons[0].text
    with off("constants as named"):
        assert verify(forged.run, forged.trust, now=forged.now).outcome is Outcome.ACCEPT


def empty(draft, run, path):
    """List a file of no bytes, which is not stored."""
    draft.drop(run, path)
    draft.put(run, path, b"")


def huge(draft, run, path):
    """List more than any program may have; not a byte of it lies on a disk, and none is read."""
    with (run / path).open("wb") as file:
        file.truncate(limits.CONSTANTS_BYTES.most + 4)
    draft.files[path] = Entry(limits.CONSTANTS_BYTES.most + 4, "0" * 64)


HOSTILE = {
    "missing": (lambda draft, run, path: draft.drop(run, path), "has 0 bytes; its program keeps 128 bytes"),
    "cut": (lambda draft, run, path: draft.put(run, path, bytes(124)), "has 124 bytes; its program keeps"),
    "longer": (lambda draft, run, path: draft.put(run, path, bytes(132)), "has 132 bytes; its program keeps"),
    "other": (lambda draft, run, path: draft.put(run, path, bytes(range(128))), "does not have the digest that its"),
    "huge": (huge, "at most 67108864 bytes of a program's constants"),
    "empty": (empty, "has 0 bytes; its program keeps 128 bytes of constants"),
    "of no program": (
        lambda draft, run, path: draft.put(run, f"constants/{'0' * 64}.bin", b"1"),
        "is not a file of this run",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_of_constants_that_is_not_its_programs_is_rejected(looked_up, name):
    recorded = looked_up()
    key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(recorded.run)))
    draft = Draft.read(recorded.run, key)
    change, expected = HOSTILE[name]
    change(draft, recorded.run, str(the_constants(recorded.run).relative_to(recorded.run)))
    draft.sign(recorded.run, key)
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.REJECT
    assert any(expected in reason.text for reason in verdict.reasons)


def test_a_program_that_has_all_its_constants_has_no_file_of_them(looked_up):
    """Otherwise a lab could hand on whatever it likes beside the run."""
    recorded = looked_up(torch.ones(32))
    assert not (recorded.run / "constants").exists()
    key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(recorded.run)))
    draft = Draft.read(recorded.run, key)
    draft.put(recorded.run, f"constants/{the_program(recorded.run).stem}.bin", b"something else")
    draft.sign(recorded.run, key)
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.REJECT
    assert "has 14 bytes; its program keeps 0 bytes of constants" in verdict.reasons[0].text
    with off("constants as listed"):
        assert verify(recorded.run, recorded.trust, now=recorded.now).outcome is Outcome.ACCEPT
