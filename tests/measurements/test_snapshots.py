"""``snapshots`` on a small run, and the figures that come with the program."""

from __future__ import annotations

import json
from typing import Any

import pytest

from analysis.bench.origin import DATA
from firmware_sim.errors import CallerError
from tests.measurements import snapshots

pytestmark = pytest.mark.usefixtures("kept_devices")


def test_each_snapshot_inside_of_a_step_is_compared_on_both_devices() -> None:
    told: list[Any] = []
    rows = snapshots.run(presets=["digits-cnn"], chips=3, steps=3, progress=told.append)
    assert [row["gradients"] for row in rows] == ["zeroed", "dropped", "dropped, state anew"]
    assert told == [1] * len(rows)
    for row in rows:
        assert row["snapshots"] == row["inside"] >= 9, "one in each step on each chip"
        assert row["compared"] == dict.fromkeys(snapshots.DEVICES, row["inside"])
        assert row["in_updates"] >= row["in_state"]
    assert [row["in_state"] > 0 for row in rows] == [False, False, True]
    assert snapshots.verdict(rows) is None
    row = rows[0]
    assert (
        snapshots.verdict([{**row, "compared": {"sse41": row["inside"] - 1, "mkl-compatible": row["inside"]}}])
        is not None
    )
    assert snapshots.verdict([{**row, "outcome": "INCONCLUSIVE"}]) is not None
    with pytest.raises(CallerError, match="take at least two"):
        snapshots.run(presets=["digits-cnn"], steps=1)


def test_what_comes_with_the_program_explains_a_thousand_snapshots() -> None:
    rows = json.loads((DATA / "snapshots.json").read_text())["rows"]
    assert {row["work"] for row in rows} == {"tiny-gpt", "digits-cnn", "llama-small"}
    assert sum(row["inside"] for row in rows) >= 1000
    assert sum(row["in_updates"] for row in rows) >= 200
    assert sum(row["in_state"] for row in rows) >= 200
    assert snapshots.verdict(rows) is None
