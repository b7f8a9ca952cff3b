"""What serves presets serves any run: a loop's own steps as a trial, as a curve of losses, and without control."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from analysis.bench import quality
from analysis.cli import main
from firmware_sim.errors import CallerError, EvidenceError
from inspector.inspection.drift import drift, drift_text
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.replay.curve import CONTROL, run_curve
from inspector.replay.trial import run_trial
from monitor import Recorder, numerics
from monitor.declaration.numbers import declared_numbers
from monitor.programs.interpreter import loss_of
from monitor.replay.repetition import scalars_of
from monitor.replay.steps import ProgramSteps, execution_of
from monitor.transcript import RunFolder

if TYPE_CHECKING:
    from inspector.replay.pool import DevicePool
    from tests.conftest import Recorded

pytestmark = pytest.mark.usefixtures("kept_devices")

STEPS = 4


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trust]:
    """A run of a network with dropout, which commits to its losses."""
    out = tmp_path_factory.mktemp("loop") / "run"
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Dropout(0.4), nn.Linear(256, 5))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    recorder = Recorder(model, optimizer, out=out, seed=2, chips=2)
    generator = torch.Generator().manual_seed(4)
    trust = out.with_name("run.trust.json")
    for number in range(STEPS):
        if number == 1:  # the second step runs another program: the first one made Adam's state
            shutil.copy(trust, out.with_name("early.trust.json"))
        batch = {"x": torch.randn(32, 128, generator=generator), "y": torch.randint(5, (32,), generator=generator)}
        with recorder.step(batch) as step:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            step.commit(loss=loss)
    recorder.finish()
    return out, Trust.load([trust], [out])


def job_of(run: RunFolder, trust: Trust, **more: Any) -> dict[str, Any]:
    key = trust.key_of(run.metadata.lab).raw.hex()
    return {"run": str(run.folder), "manifest": run.manifest_digest, "lab_key": key, **more}


def test_a_loop_s_losses_under_other_numerics(loop):
    run = open_run(*loop)
    curves = {mode: run_curve(job_of(run, loop[1], mode=mode))["losses"] for mode in ("exact", "native", CONTROL)}
    assert curves["exact"] == [float(loss_of(run.leaf(step).loss)) for step in range(1, STEPS + 1)]
    assert curves["native"] != curves["exact"] != curves[CONTROL]
    # Without control dropout takes the same elements: the losses differ by rounding alone.
    assert curves["native"] == pytest.approx(curves["exact"], rel=1e-5)
    assert curves[CONTROL] == pytest.approx(curves["exact"], rel=1e-2)


def test_without_the_step_s_keys_dropout_takes_other_elements(loop):
    """The test of the test above."""
    steps = ProgramSteps(open_run(*loop), 0)
    with pytest.raises(EvidenceError, match="fewer random keys"):
        steps.take_under(lambda keys: numerics.recording("native"))


def test_a_trial_of_a_run_is_that_of_its_task(honest: Recorded) -> None:
    run = open_run(honest.run, honest.trust)
    task = run.task
    options = {"numerics": "exact", "logs": None, "role": "recording"}
    preset = {"preset": task.preset, "steps": task.steps, "seed": task.seed, "batch_size": task.batch_size}
    recorded, derived = run_trial(job_of(run, honest.trust, **options)), run_trial({**preset, **options})
    for name in ("weights", "optimizer", "losses", "last_loss"):
        assert recorded[name] == derived[name]


def test_numbers_nobody_recorded_are_those_of_the_recorder(make_run) -> None:
    recorded = make_run(steps=5, optimizer="adamw", warmup=3)
    run = open_run(recorded.run, recorded.trust)
    program = run.program(execution_of(run.leaf(1)).program)
    numbers = declared_numbers(run.declared, program, run.checkpoint(0))
    for step in range(1, 6):
        assert next(numbers) == scalars_of(program, execution_of(run.leaf(step)))


def test_a_loop_drifts_without_control(loop, devices: DevicePool) -> None:
    run, trust = loop
    rows: list[Any] = list(drift(run, trust, ["emulated-split-k"], worker=devices.run))
    (row,) = rows
    assert row["native_first_different_step"] in range(1, STEPS + 1)
    assert 0 < row["native_drift_max"] < 0.1
    assert 0 < row["native_weights_different"] <= 1
    assert row["logged_decisions"] >= row["turned_decisions"] > 0
    assert len(row["turned_by_step"]) == STEPS
    assert f"{row['turned_decisions']} of {row['logged_decisions']}" in drift_text(row)


def test_the_same_device_does_not_drift(loop, devices: DevicePool) -> None:
    run, trust = loop
    (row,) = drift(run, trust, ["native-1"], worker=devices.run)  # one thread, as here
    assert (row["native_first_different_step"], row["native_drift_max"], row["turned_decisions"]) == (None, 0.0, 0)
    assert "ends in the same bits" in drift_text(row)


def test_programs_that_nobody_agreed_to_do_not_run(loop) -> None:
    folder, trust = loop
    with pytest.raises(CallerError, match="countersigned"):
        next(drift(folder, replace(trust, countersigned=()), ["native"]))
    early = Trust.load([folder.with_name("early.trust.json")], [folder])
    with pytest.raises(CallerError, match="step 2: "):
        next(drift(folder, early, ["native"]))
    with pytest.raises(CallerError, match="unknown device"):
        next(drift(folder, trust, ["no-such"]))


def test_the_command(loop, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drift", str(loop[0]), "--device", "native", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["device"] == "native"
    assert main(["drift", str(loop[0] / "nothing")]) == 2


def test_whether_a_loop_learns_under_control(loop, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "quality", "--run", str(loop[0]), "--json"]) in (0, 1)
    rows = {(row["mode"], row["device"]): row for row in json.loads(capsys.readouterr().out)}
    assert set(rows) == set(quality.COLUMNS)
    assert {(row["work"], row["steps"], row["seeds"]) for row in rows.values()} == {("run", STEPS, 1)}
    exact, control = (rows[mode, "native-1"]["early_gap"] for mode in ("exact", CONTROL))
    assert 0 < exact < 1e-5 < control
    assert main(["bench", "quality", "--run", str(loop[0]), "--out", "x.json"]) == 2


def test_a_run_without_losses_has_no_curve(record_loop) -> None:
    model = nn.Linear(3, 2)

    def body(model, optimizer, batch):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    recorded = record_loop(model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.ones(2, 3)] * 2, body)
    run = open_run(recorded.run, recorded.trust)
    steps = ProgramSteps(run, 0)
    assert steps.take_under(partial(numerics.recording, "native"))[1] == ""
    with pytest.raises(CallerError, match="commits to no losses"):
        quality.run(recorded=(recorded.run, recorded.trust))
    with pytest.raises(CallerError, match="commits to no loss"):
        run_curve(job_of(run, recorded.trust, mode="native"))
