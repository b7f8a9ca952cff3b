"""False alarms: how often a regime accuses a lab that breaks no rule, and how many refusals it must tolerate.

A drawn chip may be impossible to show for an innocent reason: it is broken, in transit or switched off. An inspector
who tolerates too few such refusals accuses honest labs, and his detection probability then says nothing: what tells a
lab that breaks the rule from one that does not is the excess, detection less false alarm. Every refusal that is
tolerated is one that a dishonest lab uses for a chip with evidence.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import betainc, betaincc

from inspector.probability._logspace import Floats, counts, reals

__all__ = ["FALSE_ALARMS", "fewest_tolerated", "log_tolerated", "within_cap"]

FALSE_ALARMS = 0.01
"""The largest chance of accusing an honest lab that a schedule may have, unless the caller names another."""


def log_tolerated(*, rate: ArrayLike, checks: ArrayLike, allowed: ArrayLike) -> Floats:
    """Return log P(at most ``allowed`` of ``checks`` independent checks fail), each with chance ``rate``.

    The binomial tail as an incomplete beta function, taken from its complement where that is the smaller one, so that
    both 1e-18 below certainty and 1e-300 above impossibility are told; below the smallest float it is -inf.
    """
    chance = reals("rate", rate, low=0, high=1)
    tries = counts("checks", checks)
    enough = counts("tolerated", allowed)
    possible = enough < tries
    above, below = enough + 1.0, np.where(possible, tries - enough, 1.0)
    alarm, passes = betainc(above, below, chance), betaincc(above, below, chance)
    with np.errstate(divide="ignore"):
        log = np.where(alarm < 0.5, np.log1p(-np.minimum(alarm, 0.5)), np.log(passes))
    return np.where(possible, log, 0.0)[()]


def within_cap(false_alarm: float, cap: float) -> bool:
    """Return whether a schedule that accuses an honest lab with ``false_alarm`` may be proposed at all."""
    return false_alarm <= cap


def fewest_tolerated(false_alarm: Callable[[int], float], *, most: int, cap: float) -> int | None:
    """Return the fewest refusals to tolerate, at most ``most``, that keep honest labs within the cap; None if none do.

    Args:
        false_alarm: chance of accusing an honest lab by the number tolerated; it never rises with that number.
        most: refusals beyond which nothing is left to check.
        cap: largest false alarm.
    """
    if within_cap(false_alarm(0), cap):
        return 0
    if not within_cap(false_alarm(most), cap):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if within_cap(false_alarm(middle), cap) else (middle, high)
    return high
