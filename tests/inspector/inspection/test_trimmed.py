"""Checkpoints leave out what the next step overwrites; a lab that leaves out anything else is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from firmware_sim.errors import EvidenceError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.verdict import Outcome
from inspector.replay.segment import replay_segment
from inspector.storage.fsck import fsck
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.replay.steps import ProgramSteps
from monitor.sharding import PROOF
from monitor.transcript import RunFolder, encode_state
from monitor.transcript.draft import Draft
from monitor.transcript.layout import checkpoint_path
from tests.guards import off

STEPS, EVERY = 5, 2


class Shifted(nn.Module):
    """A layer, and an offset that is read in every step and happens to be zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("offset", torch.zeros(3))

    def forward(self, batch):
        return self.layer(batch) + self.offset


def body(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


@pytest.fixture
def recorded(record_loop):
    torch.manual_seed(0)
    model = Shifted()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    batches = [torch.randn(5, 4) for _ in range(STEPS)]
    return record_loop(model, optimizer, batches, body, checkpoint_every=EVERY)


def opened(recorded) -> RunFolder:
    return RunFolder(recorded.run, recorded.trust.labs["lab"])


def rewrite(recorded, step: int, change) -> None:
    """The lab signs its transcript anew with another checkpoint of a step; the step itself stays as it was."""
    run = opened(recorded)
    steps = ProgramSteps(run, run.checkpoint_before(step))
    while steps.training.step < step:
        steps.take()
    memory = steps.training.memory
    absent = memory.export().keys() - run.checkpoint(step).keys()
    key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(recorded.run)))
    draft = Draft.read(recorded.run, key)
    draft.put(recorded.run, checkpoint_path(step), encode_state(change(memory, absent)))
    draft.sign(recorded.run, key)


def problems(recorded) -> list[str]:
    return fsck(recorded.run, {lab: key.raw for lab, key in recorded.trust.labs.items()}).problems


def why(recorded) -> str:
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.REJECT
    return "; ".join(reason.text for reason in verdict.reasons)


def test_an_honest_run_is_inspected_from_what_its_checkpoints_hold(recorded, devices):
    run = opened(recorded)
    gradients = {f"gradient/layer.{name}" for name in ("weight", "bias")}
    names = {f"{entry.kind}/{entry.name}" for entry in run.declared.state}
    assert [set(run.checkpoint(step)) for step in (0, 2, 4, 5)] == [
        names,
        names - gradients | {PROOF},
        names - gradients | {PROOF},
        names,
    ]
    settings = Settings(samples=3, seed="x", devices=("sse41",))
    verdict = inspect([recorded.run], recorded.trust, settings, now=recorded.now, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert problems(recorded) == []


def test_what_the_next_step_reads_may_not_be_left_out(recorded):
    """Zeros stand for what is left out, so that a replay would not notice that it was given nothing to read."""
    rewrite(recorded, 2, lambda memory, absent: memory.trimmed(memory.export(), absent | {"buffer/offset"}))
    assert "step 3 reads 'buffer/offset', which the checkpoint of step 2 leaves out" in why(recorded)
    replay = replay_segment(opened(recorded), 1)
    assert replay.leaves == ()
    assert replay.contradiction is not None
    assert "leaves out" in str(replay.contradiction["text"])
    assert problems(recorded) == []  # the files agree with each other, and with what was signed
    with off("left out unread"):
        assert verify(recorded.run, recorded.trust, now=recorded.now).outcome is Outcome.ACCEPT
        run = opened(recorded)
        assert replay_segment(run, 1).leaves == (run.leaf(3), run.leaf(4))


@pytest.mark.parametrize("step", [0, STEPS])
def test_the_first_and_the_last_state_are_whole(recorded, step):
    rewrite(recorded, step, lambda memory, absent: memory.trimmed(memory.export(), {"gradient/layer.bias"}))
    assert "has to be complete" in why(recorded)
    assert "although the first and the last checkpoint have to be complete" in problems(recorded)[0]


def other_proof(memory, absent):
    checkpoint = memory.trimmed(memory.export(), absent)
    return {**checkpoint, PROOF: checkpoint[PROOF] ^ 1}


def no_proof(memory, absent):
    return {name: tensor for name, tensor in memory.export().items() if name not in absent}


def other_values(memory, absent):
    checkpoint = memory.trimmed(memory.export(), absent)
    return {**checkpoint, "weight/layer.bias": checkpoint["weight/layer.bias"] + 1}


@pytest.mark.parametrize("change", [other_proof, no_proof, other_values])
def test_hashes_stand_for_what_is_left_out(recorded, change):
    rewrite(recorded, 4, change)
    assert "checkpoint" in why(recorded)
    assert checkpoint_path(4) in problems(recorded)[0]


def test_a_checkpoint_that_is_due_is_there(recorded):
    key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(recorded.run)))
    draft = Draft.read(recorded.run, key)
    draft.drop(recorded.run, checkpoint_path(4))
    draft.sign(recorded.run, key)
    assert f"{checkpoint_path(4)} is missing" in why(recorded)
    with pytest.raises(EvidenceError, match="is missing"):
        replay_segment(opened(recorded), 2)


def test_a_killed_run_goes_on_from_what_its_checkpoints_hold(recorded, tmp_path: Path):
    """At a checkpoint's own step it is not written yet: the steps since the one before are repeated."""
    from monitor import Recorder

    torch.manual_seed(0)
    Shifted()  # draws what the recorded one drew
    batches = [torch.randn(5, 4) for _ in range(STEPS)]
    run = opened(recorded)
    options: dict[str, Any] = {"seed": 5, "chips": 3, "checkpoint_every": EVERY, "lab": "lab", "hours": 1.0}
    for killed in (1, 2, 3, 4):
        out = tmp_path / f"killed-{killed}"
        torch.manual_seed(0)
        model = Shifted()
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        recorder = Recorder(model, optimizer, out=out, started=recorded.now, **options)
        for batch in batches[:killed]:
            with recorder.step(batch):
                body(model, optimizer, batch)
        recorder._run.lab.cut_power()
        model = Shifted()
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9.0)
        recorder = Recorder.resume(model, optimizer, out=out)
        assert any(cast(torch.Tensor, parameter.grad).numpy().any() for parameter in model.parameters())
        for batch in batches[recorder.steps :]:
            with recorder.step(batch):
                body(model, optimizer, batch)
        recorder.finish()
        again = RunFolder(out, recorded.trust.labs["lab"])
        assert [again.leaf(step) for step in range(STEPS + 1)] == [run.leaf(step) for step in range(STEPS + 1)]
        for step in (2, 4):
            assert again.files[checkpoint_path(step)] == run.files[checkpoint_path(step)]
