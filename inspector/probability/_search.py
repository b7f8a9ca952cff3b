"""Exact search for one site: for each period and number tolerated, the least sample that catches and keeps the cap.

With tolerated refusals detection is a sawtooth in the sample size, so no bisection over schedules finds the cheapest
one. For a fixed number tolerated, detection and false alarms both rise with the sample: the least sample that catches
and the largest that keeps the cap are found by bisection. Both rise with the number tolerated. So a whole range of
numbers fails if the least sample of its first number exceeds the largest of its last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from inspector.probability import alarms
from inspector.probability._schedule import PlannedRun, Problem, VisitedSite, Visits
from inspector.probability.alarms import log_tolerated

__all__ = ["Whole", "cheapest_visits", "last_sample", "pooled"]

_PARTS = 64
Whole = NDArray[np.int64]
Holds = Callable[[Whole, Whole], NDArray[np.bool_]]
"""Of samples and numbers tolerated: where a bound holds."""


def pooled(problem: Problem) -> Problem:
    """Return the problem of one site that all sites together are, under one allowance for refusals.

    The draw is uniform over the chips of all sites, and each visit goes to all of them on the same days. Where the
    lab puts its run then makes no difference; evasions that do not fit the sites that they may use are left out.
    """
    chips = [site.chips for site in problem.sites]
    whole = VisitedSite(
        name="all sites",
        chips=math.fsum(chips),
        visit_work=math.fsum(site.visit_work for site in problem.sites),
        sample_work=math.fsum(site.sample_work * site.chips for site in problem.sites) / math.fsum(chips),
    )
    fitting = [each for each in problem.evasions if PlannedRun.of(problem, each).fits]
    return replace(problem, sites=(whole,), evasions=tuple(replace(each, sites=()) for each in fitting))


def cheapest_visits(problem: Problem) -> Visits | None:
    """Return the cheapest visits of a problem's only site that hold; None if no period, sample and allowance does."""
    (site,) = problem.sites
    best, least = None, math.inf
    for period in sorted(problem.periods, reverse=True):
        each = Visits(site=site.name, period=period, samples=1)
        room = (least / each.per_year - site.visit_work) / site.sample_work
        found = _cheapest_at(problem, period, most=math.floor(min(site.chips, room)))
        if found is not None:
            work = found.per_year * (site.visit_work + site.sample_work * found.samples)
            if work < least:
                best, least = found, work
    return best


def _cheapest_at(problem: Problem, period: float, *, most: int) -> Visits | None:
    """Return the fewest samples, at most ``most``, and what they tolerate; the first number that holds needs least."""
    (site,) = problem.sites
    once = Visits(site=site.name, period=period, samples=1)
    rate = problem.honest_refusal_rate
    runs = [(run, *run.inspections(period)) for run in (PlannedRun.of(problem, each) for each in problem.evasions)]

    def escapes(samples: Whole, allowed: Whole) -> NDArray[np.bool_]:
        caught = np.ones(len(samples), dtype=bool)
        for run, times, catch in runs:
            share = min(run.chips / site.chips, 1.0)
            log = run.log_passes(share=share, catch=catch, broken=rate, samples=samples, allowed=allowed)
            caught &= -np.expm1(times * log) >= problem.confidence
        return ~caught

    def keeps(samples: Whole, allowed: Whole) -> NDArray[np.bool_]:
        quiet = log_tolerated(rate=rate, checks=samples, allowed=allowed)
        alarm = -np.expm1(once.times(problem.longest) * quiet)
        return np.array([alarms.within_cap(each, problem.false_alarms) for each in alarm.tolist()])

    low, high = 0, 1 if rate == 0 else _PARTS
    while low < most:
        found = _first_that_holds(escapes, keeps, low, min(high, most), 0, most)
        if found is not None:
            return replace(once, samples=found[0], refusals_allowed=found[1])
        if rate == 0:
            return None
        if escapes(np.array([most]), np.array([min(high, most) - 1]))[0]:
            return None  # To tolerate more takes still more samples.
        low, high = high, high * _PARTS
    return None


def _first_that_holds(
    escapes: Holds, keeps: Holds, low: int, high: int, least: int, largest: int
) -> tuple[int, int] | None:
    """Return the sample and the number tolerated, the first from ``low`` to below ``high`` that holds.

    The largest sample that keeps the cap lies from ``least`` to ``largest`` for all of them.
    """
    ends = np.unique(np.linspace(low, high, _PARTS + 1).astype(np.int64))
    begins, lasts = ends[:-1], ends[1:] - 1
    kept = last_sample(keeps, lasts, largest, least)
    for place in np.flatnonzero(~escapes(kept, begins)):
        begin, last = int(begins[place]), int(lasts[place])
        if begin == last:
            return int(last_sample(escapes, begins[[place]], int(kept[place]))[0]) + 1, begin
        before = int(kept[place - 1]) if place else least
        found = _first_that_holds(escapes, keeps, begin, last + 1, before, int(kept[place]))
        if found is not None:
            return found
    return None


def last_sample(holds: Holds, allowed: Whole, most: int, least: int = 0) -> Whole:
    """Return for each number tolerated the largest sample up to ``most`` for which ``holds``, true at ``least``."""
    low, high = np.full(len(allowed), least, dtype=np.int64), np.full(len(allowed), most + 1, dtype=np.int64)
    while (high - low > 1).any():
        middle = (low + high) // 2
        true = holds(middle, allowed)
        low, high = np.where(true, middle, low), np.where(true, high, middle)
    return low
