"""What ``cluster`` says of the runs that one command inspects: how long each but the first takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.demo import LABS
from firmware_sim.errors import DeviceError
from tests.measurements import cluster
from tests.measurements.cluster import run, table, verdict, write

ROW = {"work": "runs", "mode": "inspect", "seconds": 0.25, "ratio": 0.05, "outcome": "ACCEPT"}


def test_a_further_run_that_takes_too_long_or_is_not_accepted_is_a_problem() -> None:
    assert verdict([ROW]) is None
    assert verdict([{**ROW, "seconds": 0.51}]) == "each run from the second on takes 0.51 s, more than 0.5"
    assert verdict([{**ROW, "outcome": "ACCEPT/REJECT"}]) == "honest runs in one command: ACCEPT/REJECT"
    assert table([ROW]) == ["runs       inspect                0.25 s   ratio: 0.05"]


def test_commands_with_one_run_and_with_several_are_compared_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, together = iter([9.0, 8.0, 9.0]), iter([10.0, 12.0, 17.0])

    def timed(folder: Any, labs: Any) -> Any:
        return "ACCEPT", next(alone if len(labs) == 1 else together)

    monkeypatch.setattr(cluster, "_timed", timed)
    monkeypatch.setattr(cluster, "_train", lambda *_: None)
    (row,) = run(cases=["runs"], pairs=3)
    further = (row["runs"] - 1) * row["seconds"]
    assert (further, row["alone_seconds"], row["outcome"]) == (4.0, 9.0, "ACCEPT")


def test_a_command_without_a_verdict_is_no_measurement(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"ended without a verdict: .*there is no run folder"):
        cluster._timed(tmp_path, LABS[:1])


def test_works_are_written_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    write([{**ROW, "work": "scheduler", "mode": "1 segment"}], path)
    write([ROW], path)
    write([{**ROW, "ratio": 0.2}], path)
    rows = json.loads(path.read_text())["rows"]
    assert [(row["work"], row["ratio"]) for row in rows] == [("scheduler", 0.05), ("runs", 0.2)]
    assert set(cluster.CASES) == {"scheduler", "runs", "verdicts", "kills"}
