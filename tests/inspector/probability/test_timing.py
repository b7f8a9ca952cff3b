"""Time to detection: windows of the run against inspections, by direct sums and by the laws between the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import CallerError
from inspector.probability import detection as closed
from inspector.probability.timing import log_miss_by_day, time_to_detection

SLACK = 1e-9


def windows(days: float, period: float, offset: float) -> list[tuple[float, float]]:
    """(inspection day, days of the run since the inspection before), by stepping through the calendar."""
    seen, start, day = [], 0.0, period - offset
    while start < days:
        seen.append((day, min(day, days) - start))
        start, day = min(day, days), day + period
    return seen


@pytest.mark.parametrize(
    ("days", "period", "offset"), [(365, 30, 0), (360, 30, 0), (100, 30, 12.5), (5, 30, 0), (5, 30, 27), (0.3, 0.1, 0)]
)
def test_run_is_the_product_over_its_windows(days: float, period: float, offset: float) -> None:
    scheme = {"share": 0.02, "samples": 7.5, "rate": 0.1, "readout": 0.8}
    for now in [0.0, period - offset, 61.0, 90.0, days, math.inf]:
        expected = sum(
            7.5 * math.log1p(-0.02 * 0.8 * (1 - math.exp(-0.1 * length)))
            for day, length in windows(days, period, offset)
            if day <= now + SLACK and length > SLACK
        )
        miss = log_miss_by_day(now, days=days, period=period, offset=offset, **scheme)
        assert float(miss) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@given(
    share=st.floats(1e-6, 1),
    days=st.floats(1, 1000),
    period=st.floats(1, 200),
    rate=st.floats(1e-3, 5),
    late=st.floats(0, 0.99),
)
def test_eq_1_never_overstates_and_the_ceiling_never_understates(
    share: float, days: float, period: float, rate: float, late: float
) -> None:
    whole = {"share": share, "samples": 3.0, "days": days, "period": period, "rate": rate}
    aligned = float(log_miss_by_day(math.inf, **whole))
    shifted = float(log_miss_by_day(math.inf, offset=late * period, **whole))
    escape = float(closed.log_escape(share=share, rate=rate, days=period))
    eq_1, ceiling = 3.0 * days / period * escape, 3.0 * math.ceil(days / period) * escape
    slack = 1e-6 * abs(aligned) + 1e-12
    assert shifted <= aligned + slack
    if days >= period:
        assert aligned <= eq_1 + slack
    assert ceiling <= aligned + slack


def test_distribution_is_consistent() -> None:
    found = time_to_detection(share=0.01, samples=19.9, days=365)
    assert found.days[0] == 30
    assert found.days[-1] == 390
    assert (np.diff(found.detected) > 0).all()
    assert found.mass.sum() == pytest.approx(float(found.detected[-1]), rel=1e-12)
    assert found.quantile(0.5) == found.days[np.searchsorted(found.detected, 0.5)]
    assert found.quantile(0) == 30
    assert found.quantile(0.999999) == math.inf


def test_certain_detection_at_the_first_inspection() -> None:
    found = time_to_detection(share=1, samples=1, days=90, rate=1e4)
    assert found.mass.tolist() == [1, 0, 0]


def test_without_snapshots_nothing_is_found() -> None:
    found = time_to_detection(share=0.5, samples=10, days=90, rate=0)
    assert found.detected.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"offset": 30}, "offset must be below the period"),
        ({"days": 0}, "days must be above 0"),
        ({"period": 1e-9}, "inspections are too many"),
        ({"samples": -1}, "samples must be at least 0"),
        ({"share": 1.5}, "share must be at least 0 and at most 1"),
    ],
)
def test_nonsense(bad: dict[str, float], text: str) -> None:
    with pytest.raises(CallerError, match=text):
        time_to_detection(**({"share": 0.1, "samples": 5, "days": 365} | bad))


def test_negative_day_is_refused() -> None:
    with pytest.raises(CallerError, match="day must be at least 0"):
        log_miss_by_day(-1, share=0.1, samples=5, days=365)
