"""Emulated devices in their own processes: they replay, train, and are refused where an engine fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from firmware_sim.errors import DeviceError
from inspector.inspection.replays import replay
from inspector.inspection.verdict import Outcome
from inspector.replay import _worker
from inspector.replay.trial import run_trial

if TYPE_CHECKING:
    from inspector.replay.pool import DevicePool
    from tests.conftest import Recorded

DEVICE = "emulated-tensor-core"


def test_an_emulated_device_replays_bit_for_bit_and_says_what_it_is(honest: Recorded, devices: DevicePool) -> None:
    verdict = replay(honest.run, honest.trust, 0, DEVICE, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT
    assert verdict.evidence["replays"][0]["device"] == DEVICE
    known = devices.run(DEVICE, {"action": "fingerprint"})
    native = devices.run("native", {"action": "fingerprint"})
    assert known["fingerprint"] != native["fingerprint"]
    assert known["settings"]["environment"]["CHIPWITNESS_EMULATED_ORDER"] == "tensor-core"
    assert set(known["engines"]) == set(native["engines"])
    assert known["engines"]["FP64 products"] == "serves"


def refuse(*_: str, **__: str) -> dict[str, str]:
    raise DeviceError("this device fails the known-answer test of FP64 products")


@pytest.mark.parametrize("action", ["fingerprint", "replay", "drift"])
def test_no_job_runs_before_the_engines_are_tested(
    action: str, honest: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_worker, "require_engines", refuse)
    monkeypatch.setattr("inspector.replay.drift.require_engines", refuse)
    (key,) = honest.trust.labs.values()
    job: dict[str, Any] = {
        "run": str(honest.run),
        "lab_key": key.raw.hex(),
        "manifest": None,
        "segments": [0],
        "logs": [],
    }
    with pytest.raises(DeviceError, match="known-answer"):
        _worker._ACTIONS[action](job)


def test_no_trial_runs_before_the_engines_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inspector.replay.trial.require_engines", refuse)
    with pytest.raises(DeviceError, match="known-answer"):
        run_trial({"numerics": "exact", "accelerator": "cpu", "logs": None, "role": "recording"})


def test_a_lab_can_train_on_an_emulated_device(tmp_path: Path) -> None:
    """The command becomes the device: another fingerprint in the transcript, the same state as on ``native``."""
    ends = {}
    for device in ("native", DEVICE):
        command = ["train", "--preset", "digits-cnn", "--steps", "2", "--numerics", "exact", "--seed", "3"]
        command += ["--device", device, "--out", str(tmp_path / device), "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "analysis.cli", *command],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ,
        )
        assert done.returncode == 0, done.stderr
        ends[device] = done.stdout.partition('"state_digest": "')[2].partition('"')[0]
    assert ends[DEVICE] == ends["native"] != ""
