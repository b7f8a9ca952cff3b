"""When a run is caught: inspections of the log of the last period, one after another (Shavit 2023, App. B).

A run that starts ``offset`` days after an inspection meets windows of period - offset, then of full periods, then the
rest. An inspection sees what its window left. For one length the lab's best offset is 0: log(1 - b·(1-e^(-f·t))) is
convex in t, so few full windows and one remainder expose the run least.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from firmware_sim.errors import CallerError
from inspector.probability._logspace import Floats, reals
from inspector.probability.detection import log_escape

__all__ = ["TimeToDetection", "log_miss_by_day", "time_to_detection"]

_ROUNDING = 1e-9
_MOST_INSPECTIONS = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeToDetection:
    """The distribution of the day on which a run is caught.

    Attributes:
        days: inspection days since the start of the run, increasing, shape (n,).
        log_miss: log of the chance that the run is still unseen after that inspection, shape (n,).
    """

    days: Floats
    log_miss: Floats

    @property
    def detected(self) -> Floats:
        """Chance to be caught by each inspection day, shape (n,)."""
        return np.asarray(-np.expm1(self.log_miss))

    @property
    def mass(self) -> Floats:
        """Chance to be caught exactly at each inspection, shape (n,); 1 - sum is the chance never to be."""
        before = np.concatenate(([0.0], self.log_miss[:-1]))
        gain = np.where(np.isneginf(before), 0.0, self.log_miss - np.where(np.isneginf(before), 0.0, before))
        return np.asarray(np.exp(before) * -np.expm1(gain))

    def quantile(self, probability: float) -> float:
        """Return the first inspection day by which the run is caught with ``probability``; infinite if never."""
        wanted = float(reals("probability", probability, low=0, high=1))
        reached = np.flatnonzero(self.detected >= wanted)
        return float(self.days[reached[0]]) if reached.size else float("inf")


def log_miss_by_day(
    day: ArrayLike,
    *,
    share: ArrayLike,
    samples: ArrayLike,
    days: ArrayLike,
    period: ArrayLike = 30.0,
    rate: ArrayLike = 0.1,
    readout: ArrayLike = 1.0,
    offset: ArrayLike = 0.0,
) -> Floats:
    """Return the log of the chance that a run is unseen by ``day``; ``day`` = infinity asks about the whole run.

    Args:
        day: days since the start of the run, >= 0.
        share: b, share of the fleet in use while the run lasts.
        samples: s, draws with replacement at each inspection.
        days: T, length of the run.
        period: T_m, days between inspections.
        rate: f, snapshots per chip and day.
        readout: chance that a sampled log is readable and its replay catches the run.
        offset: days from the last inspection to the start of the run, 0 <= offset < period.
    """
    now = np.asarray(day, dtype=np.float64)
    if np.isnan(now).any() or (now < 0).any():
        raise CallerError("day must be at least 0")
    length = reals("days", days, low=0, high=np.inf, open_low=True)
    between = reals("period", period, low=0, high=np.inf, open_low=True)
    late = reals("offset", offset, low=0, high=np.inf)
    if (late >= between).any():
        raise CallerError("offset must be below the period")
    to_first = between - late
    rest = np.maximum(length - to_first, 0.0)
    full = np.floor(rest / between + _ROUNDING)
    left = np.maximum(rest - full * between, 0.0)
    left = np.where(left < _ROUNDING * between, 0.0, left)
    seen = np.floor((now - to_first) / between + _ROUNDING) + 1.0

    drawn = reals("samples", samples, low=0, high=np.inf)

    def one(window: Floats) -> Floats:
        return drawn * log_escape(share=share, rate=rate, days=window, readout=readout)

    first = np.where(seen >= 1, one(np.minimum(length, to_first)), 0.0)
    middle = np.clip(seen - 1.0, 0.0, full) * one(between)
    last = np.where((seen >= full + 2.0) & (left > 0), one(left), 0.0)
    return np.asarray(first + middle + last)[()]


def time_to_detection(
    *,
    share: float,
    samples: float,
    days: float,
    period: float = 30.0,
    rate: float = 0.1,
    readout: float = 1.0,
    offset: float = 0.0,
) -> TimeToDetection:
    """Return the distribution of the day of detection over the inspections that can still see the run.

    Arguments as in ``log_miss_by_day``.
    """
    between = float(reals("period", period, low=0, high=np.inf, open_low=True))
    length = float(reals("days", days, low=0, high=np.inf, open_low=True))
    first = between - float(reals("offset", offset, low=0, high=np.inf))
    number = 1 + int(np.ceil(max(0.0, length - first) / between - _ROUNDING))
    if number > _MOST_INSPECTIONS:
        raise CallerError(f"{number} inspections are too many: the period is very short compared with the run")
    schedule = first + between * np.arange(number, dtype=np.float64)
    values = log_miss_by_day(
        schedule,
        share=share,
        samples=samples,
        days=length,
        period=between,
        rate=rate,
        readout=readout,
        offset=offset,
    )
    return TimeToDetection(days=schedule, log_miss=np.broadcast_to(values, schedule.shape))
