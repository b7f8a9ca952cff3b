"""The machine that plays the ledger, at its smallest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.measurements.__main__ import main as measure
from tests.measurements._ledger_lies import LIES
from tests.measurements.ledger import EVENTS, verdict, worlds

pytestmark = pytest.mark.usefixtures("kept_devices")


def test_every_lie_and_every_event_is_played_as_often() -> None:
    for honest, kinds in ((False, LIES), (True, EVENTS)):
        every = worlds(2 * len(kinds), 0, honest=honest)
        assert len({kind for world in every for plan in world.plan for kind in plan.values()}) == len(kinds)
        assert every == worlds(2 * len(kinds), 0, honest=honest) != worlds(2 * len(kinds), 1, honest=honest)


def test_a_lie_and_a_crash_keep_the_laws(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(["ledger", "--lies", "1", "--honest", "1", "--seed", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["mode"] for row in rows} == {"lies", "honest"}
    assert not any(row["problems"] for row in rows)


@pytest.mark.parametrize("problems", [[], ["accepted"]])
def test_what_breaks_a_law_is_told(problems: Any) -> None:
    assert bool(verdict([{"work": "cut", "problems": problems}])) == bool(problems)
