"""The closed form against exact fractions, enumeration and simulation."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firmware_sim.errors import CallerError
from inspector.registry import (
    census_needed,
    draw_without_replacement,
    log_unseen_probability,
    months_until_seen,
    unseen_probability,
)


def exact_once(fleet: int, diverted: int, census: int, q: Fraction) -> Fraction:
    """The module's sum for one census, in exact arithmetic."""
    total = Fraction(0)
    for j in range(max(0, diverted + census - fleet), min(diverted, census) + 1):
        ways = math.comb(diverted, j) * math.comb(fleet - diverted, census - j)
        total += Fraction(ways, math.comb(fleet, census)) * (1 - q) ** j
    return total


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    fleet=st.integers(1, 120),
    data=st.data(),
    months=st.integers(0, 5),
    q=st.sampled_from([Fraction(0), Fraction(1, 10), Fraction(1, 2), Fraction(999, 1000), Fraction(1)]),
)
def test_matches_exact_fractions(fleet: int, data: st.DataObject, months: int, q: Fraction) -> None:
    diverted = data.draw(st.integers(0, fleet))
    census = data.draw(st.integers(0, fleet))
    wanted = exact_once(fleet, diverted, census, q) ** months
    got = float(unseen_probability(diverted=diverted, fleet=fleet, census=census, months=months, sensitivity=float(q)))
    assert got == pytest.approx(float(wanted), rel=1e-11, abs=0)


def test_sum_of_the_formula_is_what_a_census_does() -> None:
    """Every census of 3 among 7 chips, 2 of them diverted: 10 of 35 censuses draw neither."""
    unseen = sum(not {0, 1} & set(drawn) for drawn in combinations(range(7), 3))
    got = float(unseen_probability(diverted=2, fleet=7, census=3, months=1))
    assert got == pytest.approx(unseen / 35, rel=1e-14)


def test_large_fleet_keeps_its_digits() -> None:
    """1e7 chips: against a direct sum of logarithms in extended precision."""
    for diverted, census in ((1, 1000), (1000, 10_000), (50_000, 3), (4_000, 4_000)):
        few, many = sorted((diverted, census))
        terms = np.log1p(-np.longdouble(many) / (np.longdouble(10_000_000) - np.arange(few, dtype=np.longdouble)))
        wanted = float(terms.sum())
        got = float(log_unseen_probability(diverted=diverted, fleet=10_000_000, census=census, months=1))
        assert got == pytest.approx(wanted, rel=1e-9)


def test_far_tail_stays_finite_in_log_space() -> None:
    got = float(log_unseen_probability(diverted=100_000, fleet=1_000_000, census=10_000, months=120))
    assert -130_000 < got < -120_000
    assert float(unseen_probability(diverted=100_000, fleet=1_000_000, census=10_000, months=120)) == 0.0


def test_vectorised() -> None:
    grid = unseen_probability(
        diverted=np.array([[1], [10], [100]]), fleet=1000, census=10, months=np.array([0, 1, 12, 12.9])
    )
    assert grid.shape == (3, 4)
    assert np.all(grid[:, 0] == 1.0)
    assert np.array_equal(grid[:, 2], grid[:, 3])  # Only completed censuses count.
    assert np.all(np.diff(grid[:, :3], axis=1) < 0)
    assert np.all(np.diff(grid[:, 1]) < 0)


def test_limits() -> None:
    def unseen(**changes: float) -> float:
        return float(unseen_probability(**({"diverted": 5, "fleet": 10, "census": 5, "months": 1} | changes)))

    assert unseen(diverted=0) == 1.0
    assert unseen(census=0) == 1.0
    assert unseen(sensitivity=0) == 1.0
    assert unseen(census=6) == 0.0
    assert unseen(census=6, months=0.5) == 1.0
    assert unseen(months=1, per_month=2) == pytest.approx(unseen() ** 2)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"diverted": -1}, "diverted"),
        ({"diverted": 1.5}, "diverted must be a whole"),
        ({"diverted": 11}, "exceed the fleet"),
        ({"census": 11}, "exceed the fleet"),
        ({"fleet": 0, "diverted": 0, "census": 0}, "fleet"),
        ({"months": math.nan}, "months"),
        ({"months": math.inf}, "months"),
        ({"sensitivity": 1.01}, "sensitivity"),
        ({"per_month": 0}, "per_month"),
        ({"per_month": math.nan}, "per_month"),
        ({"diverted": "many"}, "diverted must be a number"),
        ({"diverted": [1, 2], "months": [1, 2, 3]}, "broadcast"),
    ],
)
def test_nonsense(changes: dict[str, object], words: str) -> None:
    with pytest.raises(CallerError, match=words):
        unseen_probability(**({"diverted": 5, "fleet": 10, "census": 5, "months": 1} | changes))  # type: ignore[arg-type]


def test_months_and_census_size_invert_the_formula() -> None:
    months = months_until_seen(diverted=20, fleet=100_000, census=500, confidence=0.9)
    assert float(unseen_probability(diverted=20, fleet=100_000, census=500, months=months)) <= 0.1
    assert float(unseen_probability(diverted=20, fleet=100_000, census=500, months=months - 1)) > 0.1
    size = census_needed(diverted=20, fleet=100_000, months=12, confidence=0.9)
    assert float(unseen_probability(diverted=20, fleet=100_000, census=size, months=12)) <= 0.1
    assert float(unseen_probability(diverted=20, fleet=100_000, census=size - 1, months=12)) > 0.1
    assert months_until_seen(diverted=0, fleet=10, census=5, confidence=0.9) == math.inf
    assert months_until_seen(diverted=6, fleet=10, census=5, confidence=0.9, per_month=4) == 0.25
    for nonsense in (0.0, 1.0, math.nan):
        with pytest.raises(CallerError, match="confidence"):
            months_until_seen(diverted=1, fleet=10, census=1, confidence=nonsense)
    with pytest.raises(CallerError, match="per_month"):
        months_until_seen(diverted=1, fleet=10, census=1, confidence=0.5, per_month=0)
    with pytest.raises(CallerError, match="does not reach"):
        census_needed(diverted=0, fleet=10, months=1, confidence=0.5)


def test_simulated_censuses_agree() -> None:
    """The registry's own draw, 4,000 fleets of 200 chips with 6 diverted, 10 drawn in each of 3 months.

    Seeds 0 … 3,999 for each month; the count of unseen fleets is binomial, so five standard deviations bound the error
    with false-alarm probability below 1e-6.
    """
    trials = 4_000
    unseen = 0
    for trial in range(trials):
        unseen += all(min(draw_without_replacement(f"{trial}/{month}".encode(), 200, 10)) >= 6 for month in range(3))
    p = float(unseen_probability(diverted=6, fleet=200, census=10, months=3))
    assert abs(unseen - trials * p) < 5 * math.sqrt(trials * p * (1 - p))
