"""``odds`` without a run: numbers in, chances and prices out."""

from __future__ import annotations

import json

import pytest

from analysis.cli import main


def told(capsys, *words):
    assert main(["odds", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_twenty_five_audited_of_a_long_chain(capsys):
    data = told(capsys, "--steps", "80957", "--audited", "25")
    assert data["shown_segments"] == 7123
    assert data["next"]["swap"] == 72_862 - 25
    assert main(["odds", "--steps", "80957", "--audited", "25"]) == 0
    text = capsys.readouterr().out
    assert "25 of 80,957 segments replayed" in text
    assert "fewer than 7,123" in text


def test_what_to_audit_next_is_drawn_among_the_rest(capsys):
    words = ("--steps", "40", "--audited", "1,5,9-12", "--against", "together:8")
    data = told(capsys, *words, "--draw", "a secret")
    next_ones = data["drawn_next"]["positions"]
    assert len(next_ones) == data["next"]["together:8"] > 0
    assert not set(next_ones) & {1, 5, 9, 10, 11, 12}
    assert data["widest_gap"] == [13, 39]
    assert told(capsys, *words, "--draw", "another")["drawn_next"]["positions"] != next_ones


def test_a_run_to_come(capsys):
    words = ("--steps", "10000", "--checkpoint-every", "4", "--against", "scattered:100", "--step-seconds", "0.5")
    data = told(capsys, *words)
    assert data["replayed_steps"] <= 1000
    row = next(row for row in data["violations"] if row["violation"] == "scattered:100")
    assert row["seconds"] == row["needed_steps"] * 0.5
    assert row["escapes"] <= 0.1


def test_the_cheapest_interval(capsys):
    """Rare states take little room; frequent ones make short segments. The least cost is found by looking at each."""
    words = ("--steps", "5000", "--against", "together:50", "--intervals")
    costs = ("--state-cost", "3", "--step-cost", "1")
    data = told(capsys, *words, *costs)
    assert [each["interval"] for each in data["intervals"]] == [1 << power for power in range(13)]
    for each in data["intervals"]:
        every = str(each["interval"])
        alone = told(capsys, "--steps", "5000", "--checkpoint-every", every, "--against", "together:50")
        assert (each["segments"], each["drawn"]) == (alone["segments"], alone["drawn"])
        assert each["cost"] == 3 * each["states"] + each["replayed_steps"]
    assert data["cheapest"] == min(data["intervals"], key=lambda each: each["cost"])["interval"] not in (1, 4096)
    assert told(capsys, *words)["cheapest"] is None
    assert main(["odds", *words, *costs]) == 0
    assert "least" in capsys.readouterr().out


def test_more_scattered_edits_than_segments_still_take_a_draw(capsys):
    data = told(capsys, "--steps", "1000", "--against", "scattered:100", "--intervals", "100,1000")
    assert [each["drawn"] for each in data["intervals"]] == [1, 0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--intervals",), "--intervals is about a future run"),
        (("--steps", "9", "--intervals", "1,x"), "whole numbers such as 1,4,16"),
        (("--steps", "9", "--intervals", "10"), "each of 1 to 9 steps"),
        (("--steps", "9", "--intervals", "1", "--state-cost", "1"), "of a kept state and of a replayed step together"),
        (("--steps", "9", "--intervals", "1", "--state-cost", "-1", "--step-cost", "1"), "at least 0"),
        (("--steps", "9", "--intervals", "1", "--segments", "2"), "leave out --audited and --segments"),
        (("--steps", "9", "--state-cost", "2"), "need --intervals"),
        (("--steps", "9", "--audited", "10"), "cannot draw 10 of 9 segments"),
        (("--steps", "9", "--audited", "3-9"), "the segments are 0 … 8"),
        (("--steps", "9", "--audited", "x"), "takes a number, or positions"),
        (("--steps", "9", "--audited", "4", "--draw", "x"), "what has already been audited"),
        (("--steps", "9", "--confidence", "1"), "confidence must be below 1"),
        (("--steps", "9", "--against", "data:2"), "a share in (0, 1]"),
        (("--steps", "0"), "a chain must have 1 to"),
        ((), "either RUN or --steps"),
    ],
)
def test_a_mistake_is_one_line(words, says, capsys):
    assert main(["odds", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
