"""Chips whose hosts avoid snapshots, and honest ones: a small part of what was measured."""

from __future__ import annotations

import json

import pytest

from tests.measurements.__main__ import main as measure
from tests.measurements.suppression import verdict


def test_what_is_missing_shows_and_honest_chips_miss_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(["suppression", "--lies", "12", "--honest", "60", "--seed", "2", "--json"]) == 0
    rows = {row["work"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["avoids 100%"]["rejected"] == rows["avoids 100%"]["histories"] == 2
    assert rows["avoids 90%"]["accepted"] == 0
    assert rows["honest"]["rejected"] == 0
    assert rows["honest"]["demanded"] > 300


def test_a_broken_promise_is_told() -> None:
    assert verdict([{"work": "honest", "problems": ["history 3"]}])
    assert verdict([{"work": "honest", "problems": []}]) is None
