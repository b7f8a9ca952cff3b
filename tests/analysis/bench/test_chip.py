from __future__ import annotations

import json
from typing import Any

import pytest

from analysis.bench import chip
from analysis.bench._decade import decade
from analysis.cli import main
from firmware_sim import DEPLOYMENT
from firmware_sim.errors import CallerError


def test_decade_in_64_kib(tmp_path):
    """Every inspection of ten years accepts, whatever the host floods, and the memory never runs over."""
    found: dict[str, Any] = decade(tmp_path / "chip")
    assert 0 < found["used"] <= found["capacity"] == 65536
    # 365 are expected; the flood of seven years silences the chip in a part of their last quarter.
    assert 270 < found["snapshots"] < 440
    assert found["commits"] > 9000
    assert found["records"] > 2 * DEPLOYMENT.cells + found["commits"]
    assert set(found["refused"]) == {"BAD_BEACON", "QUOTA_EXCEEDED", "CHIP_SPENT"}
    assert found["spent"] == 7
    assert found["cell_writes"] == -(-(found["records"] - found["commits"]) // DEPLOYMENT.cells)


def test_decade_without_pruning_does_not_fit(tmp_path, monkeypatch):
    """What the checkpoints are good for: the chip is silent before its second year is over."""
    monkeypatch.setattr("firmware_sim.firmware.FirmwareChip.prune", lambda chip, signed: 0)
    monkeypatch.setattr("firmware_sim.checks.CheckedChip.checkpoint", lambda checked: checked.since)
    found: dict[str, Any] = decade(tmp_path / "chip", years=4)
    assert found["spent"] == 3
    assert found["used"] <= 65536


def test_all_parts_are_measured(capsys, tmp_path):
    out = tmp_path / "chip.json"
    words = ["bench", "chip", "--chips", "20", "--megabytes", "8", "--years", "1", "--json", "--out", str(out)]
    code = main(words)
    rows = json.loads(capsys.readouterr().out)
    assert code == (0 if chip.verdict(rows) is None else 3)  # a busy machine may miss a target
    assert json.loads(out.read_text())["rows"] == rows
    assert [row["work"] for row in rows] == [
        *["chips"] * 2,
        *["freeze"] * 3,
        *["digest"] * 3,
        *["tiny-gpt"] * 2,
        *["meter"] * 2,
        *["audit"] * 6,
        "decade",
    ]
    freeze = {row["mode"]: row["ratio"] for row in rows if row["work"] == "freeze"}
    assert freeze["copy"] == 1 < freeze["record"]
    assert all(row["bytes"] < chip.CHIP_BYTES for row in rows if row["work"] == "chips")
    audits = [row for row in rows if row["work"] == "audit"]
    assert audits[3]["old"] > 10 * audits[1]["old"]
    assert all(row["new"] >= int(row["mode"].split()[0]) for row in audits)


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"work": "freeze", "mode": "freeze", "ratio": 1.31}, "1.31 plain copies, more than 1.3"),
        ({"work": "freeze", "mode": "record", "ratio": 9.0}, None),
        ({"work": "digest", "mode": "blocks", "ratio": 0.7, "share": 0.84}, "0.84 of its threads' SHA-256"),
        ({"work": "digest", "mode": "blocks", "ratio": 0.5, "share": 0.86}, None),
        ({"work": "tiny-gpt", "mode": "snapshot in each step", "ratio": 1.11}, "1.11 plain steps, more than 1.1"),
        ({"work": "meter", "mode": "a new call", "ratio": None, "seconds": 6e-6}, "6.0 µs, more than 5"),
        ({"work": "chips", "mode": "resident", "ratio": None, "bytes": 2.1e6}, "2.1 MB a chip"),
        ({"work": "audit", "mode": "new", "ratio": 1.6, "old": 16000}, "behind 16000: 1.60 times as long"),
        ({"work": "decade", "mode": "x", "ratio": None, "used": 65537, "capacity": 65536}, "65537 bytes do not fit"),
    ],
)
def test_missed_targets_are_named(row, text):
    found = chip.verdict([row])
    assert found is None if text is None else text in str(found)


def test_nothing_to_measure():
    with pytest.raises(CallerError, match="needs at least one chip, one megabyte and one year"):
        chip.run(chips=0)
