"""Every lie has a prediction, the predictions are right, and the measurement can tell a wrong one."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction

import numpy as np
import pytest

from analysis.bench.origin import DATA
from firmware_sim.errors import CallerError
from firmware_sim.lies import Chance
from inspector.campaign.rates import load_rates
from monitor.lab.lies import every_lie
from tests.measurements import evasions
from tests.measurements.evasions import LAWS, LIES, Scene

pytestmark = pytest.mark.usefixtures("kept_devices")


def test_every_lie_has_a_law_or_is_told_apart():
    """One training of one lab cannot tell those apart, or no draw decides them."""
    assert {name for name, lie in every_lie().items() if lie.chance is Chance.APART} == {
        "clone-identity",
        "roll-back-log",
    }
    assert set(LAWS) == set(Chance) - {Chance.APART}


def test_closed_forms_are_those_of_simulated_draws():
    scene = Scene()
    subsets = list(itertools.combinations(range(scene.chips), scene.samples))
    for liars in (1, 3):
        assert scene.drawn(liars) == pytest.approx(np.mean([min(chosen) < liars for chosen in subsets]))
    due = np.random.default_rng(1).random((200_000, scene.samples, scene.steps)) < float(scene.rate)
    assert scene.snapshots(8) == pytest.approx(due[:, 0].any(1).mean(), abs=4e-3)
    assert scene.snapshots(8, 2) == pytest.approx((due[:, 0].sum(1) > 1).mean(), abs=4e-3)
    # Column s is the tick of step s + 1; segments are (0, 2], (2, 4], (4, 6] and (6, 8].
    assert scene.replayed(5) == pytest.approx(due[:, :, 4:6].any((1, 2)).mean(), abs=4e-3)
    assert scene.replayed(8) == pytest.approx(due[:, :, 4:8].any((1, 2)).mean(), abs=4e-3)
    assert Scene(lie_step=2).replayed(2) == 1
    assert Scene(rate=Fraction(1)).snapshots(2, 2) == 1


TOLD: list[int] = []


@pytest.fixture(scope="module")
def rows():
    return evasions.run(
        lies=["under-reported-flop", "run-old-firmware"],
        trials=2,
        samples=6,
        progress=TOLD.append,
    )


def test_progress_is_told_before_each_world(rows):
    assert TOLD == [1, 1, 1, 1]


def test_lies_are_told_and_caught(rows, tmp_path):
    assert [(row["work"], row["mode"], row["caught"], row["predicted"]) for row in rows] == [
        ("under-reported-flop", "lab", 2, 1.0),
        ("run-old-firmware", "chip", 2, 1.0),
    ]
    assert evasions.verdict(rows) is None
    evasions.save_as_rates(rows, tmp_path / "rates.json")
    rates = load_rates(tmp_path / "rates.json")
    assert {name: (rate.caught, rate.trials) for name, rate in rates.items()} == {
        "under-reported-flop": (2, 2),
        "run-old-firmware": (2, 2),
    }
    evasions.write(rows, tmp_path / "rows.json")
    written = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [{name: row[name] for name in row if name != "commit"} for row in written] == rows
    lines = evasions.table(rows)
    assert "2 of 2      1.00       1.00 0.00 to 1.00" in lines[1]
    level = 100 - 0.1 / len(LIES)
    text = f"each interval holds with {level:.6g} %, so all {len(LIES)} lies' with 99.9%"
    assert text in lines
    assert {row["confidence"] for row in rows} == {1 - 1e-3 / len(LIES)}


def test_a_wrong_prediction_is_called_wrong(monkeypatch):
    monkeypatch.setitem(LAWS, Chance.ALWAYS, lambda _: 1e-4)
    (row,) = evasions.run(lies=["under-reported-flop"], trials=2)
    assert evasions.verdict([row]) == "caught otherwise than predicted: under-reported-flop (2 of 2, 0.00)"


def test_rates_of_a_campaign_need_all_chips(rows, tmp_path):
    part = [{**row, "scene": {**row["scene"], "samples": 2}} for row in rows]
    with pytest.raises(CallerError, match="--samples 6"):
        evasions.save_as_rates(part, tmp_path / "rates.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lies": ["white-lie"]}, "unknown lie 'white-lie'; there are undeclared-run"),
        ({"trials": 0}, "at least one trial"),
        ({"samples": 7}, "1 to 6 chips"),
    ],
)
def test_impossible_measurements_are_the_callers_mistake(options, message):
    with pytest.raises(CallerError, match=message):
        evasions.run(**options)


def test_what_comes_with_the_program_covers_every_lie_and_agrees():
    found = json.loads((DATA / "evasions.json").read_text())["rows"]
    assert {row["work"] for row in found} == set(LIES)
    assert evasions.verdict(found) is None
    for row in found:
        scene = Scene(**{**row["scene"], "rate": Fraction(row["scene"]["rate"])})
        assert row["predicted"] == LAWS[LIES[row["work"]].chance](scene)
        assert row["trials"] >= (40 if 0 < row["predicted"] < 1 else 20)
