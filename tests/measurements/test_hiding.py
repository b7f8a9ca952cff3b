"""Labs that keep another model in their chips' memory: a small part of what was measured."""

from __future__ import annotations

import json

import pytest

from tests.measurements import hiding
from tests.measurements.__main__ import main as measure


def test_each_way_is_played_and_caught_as_verdicts_print(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hiding, "SETTINGS", ((1, 10),))
    assert measure(["hiding", "--tries", "10", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["work"] for row in rows] == list(hiding.WAYS)
    assert sum(row["tries"] for row in rows) == 10
    assert {round(row["printed"], 2) for row in rows} == {0.68}
    assert 4 <= sum(row["caught"] for row in rows) <= 10


def test_a_way_that_is_caught_too_seldom_is_told() -> None:
    row = {"work": "at once", "mode": "1 chips, 2 ticks", "caught": 1, "tries": 400, "high": 0.1, "printed": 0.5}
    assert "at once (1 chips, 2 ticks: 1 of 400)" in str(hiding.verdict([row]))
    assert hiding.verdict([{**row, "high": 0.5}]) is None
