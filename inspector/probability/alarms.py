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

__all__ = [
    "FALSE_ALARMS",
    "expected_cost",
    "fewest_tolerated",
    "likelihood_ratio",
    "log_tolerated",
    "posterior",
    "within_cap",
]

FALSE_ALARMS = 0.01
"""The largest chance of accusing an honest lab that a schedule may have, unless the caller names another."""


def log_tolerated(*, rate: ArrayLike, checks: ArrayLike, allowed: ArrayLike) -> Floats:
    """Return log P(at most ``allowed`` of ``checks`` independent checks fail), each with chance ``rate``.

    The binomial tail as an incomplete beta function, taken from its complement where that is the smaller one, so that
    both 1e-18 below certainty and 1e-300 above impossibility are resolved; below the smallest float it is -inf.
    """
    chance = reals("rate", rate, low=0, high=1)
    tries = counts("checks", checks)
    enough = counts("tolerated", allowed)
    possible = enough < tries
    above, below = enough + 1.0, np.where(possible, tries - enough, 1.0)
    alarm = np.asarray(betainc(above, below, chance))
    large = alarm >= 0.5
    passes = betaincc(above, below, chance, where=large, out=np.ones_like(alarm))
    with np.errstate(divide="ignore"):
        log = np.where(large, np.log(passes), np.log1p(-np.minimum(alarm, 0.5)))
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


def likelihood_ratio(*, detection: ArrayLike, false_alarm: ArrayLike, accused: bool = True) -> Floats:
    """Return by what factor a verdict changes the odds of a violation: d/a of an accusation, (1-d)/(1-a) of a pass.

    Infinite where an honest lab (almost) never gets that verdict and another may; NaN where none does.
    """
    caught = reals("detection", detection, low=0, high=1)
    alarm = reals("false alarm", false_alarm, low=0, high=1)
    one, other = (caught, alarm) if accused else (1.0 - caught, 1.0 - alarm)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        return np.asarray(one / other)[()]


def posterior(*, prior: ArrayLike, detection: ArrayLike, false_alarm: ArrayLike, accused: bool = True) -> Floats:
    """Return the chance of a violation after a verdict, by Bayes' rule; NaN where no one gets that verdict.

    Args:
        prior: chance of a violation before the inspection.
        detection: chance that a violation is accused.
        false_alarm: chance that an honest lab is.
        accused: the verdict: an accusation, or a pass.
    """
    before = reals("prior", prior, low=0, high=1)
    caught = reals("detection", detection, low=0, high=1)
    alarm = reals("false alarm", false_alarm, low=0, high=1)
    guilty = before * (caught if accused else 1.0 - caught)
    honest = (1.0 - before) * (alarm if accused else 1.0 - alarm)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(guilty / (guilty + honest))[()]


def expected_cost(
    *, prior: ArrayLike, detection: ArrayLike, false_alarm: ArrayLike, miss: ArrayLike, alarm: ArrayLike
) -> Floats:
    """Return prior·(1-d)·miss + (1-prior)·a·alarm, what verdicts cost on average.

    Args:
        prior, detection, false_alarm: as in ``posterior``.
        miss: cost of a violation that goes unnoticed.
        alarm: cost of an honest lab that is accused, follow-up included; in the same unit.
    """
    before = reals("prior", prior, low=0, high=1)
    missed = 1.0 - reals("detection", detection, low=0, high=1)
    wrong = reals("false alarm", false_alarm, low=0, high=1)
    of_miss = reals("cost of a miss", miss, low=0, high=np.inf)
    of_alarm = reals("cost of an alarm", alarm, low=0, high=np.inf)
    return np.asarray(before * missed * of_miss + (1.0 - before) * wrong * of_alarm)[()]
