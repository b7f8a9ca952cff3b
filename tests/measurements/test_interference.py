"""No call of a host tells what its chip will do: 200 programs, and what the comparison finds where one does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from firmware_sim import Chip
from tests.measurements.__main__ import main as measure
from tests.measurements.interference import CALLS, compare_draws, compare_secrets, verdict


def test_a_host_sees_no_difference_before_the_snapshots_differ(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure(["interference", "--programs", "200", "--seed", "1", "--json"]) == 0
    draws, secrets = json.loads(capsys.readouterr().out)
    assert (draws["programs"], secrets["programs"]) == (200, 20)
    assert draws["lines"] > 20 * draws["programs"]
    assert draws["problems"] == secrets["problems"] == []


def test_every_call_of_a_chip_is_among_them() -> None:
    told = {"power_off", "cut_power", "chip_id", "position", "utilisation"}  # by other names, or after each call
    assert set(Chip.__abstractmethods__) | {"shards"} <= told | set(CALLS)


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda host: [meter._next_moved for meter in host.meters], id="when the meter calls next"),
        pytest.param(lambda host: host.chip._due, id="the next moment"),
    ],
)
def test_a_host_that_learns_what_is_to_come_is_noticed(look: Any) -> None:
    assert any(compare_draws(seed, look=look)[1] for seed in range(20))


def test_other_secrets_show_where_they_are_not_renamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.measurements.interference._renamed", lambda journal: journal.seen)
    assert compare_secrets(0)[1]


def test_a_difference_is_told() -> None:
    assert verdict([{"work": "draws", "problems": ["program 3: line 1"]}])
    assert verdict([{"work": "draws", "problems": []}]) is None
