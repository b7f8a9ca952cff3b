"""``bench numerics``: every mode is measured on the same work and its log is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.bench import numerics
from analysis.bench.numerics import bf16_rows, matrix_rows, peak_memory, preset_rows, write
from firmware_sim.errors import CallerError

MODES = ["native", "plain FP64", "rounded recording", "rounded replaying", "exact"]


def test_matrix_rows_measure_every_mode() -> None:
    rows = matrix_rows((64, 300, 80), repetitions=1)
    assert [row["mode"] for row in rows] == [*MODES, "int8 products alone"]
    assert rows[0]["ratio"] == 1.0
    assert rows[2]["elements"] == 64 * 80
    assert rows[2]["published_code_bytes"] == 64 * 80 // 5
    assert rows[2]["log_bytes"] == rows[3]["log_bytes"]
    assert rows[3]["forced"] == 0


def test_bf16_rows_state_errors_beside_native_bf16() -> None:
    rows = bf16_rows(128, repetitions=1)
    assert [row["mode"] for row in rows] == ["native", "native FP32", "exact"] * 3
    gaussian, channel, _ = rows[2::3]
    assert gaussian["places_apart"] == 0
    assert channel["places_apart"] == 1
    assert all(row["rms_error_ratio"] < 1.1 for row in rows[2::3])


def test_preset_rows_replay_their_own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks are of new processes: those of two modes are measured, the others are made up."""
    measured = {"native", "rounded program"}
    monkeypatch.setattr(numerics, "peak_memory", lambda name, mode: peak_memory(name, mode) if mode in measured else 1)
    rows = preset_rows("digits-cnn", repetitions=1)
    assert [row["mode"] for row in rows] == [*MODES, "rounded program", "exact program"]
    assert rows[2]["log_bytes"] == rows[3]["log_bytes"] > 0
    assert rows[2]["log_bytes"] < rows[2]["published_code_bytes"]
    assert all(row["peak_mib"] > 0 for row in rows)
    assert rows[0]["peak_ratio"] == 1.0


def test_a_file_keeps_the_measurements_of_other_machines(tmp_path: Path) -> None:
    path = tmp_path / "numerics.json"
    write([{"work": "first"}], path)
    document = json.loads(path.read_text())
    (mine,) = document["measurements"]
    assert {"processor", "cores", "torch"} <= set(mine["hardware"])
    other = {"hardware": {**mine["hardware"], "cores": 1000}, "rows": [{"work": "theirs"}]}
    path.write_text(json.dumps({"about": "by hand", "measurements": [mine, other]}))
    write([{"work": "second"}], path)
    document = json.loads(path.read_text())
    assert document["about"] == "by hand"
    assert document["measurements"][0] == other
    assert document["measurements"][1]["rows"] == [{"work": "second"}]
    assert len(document["measurements"]) == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"measurements": [1]}'])
def test_a_file_of_another_kind_is_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "numerics.json"
    path.write_text(content)
    with pytest.raises(CallerError, match="cannot add measurements"):
        write([], path)
    assert path.read_text() == content


def test_peak_memory_is_the_process_s_own() -> None:
    held = bytearray(1 << 30)  # a child's mark must not begin at its parent's
    held[::4096] = b"x" * (1 << 18)
    assert 0 < peak_memory("digits-cnn", "native") < 1024
