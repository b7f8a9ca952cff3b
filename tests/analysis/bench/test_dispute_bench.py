"""What ``bench dispute`` counts, and what it promises of rounds."""

from __future__ import annotations

import pytest

from analysis.bench.dispute import run, table, verdict


@pytest.fixture(scope="module")
def rows():
    return run(steps=(4, 16), layers=(1, 3), terms=(20_000, 80_000), preset="tiny-gpt", seed=2)


def test_labs_that_agree_are_asked_for_their_results_alone(rows):
    agree = [row for row in rows if row["mode"] == "agree"]
    assert [(row["steps"], row["guilty"], row["rounds"], row["questions"]) for row in agree] == [
        (4, None, 1, 8),
        (16, None, 1, 8),
    ]
    assert set(agree[0]["bytes_by_question"]) == {"claim", "results", "step", "result"}
    assert agree[1]["bytes"] < 1.05 * agree[0]["bytes"], "four times the steps add hashes of proofs alone"


def test_a_game_takes_no_more_rounds_than_the_searches(rows):
    assert verdict(rows) is None
    differ = [row for row in rows if row["mode"] == "differ"]
    assert all(row["guilty"] == "wrong" for row in differ)
    few, many = (next(row for row in differ if (row["steps"], row["branching"]) == (steps, 2)) for steps in (4, 16))
    assert many["rounds"] - few["rounds"] == 2
    wide = next(row for row in differ if row["branching"] == 16)
    assert wide["rounds"] < many["rounds"]
    one, three = (row for row in rows if row["work"] == "nodes")
    assert one["nodes"] < three["nodes"]
    assert one["program_bytes"] < three["program_bytes"]
    assert len(table(rows)) == len(rows) + 1


def test_of_a_longer_product_a_party_opens_no_more(rows):
    """Of 5 and of 20 chunks of a factor, one part of two chunks at most."""
    few, many = (row["bytes"] for row in rows if row["work"] == "terms")
    assert many < 1.2 * few < 1.2 * 4_500_000


def test_an_operator_that_takes_too_much_is_named(rows):
    counted = [row for row in rows if row["work"] == "tiny-gpt"]
    assert {row["case"] for row in counted} == {"output"}
    assert counted[0]["bytes"] == max(row["bytes"] for row in counted) > 1_000_000
    assert "not opened" in str(verdict([{**counted[0], "case": "not opened: too much"}]))
    assert f"takes {30_000_000} bytes" in str(verdict([{**counted[0], "bytes": 30_000_000}]))


def test_more_rounds_or_another_guilty_party_are_named(rows):
    row = next(row for row in rows if row["mode"] == "differ")
    assert "more than 3" in str(verdict([{**row, "rounds": 4, "most_rounds": 3}]))
    assert verdict([{**row, "guilty": "right"}]) == "right is guilty in a game of 4 steps where the labs differ"
