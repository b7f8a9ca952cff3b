"""A recorded loop whose process dies at any moment goes on with Recorder.resume, to the same bits."""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim import RecordKind, parse_log
from firmware_sim.errors import CallerError, ChipwitnessError, EvidenceError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor import Recorder
from monitor.lab.simulated_lab import SimulatedLab
from monitor.transcript.layout import MANIFEST, batch_path

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # it is put forward at once

STEPS = 7


class Killed(BaseException):
    """Stands for the end of the process: no handler of the product catches it."""


def make_batches(steps: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(6, 8, generator=generator) for _ in range(steps)]


class Loop:
    """A loop with dropout, batch statistics and a schedule, which drops its gradients before or after each step."""

    def __init__(self, kind: str, width: int = 8) -> None:
        torch.manual_seed(4)
        self.model = nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 2))
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer
        if kind == "adamw":
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if kind == "momentum" else 0.0)
        self.late = kind == "adamw"
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)

    def train(self, recorder: Recorder, batches) -> None:
        for batch in batches:
            with recorder.step(batch):
                if not self.late:
                    self.optimizer.zero_grad()
                functional.mse_loss(self.model(batch), batch[:, :2]).backward()
                self.optimizer.step()
                if self.late:
                    self.optimizer.zero_grad()
            self.schedule.step()


def record(out, kind, numerics, recorded_at, **options):
    loop = Loop(kind)
    defaults = {"seed": 5, "chips": 2, "checkpoint_every": 3, "lab": "lab", "hours": 1.0, "started": recorded_at}
    recorder = Recorder(loop.model, loop.optimizer, out=out, numerics=numerics, **{**defaults, **options})
    loop.train(recorder, make_batches())
    return recorder.finish()


def go_on(out, kind):
    loop = Loop(kind)
    recorder = Recorder.resume(loop.model, loop.optimizer, out=out)
    for _ in range(recorder.steps):
        loop.schedule.step()
    loop.train(recorder, make_batches()[recorder.steps :])
    return recorder.finish()


def leaves_of(run, trust):
    leaves, _ = open_run(run, trust).load_steps()
    return list(leaves)


def trust_of(run):
    return Trust.load([run.with_name(f"{run.name}.trust.json")])


@pytest.fixture
def started(honest):
    return honest.now


@pytest.mark.parametrize(("kind", "numerics"), [("adamw", "rounded"), ("momentum", "exact"), ("plain", "exact")])
def test_dying_at_replacements_of_files(tmp_path, monkeypatch, started, kind, numerics):
    """Every file moves in by os.replace, so dying at the n-th visits each state on disk."""
    digest = record(tmp_path / "whole", kind, numerics, started)
    expected = leaves_of(tmp_path / "whole", trust_of(tmp_path / "whole"))
    replace, calls, left = os.replace, 0, -1
    labs = []
    create = SimulatedLab.__init__

    def counting(*args):
        nonlocal calls, left
        calls, left = calls + 1, left - 1
        if left == 0:
            raise Killed
        return replace(*args)

    def remember(self, *args):
        create(self, *args)
        labs.append(self)

    monkeypatch.setattr("monitor.files.os.replace", counting)
    monkeypatch.setattr(SimulatedLab, "__init__", remember)
    record(tmp_path / "counted", kind, numerics, started)
    total = calls
    seen = set()
    for number in sorted({2, 3, 4, total - 1, total, *random.Random(kind).sample(range(5, total - 1), 7)}):
        run, left = tmp_path / f"killed-{number}", number
        with pytest.raises(Killed):
            record(run, kind, numerics, started)
        left = -1
        labs[-1].cut_power()
        if not run.exists():
            continue
        trust = trust_of(run)
        assert verify(run, trust, now=started).outcome is Outcome.INCONCLUSIVE
        before = leaves_of(run, trust)
        manifest = open_run(run, trust).manifest
        was_closing = manifest.is_closing
        assert before == expected[: len(before)]
        assert go_on(run, kind) == digest
        trust = trust_of(run)
        assert leaves_of(run, trust) == expected
        verdict = verify(run, trust, now=started)
        assert verdict.outcome is Outcome.ACCEPT, (number, verdict.reasons)
        log = parse_log((run / "chips/lab-chip-0000/log.bin").read_bytes())
        assert [record.kind for record in log].count(RecordKind.POWER_GAP) == (0 if was_closing else 1)
        seen.add(len(before))
    assert len(seen) >= 4, seen


def test_a_step_that_fails_costs_no_other_step(tmp_path, started, devices, monkeypatch):
    """An error in the body, a new start, and the inspection of the whole run on another device."""
    digest = record(tmp_path / "whole", "adamw", "exact", started)
    run, loop, batches = tmp_path / "run", Loop("adamw"), make_batches()
    options = {"seed": 5, "chips": 2, "checkpoint_every": 3, "lab": "lab", "hours": 1.0, "started": started}
    recorder = Recorder(loop.model, loop.optimizer, out=run, **options)
    loop.train(recorder, batches[:4])
    with pytest.raises(ZeroDivisionError), recorder.step(batches[4]):
        _ = 1 / 0
    with pytest.raises(CallerError, match=r"continue .* with Recorder\.resume"):
        recorder.finish()
    recorder = Recorder.resume(loop.model, loop.optimizer, out=run)  # with the very objects that failed
    loop.train(recorder, batches[4:6])
    monkeypatch.setattr(loop.optimizer, "zero_grad", lambda: 1 / 0)  # after the weights were written
    with pytest.raises(ZeroDivisionError):
        loop.train(recorder, batches[6:])
    assert go_on(run, "adamw") == digest
    settings = Settings(samples=2, seed="x", devices=("sse41",))
    verdict = inspect([run], trust_of(run), settings, now=started, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


def test_what_cannot_be_resumed(tmp_path, started):
    run = tmp_path / "run"
    with pytest.raises(CallerError, match="no lab folder"):
        go_on(run, "adamw")
    loop = Loop("adamw")
    recorder = Recorder(loop.model, loop.optimizer, out=run, chips=2, checkpoint_every=3, started=started)
    loop.train(recorder, make_batches()[:2])
    with pytest.raises(ChipwitnessError, match="powered on already"):
        go_on(run, "adamw")
    recorder._run.lab.cut_power()
    for other in (Loop("momentum"), Loop("adamw", width=4)):
        with pytest.raises(CallerError, match="another model or optimizer"):
            Recorder.resume(other.model, other.optimizer, out=run)
    with pytest.raises(CallerError, match=r"or go on with Recorder\.resume"):
        Recorder(loop.model, loop.optimizer, out=run)
    path = run / batch_path(1)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    again = Loop("adamw")
    with pytest.raises(EvidenceError, match="altered"):
        Recorder.resume(again.model, again.optimizer, out=run)
    (run / MANIFEST).unlink()
    with pytest.raises(EvidenceError, match="cannot read the manifest"):
        Recorder.resume(again.model, again.optimizer, out=run)
