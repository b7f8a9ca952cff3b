"""What ``bench cluster`` says of a second inspection on a pool: how long it takes, and whether it says the same."""

from __future__ import annotations

import json

import pytest

from analysis.bench import _pooled, cluster
from analysis.bench.cluster import table, verdict, write
from firmware_sim.errors import DeviceError

ROW = {"work": "pool", "mode": "inspect", "seconds": 2.0, "ratio": 0.25, "outcome": "ACCEPT", "equal": True}


def test_a_pool_that_saves_too_little_or_says_something_else_is_a_problem():
    assert verdict([ROW]) is None
    assert verdict([{**ROW, "ratio": 0.34}]) == (
        "a second inspection on a pool takes 0.34 times as long as one without it"
    )
    assert verdict([{**ROW, "equal": False}]) == "the verdict on inspect is another one with a pool"
    assert table([ROW]) == ["pool       inspect                2.00 s   ratio: 0.25"]


@pytest.mark.parametrize(
    ("seconds", "other", "ratio", "equal"),
    [
        ({"alone": [9.0, 8.0, 9.0], "pool": [5.0, 3.0, 2.0, 1.0]}, None, 2 / 8, True),
        ({"alone": [9.0, 8.0, 9.0], "pool": [5.0, 3.0, 2.0, 1.0]}, {"outcome": "REJECT", "evidence": {}}, 2 / 8, False),
    ],
)
def test_commands_are_compared_in_pairs(tmp_path, monkeypatch, seconds, other, ratio, equal):
    accepted = {"outcome": "ACCEPT", "evidence": {}}
    left = {mode: iter(times) for mode, times in seconds.items()}

    def timed(words):
        mode = "pool" if "--pool" in words else "alone"
        took = next(left[mode])
        return (other if other is not None and took == 1.0 else accepted), took

    monkeypatch.setattr(_pooled, "_timed", timed)
    monkeypatch.setattr(_pooled, "_pool", _nothing)
    row = _pooled.pooled(["run"], tmp_path, 3, lambda _: None)
    assert (row["ratio"], row["equal"]) == (ratio, equal)
    assert (row["seconds"], row["alone_seconds"], row["first_seconds"], row["pairs"]) == (2.0, 9.0, 5.0, 3)


class _nothing:
    def __init__(self, path):
        self.path = path

    def __enter__(self):
        return self.path

    def __exit__(self, *_):
        pass


def test_a_command_without_a_verdict_is_no_measurement():
    with pytest.raises(DeviceError, match="there is no run folder"):
        _pooled._timed(["/nowhere", "--trust", "/nowhere", "--samples", "1"])


def test_works_are_written_one_by_one(tmp_path):
    path = tmp_path / "rows.json"
    write([{**ROW, "work": "scheduler", "mode": "1 segment"}], path)
    write([ROW], path)
    write([{**ROW, "ratio": 0.2}], path)
    rows = json.loads(path.read_text())["rows"]
    assert [(row["work"], row["ratio"]) for row in rows] == [("scheduler", 0.25), ("pool", 0.2)]
    assert set(cluster.CASES) == {"scheduler", "pool", "verdicts", "kills"}
