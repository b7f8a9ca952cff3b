"""Work where no chip meters it: closed forms beside their own definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from firmware_sim.errors import CallerError
from inspector.probability.detection import FLOP_PER_CHIP_DAY
from inspector.probability.hidden_sites import FindingRate, HiddenSites
from inspector.probability.unmetered_work import Budgets, unmetered_ways

BUDGETS = Budgets(chips=100, explained=0.8, energy_error=0.05, false_alarm=0.02)
IDLE = 0.1


def ways(share, **more):
    """Hidden work that takes this share of all that the chips can do."""
    flop = share * 100 * 30 * 0.4 * FLOP_PER_CHIP_DAY
    there = HiddenSites.doing(flop, days=30, utilisation=0.4, idle=IDLE)
    options = {"budgets": BUDGETS, "census": 0.25, "finding": FindingRate(per_year=1.0), **more}
    return {way.name: way for way in unmetered_ways(flop=flop, there=there, **options)}


def test_time_that_meters_account_for_leaves_room_for_the_rest_alone():
    assert ways(0.19)["on its chips, by raw pointers"].seen["time"] == 0
    assert ways(0.21)["on its chips, in another process"].seen["time"] == 1
    assert ways(0.19)["on the host's own processors"].needed == pytest.approx(0.19 / BUDGETS.host_speed)


def test_the_budget_of_energy_is_a_draw_beside_its_threshold():
    """n = 200,000 draws of a budget; the share of alarms is off by 5 standard errors with probability < 1e-6."""
    rng, declared = np.random.default_rng(1), 0.8 + 0.2 * IDLE
    errors = rng.normal(0, BUDGETS.energy_error * declared, 200_000)
    threshold = np.quantile(errors, 1 - BUDGETS.false_alarm)
    extra = 0.05 * (1 - IDLE)
    alarms = float(np.mean(errors + extra > threshold))
    assert ways(0.05)["on its chips, by raw pointers"].seen["energy"] == pytest.approx(alarms, abs=0.01)
    assert BUDGETS.energy_alarm(0.0, IDLE) == pytest.approx(BUDGETS.false_alarm)


def test_each_means_looks_where_it_can():
    found = ways(0.5)
    assert all(way.seen["chips"] == 0 for way in found.values())
    left = found["on registered chips that left their owner"]
    assert left.seen["census"] == 0.25
    assert left.any == pytest.approx(1 - 0.75 * (1 - left.seen["sites"]))
    power = 0.5 * 100 * 1400e-6
    assert left.seen["sites"] == pytest.approx(1 - math.exp(-((power / 10) ** 0.5) * 30 / 365))
    assert found["on chips of no registry, elsewhere"].seen["census"] == 0
    assert found["on chips of no registry, at a declared site"].seen["sites"] == 0


@pytest.mark.parametrize("change", [{"chips": 0}, {"explained": 1.1}, {"energy_error": 0.0}, {"host_speed": math.nan}])
def test_impossible_budgets_are_the_callers_mistake(change):
    with pytest.raises(CallerError):
        Budgets(**{"chips": 1, **change})
    with pytest.raises(CallerError, match="census"):
        ways(0.1, census=1.5)
