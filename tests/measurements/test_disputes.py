from __future__ import annotations

import json
from typing import Any

import pytest

from tests.measurements.__main__ import main as measure
from tests.measurements.disputes import LIES, table, verdict


@pytest.mark.parametrize(("model", "numerics"), [("state-space", "exact"), ("convolutional", "rounded")])
def test_a_liar_is_named_at_the_step_of_its_lie(capsys: pytest.CaptureFixture[str], model: str, numerics: str) -> None:
    words = ["disputes", "--places", "1", "--model", model, "--numerics", numerics, "--json"]
    assert measure([*words, "--lie", "wrong-operator", "--lie", "change-sample"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["lie"], row["games"]) for row in rows] == [("wrong-operator", 1), ("change-sample", 1)]
    assert any("convicted" in row for row in rows)
    assert [line.split()[:3] for line in table(rows)] == [[model, numerics, row["lie"]] for row in rows]


def test_lies_about_numbers_are_among_those_told() -> None:
    assert {"wrong-operator", "change-sample", "tolerated-drift", "edited-optimizer"} <= set(LIES)


@pytest.mark.parametrize("wrong", [[], ["step 2: undecided"]])
def test_a_game_that_ends_otherwise_is_told(wrong: Any) -> None:
    row = {"work": "conv", "mode": "exact", "lie": "change-sample", "wrong": wrong}
    assert bool(verdict([row])) == bool(wrong)
