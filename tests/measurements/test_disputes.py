from __future__ import annotations

import json
from typing import Any

import pytest

from tests.measurements.__main__ import main as measure
from tests.measurements.disputes import LIES, holds_element, table, verdict


@pytest.mark.parametrize(("model", "numerics"), [("state-space", "exact"), ("convolutional", "rounded")])
def test_a_liar_is_named_at_the_step_of_its_lie(capsys: pytest.CaptureFixture[str], model: str, numerics: str) -> None:
    words = ["disputes", "--places", "1", "--model", model, "--numerics", numerics, "--json"]
    assert measure([*words, "--lie", "wrong-operator", "--lie", "change-sample"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["lie"], row["games"]) for row in rows] == [("wrong-operator", 1), ("change-sample", 1)]
    assert any("convicted" in row for row in rows)
    assert [row["parties"] for row in rows] == [0, 0]
    assert [line.split()[:3] for line in table(rows)] == [[model, numerics, row["lie"]] for row in rows]


def test_an_honest_party_stands_alone_among_liars_and_the_tile_is_that_of_the_lie(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "disputes",
        "--places",
        "3",
        "--model",
        "convolutional",
        "--numerics",
        "exact",
        "--lie",
        "unseen-write",
        "--json",
    ]
    assert measure(words) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["convicted"] == 3
    assert row["parties"] == 4


@pytest.mark.parametrize(
    ("tile", "holds"),
    [
        (None, True),
        ("elements 0 to 99 of result 0", True),
        ("elements 43 to 99 of result 0", False),
        ("elements 0 to 99 of result 1", False),
        ("part 2 of 4 of element 42 of result 0", True),
        ("element 41 of result 0", False),
    ],
)
def test_a_tile_that_does_not_hold_the_altered_element_is_told(tile: str | None, holds: bool) -> None:
    assert holds_element(tile, 42) is holds


def test_lies_about_numbers_are_among_those_told() -> None:
    assert {"wrong-operator", "change-sample", "tolerated-drift", "edited-optimizer"} <= set(LIES)


@pytest.mark.parametrize("wrong", [[], ["step 2: undecided"]])
def test_a_game_that_ends_otherwise_is_told(wrong: Any) -> None:
    row = {"work": "conv", "mode": "exact", "lie": "change-sample", "wrong": wrong}
    assert bool(verdict([row])) == bool(wrong)
