"""PyTorch's operator database: every entry's first sample is as the committed result of all samples says."""

from __future__ import annotations

import json

import pytest

from analysis.bench.origin import DATA
from tests.measurements.operator_database import RANDOM, judged, run, verdict

pytest.importorskip("expecttest")


@pytest.fixture(scope="module")
def committed():
    (row,) = json.loads((DATA / "operator_database.json").read_text())["rows"]
    return row


@pytest.mark.slow
def test_first_samples_are_as_committed(committed):
    rows = {row["work"]: row["outcome"] for row in run(samples=1, progress=lambda done: None)}
    assert len(rows) > 600
    assert {name for name, outcome in rows.items() if outcome == "error"} == set()
    assert {name for name in committed["passes"] if rows[name] != "passes"} == set()
    assert {name for name, outcome in rows.items() if outcome == "differs"} <= set(committed["differs"])


def test_all_samples_of_most_entries_pass(committed):
    assert committed["counts"] == {key: len(committed[key]) for key in committed["counts"]}
    assert committed["counts"]["passes"] >= 588
    assert committed["samples"] > 15_000
    assert set(committed["error"]) == set()
    assert all("GPU" in reason for reason in committed["untried"].values())
    assert set(committed["passes"]) >= RANDOM - set(committed["refused"])


def test_a_wrong_result_differs(monkeypatch):
    from tests.measurements import operator_database

    (entry,) = (each for each in operator_database.entries() if each.full_name == "atan")
    assert judged(entry, "exact", 2)["outcome"] == "passes"
    monkeypatch.setattr(operator_database, "_close", lambda ours, theirs: False)
    assert judged(entry, "exact", 2)["outcome"] == "differs"
    assert verdict([{"work": "atan", "outcome": "error"}]) == "these end in an error: atan"


def test_an_entry_of_which_no_sample_can_be_tried_is_no_pass():
    from tests.measurements import operator_database

    (entry,) = (each for each in operator_database.entries() if each.full_name == "jiterator_unary")
    row = judged(entry, "exact", None)
    assert (row["outcome"], row["samples"]) == ("untried", {})
    assert "GPU" in row["first"]
