"""A whole game about a preset, on a small one."""

from __future__ import annotations

from pathlib import Path

from tests.measurements.whole_game import PRODUCTS, run, table


def test_the_lab_that_altered_one_element_of_a_product_is_guilty_by_what_the_game_received(tmp_path: Path) -> None:
    [row] = run(preset="tiny-gpt", folder=tmp_path / "runs")
    assert (row["guilty"], row["step"]) == ("liar", 2), row
    assert row["operator"] in PRODUCTS
    assert row["verifies"]
    assert sum(row["bytes_by_question"].values()) <= row["bytes"] < 4_000_000
    assert "liar is guilty" in table([row])[0]
    [again] = run(preset="tiny-gpt", folder=tmp_path / "runs")
    assert (again["guilty"], again["step_seconds"]) == ("liar", row["step_seconds"])
