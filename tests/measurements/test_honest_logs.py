"""The committed counts of honest logs: no pair is in doubt by the others, and a log that steers would be."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from inspector.inspection.rounding_logs import COMMITTED
from tests.measurements import honest_logs

ROWS = json.loads(COMMITTED.read_text())["rows"]


def test_no_honest_pair_is_in_doubt_by_the_counts_of_all_others() -> None:
    assert len(ROWS) >= 100
    assert {(row["recorded_on"], row["replayed_on"]) for row in ROWS} == set(honest_logs.PAIRS)
    assert all(row["commit"] and row["processor"] for row in ROWS)
    assert honest_logs.verdict(ROWS) is None


def test_one_bit_in_a_hundred_would_be_in_doubt_in_each_program() -> None:
    for work in dict.fromkeys(row["work"] for row in ROWS):
        place = next(index for index, row in enumerate(ROWS) if row["work"] == work)
        rows = copy.deepcopy(ROWS)
        decisions = rows[place]["decisions"]
        for each in decisions["classes"]:
            each[4] = -(-each[3] // 100)
        decisions["unlike"] = [[1, 0, "x", each[0], each[1], each[3], each[4], 0] for each in decisions["classes"]]
        if sum(each[3] for each in decisions["classes"]) < 500:
            continue  # of fewer places honest logs may decide that many
        assert str(honest_logs.verdict(rows)).startswith(f"{work}, seed ")


def test_pairs_that_a_file_holds_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "rows.json"
    asked = []

    def trial(pool: Any, row: Any, role: Any, logs: Any) -> Any:
        asked.append((row["seed"], role))
        return {"seconds": 1.0, "entries": 2, "decisions": {"classes": [], "unlike": []}}

    monkeypatch.setattr(honest_logs, "_trial", trial)
    first = honest_logs.run(presets=["digits-cnn"], pairs=2, out=out)
    assert asked == [(1, "recording"), (1, "replaying"), (1, "recording"), (1, "replaying")]
    asked.clear()
    again = honest_logs.run(presets=["digits-cnn"], pairs=3, out=out)
    assert (again[:2], len(again)) == (first, 3)
    assert asked == [(1, "recording"), (1, "replaying")]
