"""Runs that keep few of their checkpoints: inspected on another device, resumed, and REJECTed where more is gone."""

from __future__ import annotations

import itertools
import os
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn

from firmware_sim.errors import CallerError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.replays import replay
from inspector.inspection.transcripts import open_run
from inspector.inspection.verdict import Outcome
from inspector.replay.segment import segments
from inspector.storage.fsck import fsck
from inspector.storage.stats import run_stats
from monitor import Recorder
from monitor.lab.lies import conduct
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.recording import recipes
from monitor.replay.reexecution import Reexecution
from monitor.transcript.draft import Draft
from monitor.transcript.layout import checkpoint_path
from tests.conftest import Recorded
from tests.guards import off
from tests.handing import hand_over

STEPS, KEPT = 9, [0, 4, 6, 7, 8]
"""One checkpoint a step, the last two kept: of W_0 … W_8 those that ``KEPT`` says, and W_9."""
BOTH = pytest.mark.parametrize("kind", ["loop", "preset"])


class Killed(BaseException):
    """Stands for the end of the process: no handler of the product catches it."""


def loop():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, torch.optim.Adam(model.parameters(), 0.1)


def body(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def batches():
    return torch.randn(STEPS, 5, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def make(make_run, record_loop):
    """Return a function that records a run of either kind."""

    def record(kind, name="run", keep=2):
        options = {"checkpoint_every": 1, "keep": keep, "numerics": "rounded", "name": name}
        if kind == "loop":
            return record_loop(*loop(), batches(), body, **options)
        return make_run(steps=STEPS, rate=Fraction(1), batch_size=4, **options)

    return record


def on_disk(run) -> list[int]:
    return sorted(int(path.stem) for path in (run / "checkpoints").iterdir())


def problems(recorded) -> list[str]:
    return fsck(recorded.run, {lab: key.raw for lab, key in recorded.trust.labs.items()}).problems


def size(run) -> int:
    return sum(path.stat().st_size for path in run.rglob("*") if path.is_file())


def why(recorded) -> str:
    """Why that is rejected which the lab hands over."""
    hand_over(recorded.run)
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.REJECT
    return "; ".join(reason.text for reason in verdict.reasons)


@BOTH
def test_a_run_that_keeps_few_is_accepted_on_another_device(make, devices, kind):
    recorded, whole = make(kind), make(kind, "whole", None)
    run = open_run(recorded.run, recorded.trust)
    assert on_disk(recorded.run) == [*KEPT, STEPS]
    assert on_disk(whole.run) == list(range(STEPS + 1))
    assert [(each.start, each.stop) for each in segments(run)] == [(0, 4), (4, 6), (6, 7), (7, 8), (8, 9)]
    assert size(recorded.run) < size(whole.run)
    stats = [run_stats(open_run(each.run, each.trust)) for each in (recorded, whole)]
    assert [each.bytes for each in stats] == [size(recorded.run), size(whole.run)]
    assert [each.released for each in stats] == [STEPS - len(KEPT), 0]
    assert run.leaf(STEPS).state == open_run(whole.run, whole.trust).leaf(STEPS).state
    assert problems(recorded) == problems(whole) == []
    settings = Settings(samples=3, seed="x", devices=("sse41",))
    verdict = inspect([recorded.run], recorded.trust, settings, now=recorded.now, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    for index in range(len(KEPT)):
        assert replay(recorded.run, recorded.trust, index, "sse41", worker=devices.run).outcome is Outcome.ACCEPT
    with pytest.raises(CallerError, match="there is no segment 5; this run has segments 0 … 4"):
        replay(recorded.run, recorded.trust, 5, "sse41", worker=devices.run)


@BOTH
def test_a_checkpoint_that_has_to_be_there_is_missed(make, kind):
    recorded = make(kind)
    for step in (*KEPT, STEPS):
        path = checkpoint_path(step)
        with without_file(recorded.run / path):
            assert f"{path} is missing" in why(recorded)
            assert f"{path} is missing" in "; ".join(problems(recorded))
            if step not in (0, STEPS):  # these two are read whatever the policy says
                with off("retained checkpoints"):
                    assert verify(recorded.run, recorded.trust, now=recorded.now).outcome is Outcome.ACCEPT


def test_without_a_policy_every_checkpoint_is_missed(make):
    recorded = make("loop", keep=None)
    for step in range(1, STEPS):
        path = checkpoint_path(step)
        with without_file(recorded.run / path):
            assert f"{path} is missing" in why(recorded)
            assert problems(recorded) == [f"{path} is missing"]


@contextmanager
def without_file(path):
    content = path.read_bytes()
    path.unlink()
    yield
    path.write_bytes(content)


def test_a_released_checkpoint_is_still_listed(make):
    """A lab that never made one cannot say that it released it."""
    recorded = make("loop")
    key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(recorded.run)))
    draft = Draft.read(recorded.run, key)
    del draft.files[checkpoint_path(3)]
    draft.sign(recorded.run, key)
    assert f"{checkpoint_path(3)} is missing from the journal" in why(recorded)


def test_a_released_checkpoint_that_is_still_there_is_checked(make):
    """A process that dies between a step and the deletion leaves one; it has to be what the journal lists."""
    recorded, whole = make("loop"), make("loop", "whole", None)
    path = checkpoint_path(3)
    content = (whole.run / path).read_bytes()
    (recorded.run / path).write_bytes(content)
    assert verify(recorded.run, recorded.trust, now=recorded.now).outcome is Outcome.ACCEPT
    assert problems(recorded) == []
    (recorded.run / path).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert f"{path} was altered" in why(recorded)
    assert problems(recorded) == [f"{path} does not have the signed digest"]
    (recorded.run / path).unlink()
    (recorded.run / path).symlink_to("nowhere")
    assert f"{path} is missing" in why(recorded)
    assert problems(recorded)


def test_a_lab_reaches_every_step_from_what_it_kept(make):
    """As it has to in a dispute."""
    recorded = make("preset")
    run = open_run(recorded.run, recorded.trust)
    lab = Reexecution(run, conduct(None, 1))
    assert [lab.state(step).digest() for step in range(STEPS + 1)] == [run.leaf(s).state for s in range(STEPS + 1)]


@BOTH
@pytest.mark.sampled("after")
@pytest.mark.parametrize("after", [False, True])
def test_dying_at_a_release(make, tmp_path, monkeypatch, kind, after):
    """At the first and last deletion, before or after it; what is left is unfinished, and goes on to the same run."""
    whole = make(kind, "whole")
    for number in (0, STEPS - len(KEPT) - 1):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", dying_at(number, after=after))
            with pytest.raises(Killed):
                make(kind, f"run-{number}")
        assert_goes_on(kind, whole, Recorded(tmp_path / f"run-{number}", whole.trust))


@BOTH
@pytest.mark.sampled
def test_dying_at_any_move_of_a_file(make, tmp_path, monkeypatch, kind):
    whole, replace = make(kind, "whole"), os.replace
    for number in (20, 30, 34, 35, 36, 37):
        calls = itertools.count()

        def dying(*names, at=number, calls=calls):
            if next(calls) == at:
                raise Killed
            return replace(*names)

        with monkeypatch.context() as patch:
            patch.setattr("monitor.files.os.replace", dying)
            with pytest.raises(Killed):
                make(kind, f"run-{number}")
        assert_goes_on(kind, whole, Recorded(tmp_path / f"run-{number}", whole.trust))


def dying_at(number: int, *, after: bool):
    """Deletes checkpoints until the process dies at one."""
    unlink, calls = Path.unlink, itertools.count()

    def dying(path, **options):
        is_last = path.parent.name == "checkpoints" and next(calls) == number
        if after or not is_last:
            unlink(path, **options)
        if is_last:
            raise Killed

    return dying


def assert_goes_on(kind, whole, recorded):
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.INCONCLUSIVE, verdict.reasons
    assert problems(recorded) == []
    if kind == "loop":
        model, optimizer = loop()
        recorder = Recorder.resume(model, optimizer, out=recorded.run)
        for batch in batches()[recorder.steps :]:
            with recorder.step(batch):
                body(model, optimizer, batch)
        recorder.finish()
    else:
        recipes.resume(recorded.run)
    assert verify(recorded.run, recorded.trust, now=recorded.now).outcome is Outcome.ACCEPT
    assert problems(recorded) == []
    assert on_disk(recorded.run) == on_disk(whole.run)
    one, other = open_run(recorded.run, recorded.trust), open_run(whole.run, whole.trust)
    assert [one.leaf(step) for step in range(STEPS + 1)] == [other.leaf(step) for step in range(STEPS + 1)]
