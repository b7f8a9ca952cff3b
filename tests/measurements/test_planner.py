"""Plans beside exhaustive search, and what the command says of them: a small part of what was measured."""

from __future__ import annotations

import json

import pytest

from tests.measurements import planner
from tests.measurements.__main__ import main as measure


def test_plans_of_one_site_are_the_cheapest(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(["planner", "--cases", "one", "--problems", "4", "--seed", "2", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["work"], row["equal"], row["missed"]) == ("one", 4, [])


def test_a_known_schedule_of_three_equal_sites_is_found() -> None:
    found = planner.three_equal_sites()
    assert found["known_detection"] >= 0.9
    assert found["known_false_alarm"] <= 0.01
    assert 0.8 * 406 <= found["bound"] <= found["plan"] <= found["known"] == 406


def test_what_is_missed_is_told_in_the_name_of_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "three_equal_sites", lambda: {"plan": 430.0, "bound": 317.0, "known": 406})
    assert measure(["planner", "--cases", "example"]) == 3
    assert capsys.readouterr().err == "python -m tests.measurements: example: dearer than a known plan\n"
