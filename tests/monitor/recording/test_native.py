"""Native numerics: what recording alone costs. All is committed and verifies, and nothing else can repeat it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim.errors import CallerError
from inspector.inspection.guards import Guard, Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.replays import replay
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor import Recorder
from monitor.recording.state_watch import HeldState

STARTED = datetime(2026, 1, 1, tzinfo=UTC)
BATCHES = [torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(step)) for step in range(5)]


class Loop:
    """Attention, dropout and AdamW, as PyTorch has them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    def record(self, recorder: Recorder, until: int = len(BATCHES)) -> None:
        for batch in BATCHES[recorder.steps : until]:
            with recorder.step(batch) as step:
                self.optimizer.zero_grad()
                loss = functional.mse_loss(self.model(batch), batch[..., :2])
                loss.backward()
                self.optimizer.step()
                step.commit(loss=loss)


def start(loop, out):
    return Recorder(loop.model, loop.optimizer, out=out, numerics="native", chips=2, lab="lab", started=STARTED)


def trust_of(run):
    return Trust.load([run.with_name(f"{run.name}.trust.json")])


@pytest.fixture
def no_repetition(monkeypatch):
    def refuse(*_):
        raise AssertionError("a native step was repeated")

    for name in ("repeat", "repeat_segment"):
        monkeypatch.setattr(HeldState, name, refuse)


def test_a_native_run_is_recorded_and_verified_and_cannot_be_replayed(tmp_path, no_repetition, devices):
    run, loop = tmp_path / "run", Loop()
    recorder = start(loop, run)
    loop.record(recorder)
    recorder.finish()
    trust = trust_of(run)
    verdict = verify(run, trust, now=STARTED)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert "; no replay can repeat its native numerics" in verdict.reasons[0].text
    verdict = inspect([run], trust, Settings(samples=1, seed="x", devices=("sse41",)), now=STARTED, worker=devices.run)
    assert verdict.outcome is Outcome.REJECT
    assert verdict.reasons[0].guard == Guard.REPLAY.value
    assert "native numerics, which no other device can reproduce" in verdict.reasons[0].text
    with pytest.raises(CallerError, match="native numerics cannot be replayed"):
        replay(run, trust, 0, "sse41", worker=devices.run)


def test_its_steps_are_those_of_pytorch(tmp_path):
    """Without dropout, whose masks are the run's, it ends in the bits of an unrecorded loop."""
    ends = []
    for out in (tmp_path / "run", None):
        loop = Loop()
        loop.model.eval()
        if out is not None:
            recorder = start(loop, out)
            loop.record(recorder)
        else:
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                torch.backends.mha.set_fastpath_enabled(False)
                for batch in BATCHES:
                    loop.optimizer.zero_grad()
                    functional.mse_loss(loop.model(batch), batch[..., :2]).backward()
                    loop.optimizer.step()
                torch.backends.mha.set_fastpath_enabled(True)
        ends.append(torch.cat([each.detach().flatten() for each in loop.model.parameters()]))
    assert torch.equal(*ends)


def test_a_native_run_goes_on_after_a_crash(tmp_path):
    ends = []
    for out in (tmp_path / "whole", tmp_path / "killed"):
        loop = Loop()
        recorder = start(loop, out)
        if out.name == "killed":
            loop.record(recorder, until=3)
            recorder._run.lab.cut_power()
            loop = Loop()
            recorder = Recorder.resume(loop.model, loop.optimizer, out=out)
        loop.record(recorder)
        ends.append(recorder.finish())
    assert ends[0] == ends[1]


def test_writes_that_no_operator_shows_are_named_all_the_same(tmp_path):
    loop = Loop()
    recorder = start(loop, tmp_path / "run")
    weight = loop.model.get_parameter("1.weight").detach().numpy()

    def write(*_):
        weight[0] += 1

    loop.optimizer.register_step_pre_hook(write)
    with pytest.raises(CallerError, match="written"):
        loop.record(recorder)
