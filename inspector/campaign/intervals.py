"""Intervals of a probability from counted successes."""

from __future__ import annotations

import math

from firmware_sim.errors import CallerError
from inspector.campaign.checks import fraction, whole

__all__ = ["clopper_pearson", "wilson"]


def clopper_pearson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """Return the exact binomial interval; it covers with at least ``confidence``."""
    from scipy.stats import beta

    _check(successes, trials, confidence)
    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else float(beta.ppf(tail, successes, trials - successes + 1))
    high = 1.0 if successes == trials else float(beta.ppf(1 - tail, successes + 1, trials - successes))
    return low, high


def wilson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """Return Wilson's score interval; it covers with about ``confidence`` and is shorter than the exact one."""
    from scipy.stats import norm

    _check(successes, trials, confidence)
    z = float(norm.isf((1 - confidence) / 2))
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials)) / (1 + z * z / trials)
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    return low, 1.0 if successes == trials else min(1.0, centre + half)


def _check(successes: int, trials: int, confidence: float) -> None:
    whole("trials", trials, 1)
    whole("successes", successes)
    fraction("confidence", confidence)
    if successes > trials:
        raise CallerError(f"there are {successes} successes, but only {trials} trials")
