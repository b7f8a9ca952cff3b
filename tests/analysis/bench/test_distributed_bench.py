"""``bench distributed``: what it tells of a table, and the committed one."""

from __future__ import annotations

import json

from analysis.bench import distributed
from analysis.bench.origin import DATA


def test_committed_table_is_whole_and_as_promised():
    rows = json.loads((DATA / "distributed.json").read_text(encoding="utf-8"))["rows"]
    assert {row["work"] for row in rows} == set(distributed.CASES)
    assert distributed.verdict(rows) is None
    speeds = {row["recorded"]: row for row in rows if row["work"] == "speed"}
    assert speeds[False]["ratio"] <= 1.3
    assert speeds[False]["cpu_ratio"] <= 1.3
    assert any("of processor time" in line for line in distributed.table(rows))


def test_a_step_that_takes_too_long_on_two_processes_is_told():
    row = {"work": "speed", "mode": "fsdp2-2", "recorded": False, "ratio": 1.2, "cpu_ratio": 1.31}
    assert "1.31 times one process's" in str(distributed.verdict([row]))
    assert distributed.verdict([{**row, "cpu_ratio": 1.3}]) is None
