"""Honest steps have no path and dishonest ones have: some of what ``paths`` makes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firmware_sim.errors import CallerError
from tests.measurements import paths
from tests.measurements._path_losses import LOSSES
from tests.measurements.paths import dishonest, found_in, honest, verdict

OPERATORS = {
    "index_copy",
    "index_fill",
    "xlogy",
    "where",
    "scatter",
    "masked_fill",
    "nll_loss_backward",
    "clamp",
    "cumsum",
}


def chosen(steps: Any) -> Any:
    return [made for made in steps if made.name.split(".")[1:2] and made.name.split(".")[1] in OPERATORS]


def test_honest_losses_as_libraries_write_them_have_no_path() -> None:
    for made in itertools.islice(honest(), len(LOSSES)):
        assert found_in(made) == [], made.name


def test_honest_operators_once_twice_and_in_place_have_no_path() -> None:
    told = set()
    for made in chosen(honest()):
        try:
            found = found_in(made)
        except RuntimeError:
            continue  # no gradient passes
        told.add(made.name.split(".")[1])
        assert found == [], made.name
    assert told == OPERATORS


def test_dishonest_steps_have_a_path() -> None:
    steps = list(dishonest(60, seed=7))
    told = 0
    for made in (*chosen(steps[:-60]), *steps[-60:]):
        try:
            found = found_in(made)
        except CallerError:
            continue  # a form of the operator that is not recorded
        told += 1
        assert found, made.name
    assert told > 65


def test_steps_that_are_judged_wrongly_are_named_and_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = next(iter(honest()))
    monkeypatch.setattr(paths, "honest", lambda: [first])
    monkeypatch.setattr(paths, "dishonest", lambda count, seed: [replace(first, is_honest=False)])
    monkeypatch.setattr(paths, "_calls", dict)
    rows = paths.run(trials=1)
    assert [row["wrong"] for row in rows] == [[], [first.name]]
    assert first.name in str(verdict(rows))
    assert verdict(rows[:1]) is None
    paths.write(rows, tmp_path / "paths.json")
    assert [row["work"] for row in json.loads((tmp_path / "paths.json").read_text())["rows"]] == ["honest", "dishonest"]
