"""What honest refusals cost an honest lab, against sums in whole fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import CallerError
from inspector.probability import alarms
from inspector.probability.alarms import fewest_tolerated, log_tolerated, within_cap


def tolerated(rate: Fraction, checks: int, allowed: int) -> Fraction:
    """P(at most ``allowed`` of ``checks`` fail), summed exactly."""
    return sum(
        (math.comb(checks, j) * rate**j * (1 - rate) ** (checks - j) for j in range(min(allowed, checks) + 1)),
        Fraction(0),
    )


@pytest.mark.parametrize("rate", [Fraction(0), Fraction(1, 1000), Fraction(1, 20), Fraction(1, 2), Fraction(1)])
@pytest.mark.parametrize(
    ("checks", "allowed"), [(0, 0), (1, 0), (20, 0), (20, 2), (20, 19), (20, 20), (20, 50), (300, 9)]
)
def test_tail_is_the_binomial_sum(rate: Fraction, checks: int, allowed: int) -> None:
    exact = tolerated(rate, checks, allowed)
    found = float(log_tolerated(rate=float(rate), checks=checks, allowed=allowed))
    if exact == 0:
        assert found == -math.inf
    else:
        assert found == pytest.approx(math.log(exact), rel=1e-11, abs=1e-15)


def test_tail_is_told_at_both_ends() -> None:
    """An alarm of 1e-30 is not rounded away, nor a passing chance of 1e-200."""
    rare = Fraction(1, 10**10)
    assert float(log_tolerated(rate=1e-10, checks=3, allowed=2)) == pytest.approx(-float(rare**3), rel=1e-9)
    assert float(log_tolerated(rate=0.9, checks=200, allowed=0)) == pytest.approx(200 * math.log(0.1), rel=1e-12)


def test_fewest_tolerated_is_the_first_that_keeps_the_cap() -> None:
    def alarm(allowed: int) -> float:
        return 1 - float(tolerated(Fraction(1, 50), 230, allowed))

    for cap in (0.5, 0.1, 0.01, 1e-6):
        first = next(allowed for allowed in range(231) if alarm(allowed) <= cap)
        assert fewest_tolerated(alarm, most=230, cap=cap) == first
    assert fewest_tolerated(lambda _: 0.0, most=0, cap=0.0) == 0
    assert fewest_tolerated(lambda allowed: 0.2 if allowed < 7 else 0.1, most=7, cap=0.1) == 7
    assert fewest_tolerated(lambda _: 0.2, most=5, cap=0.1) is None


def test_the_cap_itself_is_allowed() -> None:
    assert within_cap(0.01, 0.01)
    assert not within_cap(math.nextafter(0.01, 1), 0.01)


def test_nonsense_is_refused() -> None:
    with pytest.raises(CallerError, match="rate must be at least 0 and at most 1"):
        log_tolerated(rate=1.5, checks=1, allowed=0)
    with pytest.raises(CallerError, match="tolerated must be at least 0"):
        log_tolerated(rate=0.5, checks=1, allowed=-1)


@given(st.floats(0.001, 0.999), st.floats(0, 1), st.floats(0, 1))
def test_bayes_rule_holds_in_odds(prior: float, detection: float, false_alarm: float) -> None:
    for accused in (True, False):
        both: dict[str, Any] = {"detection": detection, "false_alarm": false_alarm, "accused": accused}
        ratio, after = alarms.likelihood_ratio(**both), alarms.posterior(prior=prior, **both)
        if np.isnan(ratio):
            assert np.isnan(after)
        elif np.isinf(ratio):
            assert after == 1
        else:
            odds = prior / (1 - prior) * ratio
            assert after == pytest.approx(odds / (1 + odds), rel=1e-9, abs=1e-300)


def test_a_ratio_beyond_floats_is_infinite() -> None:
    assert alarms.likelihood_ratio(detection=1.0, false_alarm=2.2250738585e-313) == np.inf
    assert alarms.posterior(prior=0.5, detection=1.0, false_alarm=2.2250738585e-313) == 1


def test_posterior_by_hand() -> None:
    """Of 1,000 labs 50 cheat: 45 of these and 19 of the others are accused."""
    assert alarms.posterior(prior=0.05, detection=0.9, false_alarm=0.02) == pytest.approx(45 / 64)
    assert alarms.posterior(prior=0.05, detection=0.9, false_alarm=0.02, accused=False) == pytest.approx(5 / 936)
    assert alarms.likelihood_ratio(detection=0.9, false_alarm=0.02) == pytest.approx(45)
    cost = alarms.expected_cost(prior=0.05, detection=0.9, false_alarm=0.02, miss=1000, alarm=10)
    assert cost == pytest.approx(0.05 * 0.1 * 1000 + 0.95 * 0.02 * 10)


@pytest.mark.parametrize(
    "change",
    [{"prior": 1.1}, {"detection": -0.1}, {"false_alarm": float("nan")}, {"miss": -1}, {"alarm": float("inf")}],
)
def test_nonsense_about_alarms_is_refused(change: dict[str, float]) -> None:
    good = {"prior": 0.1, "detection": 0.9, "false_alarm": 0.01, "miss": 1, "alarm": 1}
    with pytest.raises(CallerError):
        alarms.expected_cost(**(good | change))
