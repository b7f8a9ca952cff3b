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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--steps", "9", "--audited", "10"), "cannot draw 10 of 9 segments"),
        (("--steps", "9", "--audited", "3-9"), "there are segments 0 … 8"),
        (("--steps", "9", "--audited", "x"), "takes a number, or positions"),
        (("--steps", "9", "--audited", "4", "--draw", "x"), "what was audited already"),
        (("--steps", "9", "--confidence", "1"), "confidence must be below 1"),
        (("--steps", "9", "--against", "data:2"), "a share in (0, 1]"),
        (("--steps", "0"), "a chain has 1 to"),
        ((), "either RUN or --steps"),
    ],
)
def test_a_mistake_is_one_line(words, says, capsys):
    assert main(["odds", *words]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
