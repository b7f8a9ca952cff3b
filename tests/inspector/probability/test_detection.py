"""Closed forms of detection against the paper's numbers, against enumeration, and against the laws they must obey."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, product
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import CallerError
from inspector.probability import detection as closed
from inspector.probability.chances import hidden_training_detection

MODELS = {
    "GPT-3": 3.14e23,
    "Chinchilla": 5.76e23,
    "PaLM": 2.56e24,
    "Chinchilla-280B": 9.9e24,
    "Chinchilla-1T": 1.27e26,
    "Chinchilla-10T": 1.3e28,
}
CELLS = {
    "GPT-3": (243, 2.43e4, 2.43e6),
    "Chinchilla": (132, 1.33e4, 1.33e6),
    "PaLM": (29, 2.98e3, 2.99e5),
    "Chinchilla-280B": (7, 771, 7.72e4),
    "Chinchilla-1T": (None, 60, 6.02e3),
    "Chinchilla-10T": (None, None, 58),
}
CHIPS = {
    "GPT-3": 10,
    "Chinchilla": 19,
    "PaLM": 82,
    "Chinchilla-280B": 314,
    "Chinchilla-1T": 4.03e3,
    "Chinchilla-10T": 4.12e5,
}

shares = st.floats(1e-12, 0.999)
confidences = st.floats(1e-6, 1 - 1e-9)
factors = st.floats(1.0, 100.0)
# Far above rounding error, far below any effect that a law could hide.
SLACK = 1e-9


def three_digits(value: float) -> float:
    return float(f"{value:.3g}")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("column", "chips"), [(0, 1e3), (1, 1e5), (2, 1e7)])
def test_table_1_cell(model: str, column: int, chips: float) -> None:
    expected = CELLS[model][column]
    if expected is None:
        with pytest.raises(closed.ChipsTooFewError, match="but the lab owns"):
            closed.samples_needed(flop=MODELS[model], chips=chips)
        return
    samples = closed.samples_needed(flop=MODELS[model], chips=chips)
    yearly = float(closed.samples_per_year(per_period=samples, period=30))
    assert (yearly if expected < 1000 else three_digits(yearly)) == expected


@pytest.mark.parametrize("model", MODELS)
def test_table_1_chips_for_one_year(model: str) -> None:
    needed = math.ceil(closed.chips_needed(flop=MODELS[model], days=365))
    assert three_digits(needed) == CHIPS[model]


def test_iaea_footnote() -> None:
    samples = closed.samples_needed(flop=9.9e24, chips=1e7, flop_per_day=3 * closed.FLOP_PER_CHIP_DAY)
    yearly = int(closed.samples_per_year(per_period=samples, period=30))
    assert yearly == 231_572
    assert math.ceil(yearly / closed.CHIPS_PER_INSPECTOR) == 232


def test_per_year_is_the_ceiling_of_the_real_per_period() -> None:
    samples = float(closed.samples_needed(flop=3.14e23, chips=1000))
    assert samples == pytest.approx(19.908452, abs=1e-6)
    assert closed.samples_per_year(per_period=samples, period=30) == math.ceil(365 * samples / 30) == 243


def test_figure_2_minimum() -> None:
    stretch, share = np.arange(1, 101)[:, None], np.linspace(0, 0.2, 401)
    ratio = closed.stretch_detection(stretch=stretch, share=share, confidence=0.9) / 0.9
    assert round(float(ratio.min()), 4) == 0.9703
    assert [int(place) for place in np.unravel_index(ratio.argmin(), ratio.shape)] == [99, 400]
    assert ratio.max() <= 1 + SLACK


def test_stretch_reaches_its_limits() -> None:
    assert closed.stretch_detection(stretch=7, share=0, confidence=0.9) == pytest.approx(0.9, rel=1e-15)
    assert closed.stretch_detection(stretch=7, share=1e-320, confidence=0.9) == pytest.approx(0.9, rel=1e-15)
    samples = math.log(0.1) / math.log(0.8)
    limit = float(closed.stretch_limit(share=0.2))
    assert limit == pytest.approx(1 - math.exp(-0.2 * samples), rel=1e-14)
    assert closed.stretch_detection(stretch=1e12, share=0.2) == pytest.approx(limit, rel=1e-11)


@given(share=shares, confidence=confidences, stretch=factors, more=factors)
def test_stretching_further_never_helps_the_inspector(
    share: float, confidence: float, stretch: float, more: float
) -> None:
    first = closed.stretch_detection(stretch=stretch, share=share, confidence=confidence)
    second = closed.stretch_detection(stretch=stretch * more, share=share, confidence=confidence)
    limit = closed.stretch_limit(share=share, confidence=confidence)
    assert limit - SLACK <= second <= first + SLACK
    assert first <= confidence + SLACK


def test_theorem_1_on_a_grid() -> None:
    rate = np.geomspace(1e-4, 10, 9)[:, None, None, None]
    samples = np.array([0.3, 1, 20, 1e4])[:, None, None]
    flop = np.array([1e20, 3e22, 2.5e23])[:, None]
    days = np.linspace(3, 365, 60)
    chance = closed.short_run_detection(days=days, samples=samples, flop=flop, chips=1000, rate=rate)
    assert chance.shape == (9, 4, 3, 60)
    assert (np.diff(chance, axis=-1) <= SLACK).all()
    assert (np.diff(chance, axis=-1) < 0).mean() > 0.7


@given(share=shares, samples=st.floats(0.1, 1e6), more=factors, rate=st.floats(1e-6, 10), days=st.floats(0.1, 1000))
def test_more_of_anything_never_lowers_detection(
    share: float, samples: float, more: float, rate: float, days: float
) -> None:
    def miss(share: float, samples: float, rate: float, days: float, readout: float) -> float:
        snapshot = closed.snapshot_probability(rate=rate, days=days)
        hit = closed.hit_probability(share=share, snapshot=snapshot, readout=readout)
        return float(closed.log_miss(hit=hit, samples=samples))

    base = miss(share, samples, rate, days, 0.5)
    assert miss(min(1.0, share * more), samples, rate, days, 0.5) <= base * (1 - SLACK)
    assert miss(share, samples * more, rate, days, 0.5) <= base * (1 - SLACK)
    assert miss(share, samples, rate * more, days, 0.5) <= base * (1 - SLACK)
    assert miss(share, samples, rate, days * more, 0.5) <= base * (1 - SLACK)
    assert miss(share, samples, rate, days, 0.6) <= base * (1 - SLACK)


@given(flop=st.floats(1e22, 1e24), chips=st.floats(1e3, 1e9), confidence=confidences, period=st.floats(1, 365))
def test_samples_needed_detect_with_the_confidence(flop: float, chips: float, confidence: float, period: float) -> None:
    samples = closed.samples_needed(flop=flop, chips=chips, confidence=confidence, period=period)
    hit = closed.hit_probability(
        share=closed.used_share(flop=flop, chips=chips, days=365),
        snapshot=closed.snapshot_probability(rate=0.1, days=period),
    )
    caught = closed.detection(closed.log_miss(hit=hit, samples=samples * 365 / period))
    assert caught == pytest.approx(confidence, rel=1e-9)
    rounded_up = closed.appendix_b_log_miss(flop=flop, chips=chips, samples=samples, period=period)
    assert closed.detection(rounded_up) >= caught - SLACK


@pytest.mark.parametrize("miss", [1e-300, 1e-100, 1e-12, 0.5, 1 - 1e-12])
def test_stable_far_into_both_tails(miss: float) -> None:
    with mpmath.workdps(60):
        exact = mpmath.log(miss) / mpmath.log1p(-mpmath.mpf("1e-9"))
    samples = closed.samples_for(hit=1e-9, miss=miss)
    assert float(samples) == pytest.approx(float(exact), rel=1e-12)
    assert float(np.exp(closed.log_miss(hit=1e-9, samples=samples))) == pytest.approx(miss, rel=1e-12)


@pytest.mark.parametrize(("share", "mean"), [(1.0, 32.0), (1.0, 500.0), (1 - 1e-12, 40.0), (0.3, 2.0), (1e-9, 1e-9)])
def test_escape_near_certain_hits_keeps_its_digits(share: float, mean: float) -> None:
    with mpmath.workdps(400):
        exact = float(mpmath.log(1 - mpmath.mpf(share) * (1 - mpmath.exp(-mean))))
    assert float(closed.log_escape(share=share, rate=mean, days=1)) == pytest.approx(exact, rel=1e-12)


def test_tiny_detection_keeps_its_digits() -> None:
    assert closed.detection(closed.log_miss(hit=1e-300, samples=3)) == pytest.approx(3e-300, rel=1e-15)
    assert closed.snapshot_probability(rate=1e-300, days=2) == pytest.approx(2e-300, rel=1e-15)
    miss = closed.log_miss_without_replacement(chips=10**7, used=1, samples=1, catch=1e-9)
    assert closed.detection(miss) == pytest.approx(1e-16, rel=1e-9)


def exact_pgf(chips: int, used: int, samples: int, catch: Fraction) -> Fraction:
    total = Fraction(0)
    for found in range(min(used, samples) + 1):
        ways = math.comb(used, found) * math.comb(chips - used, samples - found) if samples - found >= 0 else 0
        total += Fraction(ways, math.comb(chips, samples)) * (1 - catch) ** found
    return total


@pytest.mark.parametrize(
    ("chips", "used", "samples", "catch"),
    [(1000, 400, 300, Fraction(19, 20)), (3000, 2900, 2500, Fraction(1, 2)), (5000, 700, 2200, Fraction(1))],
)
def test_without_replacement_is_right_to_1e_300(chips: int, used: int, samples: int, catch: Fraction) -> None:
    exact = exact_pgf(chips, used, samples, catch)
    with mpmath.workdps(60):
        expected = float(mpmath.log(mpmath.mpf(exact.numerator)) - mpmath.log(mpmath.mpf(exact.denominator)))
    assert expected < -50
    miss = closed.log_miss_without_replacement(chips=chips, used=used, samples=samples, catch=float(catch))
    assert float(miss) == pytest.approx(expected, rel=1e-11)


def test_without_replacement_at_ten_million_chips() -> None:
    used, samples = 2_000_000, 3_000_000
    miss = float(closed.log_miss_without_replacement(chips=10**7, used=used, samples=samples))
    with mpmath.workdps(40):
        lg = mpmath.loggamma
        exact = lg(10**7 - used + 1) + lg(10**7 - samples + 1) - lg(10**7 + 1) - lg(10**7 - used - samples + 1)
    assert miss == pytest.approx(float(exact), rel=1e-11)


@pytest.mark.parametrize("chips", [1, 2, 4, 6])
def test_enumeration_of_tiny_fleets(chips: int) -> None:
    """Every set of sampled chips and every pattern of present snapshots, in exact fractions."""
    catch = Fraction(3, 4)
    for used, samples in product(range(chips + 1), repeat=2):
        escape, draws = Fraction(0), list(combinations(range(chips), samples))
        for pattern in product((False, True), repeat=used):
            weight = catch ** sum(pattern) * (1 - catch) ** (used - sum(pattern))
            guilty = {chip for chip, present in enumerate(pattern) if present}
            escape += weight * Fraction(sum(guilty.isdisjoint(draw) for draw in draws), len(draws))
        miss = closed.log_miss_without_replacement(chips=chips, used=used, samples=samples, catch=0.75)
        assert float(np.exp(miss)) == pytest.approx(float(escape), rel=1e-12)
        tuples = list(product(range(chips), repeat=min(samples, 3)))
        replaced = sum((1 - catch) ** sum(chip < used for chip in draw) for draw in tuples) / len(tuples)
        hit = closed.hit_probability(share=used / chips, snapshot=0.75)
        with_replacement = closed.log_miss(hit=hit, samples=min(samples, 3))
        assert float(np.exp(with_replacement)) == pytest.approx(float(replaced), rel=1e-12)


@given(st.data())
def test_different_chips_detect_at_least_as_well_as_replacement(data: st.DataObject) -> None:
    chips = data.draw(st.integers(1, 400))
    used, samples = data.draw(st.integers(0, chips)), data.draw(st.integers(0, chips))
    catch = data.draw(st.floats(0, 1))
    without = float(closed.log_miss_without_replacement(chips=chips, used=used, samples=samples, catch=catch))
    hit = closed.hit_probability(share=used / chips, snapshot=catch)
    assert without <= float(closed.log_miss(hit=hit, samples=samples)) + SLACK


@given(st.data())
def test_samples_needed_without_replacement_is_the_fewest(data: st.DataObject) -> None:
    chips = data.draw(st.integers(2, 200))
    used = data.draw(st.integers(1, chips))
    needed = closed.samples_needed_without_replacement(chips=chips, used=used, confidence=0.9)
    miss = closed.log_miss_without_replacement(chips=chips, used=used, samples=[needed - 1, needed])
    assert miss[0] > math.log(0.1) - SLACK
    assert miss[1] <= math.log(0.1) + SLACK


def test_a_tie_counts_as_reached() -> None:
    """Three of five chips miss the two used ones with probability 1/10 exactly."""
    assert closed.samples_needed_without_replacement(chips=5, used=2, confidence=0.9) == 3


def test_samples_needed_without_replacement_out_of_reach() -> None:
    with pytest.raises(CallerError, match="all 10 chips 1 times"):
        closed.samples_needed_without_replacement(chips=10, used=1, catch=0.5, confidence=0.9)
    assert closed.samples_needed_without_replacement(chips=10, used=1, catch=0.5, confidence=0.9, inspections=4) == 9


def test_guarantee_starts_at_twice_the_threshold() -> None:
    threshold = 2.56e24
    assert closed.incriminating_flop(run_flop=[1e24, threshold, 2 * threshold], threshold=threshold).tolist() == [
        0,
        0,
        threshold,
    ]
    assert closed.incriminating_days(run_flop=2 * threshold, threshold=threshold, days=100) == 50


def test_thinning_equals_unreadable_snapshots() -> None:
    """With a Poisson number of snapshots of which each is readable with chance r, at least one is: 1 - e^(-f·t·r)."""
    mean, readable = 2.0, 0.3
    unseen = sum(
        math.exp(-mean) * mean**number / math.factorial(number) * (1 - readable) ** number for number in range(60)
    )
    assert closed.snapshot_probability(rate=0.2, days=10, readable=readable) == pytest.approx(1 - unseen, rel=1e-12)


GOOD: dict[str, Any] = {"flop": 3.14e23, "chips": 1000.0}


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"flop": -1}, "flop must be above 0, not -1"),
        ({"flop": 0}, "flop must be above 0, not 0"),
        ({"flop": math.nan}, "flop must be a finite number, not nan"),
        ({"flop": "many"}, "flop must be a number"),
        ({"flop": True}, "flop must be a number"),
        ({"flop": np.array([])}, "flop is empty"),
        ({"flop": [[1e23], [1e23, 1e23]]}, "flop must be a number or an array of numbers"),
        ({"chips": 0}, "chips must be above 0"),
        ({"chips": 9}, r"the run needs 9.95687 chips but the lab owns 9"),
        ({"chips": math.inf}, "chips must be a finite number, not inf"),
        ({"days": 0}, "days must be above 0"),
        ({"period": -30}, "period must be above 0, not -30"),
        ({"rate": 0}, "rate is 0: no chip ever takes a snapshot"),
        ({"rate": -0.1}, "rate must be at least 0, not -0.1"),
        ({"confidence": 1}, "confidence must be below 1"),
        ({"confidence": 1.1}, "confidence must be at least 0 and at most 1, not 1.1"),
        ({"flop_per_day": 0}, "flop per chip and day must be above 0"),
        ({"readout": 0}, "no number of samples is enough"),
        ({"miss": 0}, "miss must be above 0"),
        ({"chips": [1000, 2000, math.nan]}, "chips must be a finite number, not nan"),
    ],
)
def test_nonsense_is_the_callers_mistake(bad: dict[str, object], text: str) -> None:
    with pytest.raises(CallerError, match=text):
        closed.samples_needed(**(GOOD | bad))


def test_nonsense_in_the_other_forms() -> None:
    with pytest.raises(CallerError, match="share must be below 1"):
        closed.stretch_detection(stretch=2, share=1)
    with pytest.raises(CallerError, match="stretch must be at least 1"):
        closed.stretch_detection(stretch=0.5, share=0.1)
    with pytest.raises(CallerError, match="samples must not exceed the number of chips"):
        closed.log_miss_without_replacement(chips=10, used=3, samples=11)
    with pytest.raises(CallerError, match="used chips must not exceed the number of chips"):
        closed.log_miss_without_replacement(chips=10, used=13, samples=1)
    with pytest.raises(CallerError, match=r"samples must be a whole number, not 2\.5"):
        closed.log_miss_without_replacement(chips=10, used=3, samples=2.5)
    with pytest.raises(CallerError, match="must be at most 0"):
        closed.detection(0.1)
    with pytest.raises(CallerError, match="terms are too many"):
        closed.log_miss_without_replacement(chips=10**9, used=10**8, samples=10**8, catch=0.5)


def test_extreme_but_sensible_values_take_their_limit() -> None:
    assert closed.snapshot_probability(rate=0, days=30) == 0
    assert closed.snapshot_probability(rate=1e200, days=1e200) == 1
    assert closed.samples_needed(**GOOD, confidence=0) == 0
    full = float(closed.chips_needed(flop=3.14e23, days=365))
    samples = float(closed.samples_needed(flop=3.14e23, chips=full, rate=1e6))
    assert samples == pytest.approx(math.log(10) / (1e6 * 365), rel=1e-9)
    assert closed.samples_per_year(per_period=0, period=30) == 1
    with pytest.raises(closed.ChipsTooFewError, match="needs inf chips"):
        closed.used_share(flop=1e308, chips=1, days=1, flop_per_day=1e-300)


def test_arrays_broadcast_and_scalars_stay_scalars() -> None:
    table = closed.samples_needed(flop=np.array([3.14e23, 5.76e23])[:, None], chips=[1e3, 1e5, 1e7])
    assert table.shape == (2, 3)
    assert table[1, 2] == closed.samples_needed(flop=5.76e23, chips=1e7)
    assert isinstance(closed.samples_needed(**GOOD), float)


def test_a_sure_miss_is_printed_without_a_sign():
    assert str(hidden_training_detection(4, 2, Fraction(1, 4), 1)) == "0.0"
