"""Mixed precision over five seeds: what was measured, and one arrangement again with fewer."""

from __future__ import annotations

import json

import pytest

from analysis.bench.origin import DATA
from firmware_sim.errors import CallerError
from tests.measurements import precision


def test_each_arrangement_is_accepted_and_learns_as_native_training_does():
    rows = json.loads((DATA / "precision.json").read_text())["rows"]
    assert {(row["work"], row["mode"]) for row in rows} == {
        (work, mode) for work in precision.ARRANGEMENTS for mode in ("exact", "rounded")
    }
    assert {row["seeds"] for row in rows} == {5}
    assert precision.verdict(rows) is None
    assert all(abs(row["loss"] - row["native_loss"]) < 0.01 * row["native_deviation"] for row in rows)


def test_two_seeds_are_as_measured(monkeypatch):
    monkeypatch.setattr(precision, "ARRANGEMENTS", dict(list(precision.ARRANGEMENTS.items())[:1]))
    rows = precision.run(seeds=2, steps=10, progress=lambda done: None)
    assert [row["outcome"] for row in rows] == ["ACCEPT", "ACCEPT"]
    assert all(abs(row["loss"] - row["native_loss"]) < 0.01 for row in rows)
    assert precision.verdict([{**rows[0], "native_deviation": 0.0}]) is not None
    assert precision.verdict([{**rows[0], "outcome": "REJECT"}]) is not None


def test_one_seed_tells_of_no_deviation():
    with pytest.raises(CallerError, match="at least 2 seeds"):
        precision.run(seeds=1)
