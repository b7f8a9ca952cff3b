"""Deterrence: break-even points, the limits of risk attitudes, and nonsense."""

from __future__ import annotations

import numpy as np
import pytest

from firmware_sim.errors import CallerError
from inspector.probability.deterrence import deterring_detection, deterring_penalty, expected_utility
from inspector.probability.planning import AS_DECLARED, Problem, VisitedSite, Visits, best_response
from inspector.probability.timing import time_to_detection

CASES = [(gain, penalty, aversion) for gain in (1.0, 20.0) for penalty in (0.5, 30.0) for aversion in (-0.05, 0.0, 0.2)]


@pytest.mark.parametrize(("gain", "penalty", "aversion"), CASES)
def test_at_the_deterring_detection_nothing_is_gained(gain, penalty, aversion):
    stakes = {"gain": gain, "penalty": penalty, "aversion": aversion}
    enough = deterring_detection(**stakes)
    scale = float(expected_utility(detection=0, **stakes))
    assert expected_utility(detection=enough, **stakes) == pytest.approx(0, abs=1e-12 * scale)
    assert expected_utility(detection=0.9 * enough, **stakes) > 0
    assert expected_utility(detection=(1 + enough) / 2, **stakes) < 0
    assert deterring_penalty(detection=enough, gain=gain, aversion=aversion) == pytest.approx(penalty)


def test_by_hand_without_risk_aversion():
    assert expected_utility(detection=0.25, gain=10, penalty=4) == pytest.approx(6.5)
    assert deterring_detection(gain=10, penalty=30) == pytest.approx(0.25)
    assert deterring_penalty(detection=[0, 0.25, 1], gain=10).tolist() == pytest.approx([np.inf, 30, 0])


def test_risk_aversion_deters_and_a_taste_for_risk_may_bear_any_penalty():
    found = [deterring_detection(gain=5, penalty=5, aversion=rate) for rate in (-0.5, 0, 0.5)]
    assert found == sorted(found, reverse=True)
    assert deterring_detection(gain=5, penalty=5, aversion=1e-9) == pytest.approx(found[1])
    assert deterring_penalty(detection=0.1, gain=5, aversion=-1) == np.inf


@pytest.mark.parametrize(
    "wrong",
    [{"gain": 0}, {"penalty": -1}, {"detection": 1.1}, {"gain": np.nan}, {"aversion": np.inf}, {"aversion": 1e3}],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(CallerError):
        expected_utility(**({"detection": 0.5, "gain": 1, "penalty": 1} | wrong))


@pytest.mark.parametrize("refusals", [0.0, 0.01])
@pytest.mark.parametrize(("days", "period", "samples"), [(360, 30, 8), (360, 90, 30), (90, 365, 400), (360, 30, 1)])
def test_the_median_day_of_a_response_is_that_of_the_time_to_detection(days, period, samples, refusals):
    problem = Problem(flop=1e25, sites=(VisitedSite(name="a", chips=1e4),), days=days, honest_refusal_rate=refusals)
    visits = [Visits(site="a", period=period, samples=samples, refusals_allowed=samples if refusals else 0)]
    found = best_response(problem, visits, AS_DECLARED)
    share = found.placement[0] / 1e4
    wanted = time_to_detection(share=share, samples=samples, days=days, period=period, readout=1 - refusals)
    assert found.days == days
    assert found.median_day == wanted.quantile(0.5)


def test_visits_of_two_sites_add_up_until_half_are_caught():
    sites = tuple(VisitedSite(name=name, chips=1e4) for name in "ab")
    problem = Problem(flop=1e25, sites=sites, days=360)
    late = [Visits(site="a", period=60, samples=20), Visits(site="b", period=90, samples=20)]
    found = best_response(problem, late, AS_DECLARED)
    alone = best_response(problem, [late[0], Visits(site="b", period=90, samples=0)], AS_DECLARED)
    assert 60 < found.median_day <= found.days
    assert found.median_day in {60 * number for number in range(1, 7)} | {90, 180, 270, 360}
    assert alone.detection < found.detection
    assert alone.median_day > found.median_day
