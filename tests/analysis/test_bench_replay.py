"""``replay``: each step natively, recorded and repeated, with what each costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from firmware_sim.errors import EvidenceError
from monitor.replay.repetition import ProgramTraining
from tests.measurements import replay
from tests.measurements.__main__ import main as measure


@pytest.fixture(autouse=True)
def _stay_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inspector.devices.enter", lambda name: None)


def test_every_mode_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peaks are of new processes, four for each numerics: those of ``exact`` are measured, the others are made up."""
    peak = replay._peak
    monkeypatch.setattr(replay, "_peak", lambda *words: peak(*words) if "exact" in words else 1.0)
    out = tmp_path / "replay.json"
    measure(["replay", "--preset", "digits-cnn", "--steps", "1", "--out", str(out), "--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [(row["numerics"], row["mode"]) for row in rows] == [
        (numerics, mode) for numerics in ("exact", "rounded") for mode in replay.MODES
    ]
    assert all(row["seconds"] > 0 for row in rows)
    assert all(row["peak_mib"] > 0 for row in rows if row["mode"] != "recorded body")
    assert [row["step_ratio"] for row in rows if row["mode"] == "recorded step"] == [1.0, 1.0]
    assert json.loads(out.read_text())["rows"] == rows
    assert len(replay.table(rows)) == 9


def test_a_replay_that_takes_too_long_is_named() -> None:
    row = {"work": "w", "mode": "replay", "numerics": "exact", "step_ratio": replay.MOST}
    assert replay.verdict([row]) is None
    assert "1.21 times the recorded step" in str(replay.verdict([{**row, "step_ratio": 1.21}]))


def test_a_step_that_leads_elsewhere_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    take = ProgramTraining.take_step

    def wrong(self, *args, **kwargs):
        leaf, session = take(self, *args, **kwargs)
        return replace(leaf, flop=leaf.flop + 1), session

    monkeypatch.setattr(ProgramTraining, "take_step", wrong)
    with pytest.raises(EvidenceError, match="step 1 of digits-cnn is another one"):
        replay.run(presets=["digits-cnn"], steps=1)


@pytest.mark.parametrize("words", [("--preset", "huge"), ("--steps", "0")])
def test_mistakes_exit_2(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert measure(["replay", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
