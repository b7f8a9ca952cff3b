"""What ``bench dispute`` counts, and what it promises of rounds."""

from __future__ import annotations

import pytest

from analysis.bench.dispute import run, table, verdict


@pytest.fixture(scope="module")
def rows():
    return run(steps=(4, 16), layers=(1, 3), seed=2)


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


def test_more_rounds_or_another_guilty_party_are_named(rows):
    row = next(row for row in rows if row["mode"] == "differ")
    assert "more than 3" in verdict([{**row, "rounds": 4, "most_rounds": 3}])
    assert verdict([{**row, "guilty": "right"}]) == "right is guilty in a game of 4 steps where the labs differ"
