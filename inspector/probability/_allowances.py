"""Search over sites that each keep an allowance of their own: how the cap on false alarms is split best.

Every site picks one option: a period, a number tolerated and a sample. The logarithms of the misses and of the quiet
visits add up over sites, so for a known placement of the run both conditions are linear in the picks, and an integer
programme chooses. An oracle returns the placement that evades its choice best; this becomes a condition, and so on.

A large problem has too many options for that. There an option represents a range of samples and of numbers tolerated,
at the range's least cost, fewest false alarms and surest catch. The linear programme over such ranges is a lower bound
on the cost of every schedule. The ranges that it uses are halved, and those that would cost too much are dropped, until
the bound hardly rises. The plan is a simple schedule, improved by a few sites at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from inspector.probability._allowance_search import SLACK, AllowanceSearch
from inspector.probability._responses import tolerating
from inspector.probability._schedule import Problem, Visits
from inspector.probability._search import cheapest_visits
from inspector.probability.detection import DAYS_PER_YEAR

__all__ = ["allowances"]


_MOST_OPTIONS = 1_500
_FEW_OPTIONS = 500
_FEW_SITES = 4


def allowances(problem: Problem, shape: Sequence[Visits] | None) -> tuple[list[Visits] | None, float]:
    """Return the cheapest schedule found, None if none was, and a lower bound on the work of every schedule.

    ``shape`` is a good schedule without honest refusals: multiples of it are tried too.
    """
    search = AllowanceSearch(problem)
    simple = [each for each in (_proportional(problem), _multiple(problem, shape) if shape else None) if each]
    start = min(simple, key=search.work) if simple else _even(problem)
    best = None if start is None else search.tightened(start)
    room = math.inf if best is None else search.work(best)
    options = search.ranges(room)
    most = _MOST_OPTIONS if len(problem.sites) <= _FEW_SITES else _FEW_OPTIONS
    while len(options.place) <= most and not options.single.all():
        options = search.halved(options, ~options.single)
    if len(options.place) <= most:
        chosen, bound = search.solve(options)
        if best is None or (chosen is not None and search.work(chosen) <= room):
            return chosen, min(bound, room)
    elif best is None:
        return None, 0.0
    else:
        bound = search.relaxed(options, room)
    return search.exchanged(best), min(bound, room)


def _proportional(problem: Problem) -> list[Visits] | None:
    """Return a schedule of one period for all sites, draws in proportion to chips and the cap split equally."""
    chips = [site.chips for site in problem.sites]
    search = AllowanceSearch(problem)
    best: list[Visits] | None = None
    for period in sorted(problem.periods, reverse=True):

        def drawn(number: float, period: float = period) -> list[Visits]:
            return tolerating(
                problem,
                [
                    Visits(site=site.name, period=period, samples=math.ceil(min(1.0, number / sum(chips)) * site.chips))
                    for site in problem.sites
                ],
            )

        low, high = 0.0, sum(chips)
        if best is not None:
            yearly = DAYS_PER_YEAR / period
            high = min(high, search.work(best) / yearly - sum(site.visit_work for site in problem.sites))
        if high < 1 or not search.catches(drawn(high)):
            continue
        while high - low > max(0.5, 1e-4 * high):
            middle = high / 2.0 if not low else math.sqrt(low * high)
            low, high = (low, middle) if search.catches(drawn(middle)) else (middle, high)
        found = drawn(high)
        best = found if best is None else min(best, found, key=search.work)
    return best


def _multiple(problem: Problem, shape: Sequence[Visits]) -> list[Visits] | None:
    """Return the smallest multiple of a schedule that catches, under an equal part of the cap for each visit."""
    search = AllowanceSearch(problem)

    def times(factor: float) -> list[Visits]:
        more = [
            replace(each, samples=min(math.floor(site.chips), math.ceil(factor * each.samples - SLACK)))
            for site, each in zip(problem.sites, shape, strict=True)
        ]
        return tolerating(problem, more)

    low, high = 0.0, 1.0
    most = max(site.chips / max(each.samples, 1) for site, each in zip(problem.sites, shape, strict=True))
    while not search.catches(times(high)):
        if high >= most:
            return None
        low, high = high, high * 2.0
    while high - low > 1e-4 * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if search.catches(times(middle)) else (middle, high)
    return times(high)


def _even(problem: Problem) -> list[Visits] | None:
    """Return each site's plan against the run's part by chips, under an equal part of the cap.

    The lab puts at least that part on some site, so the whole holds.
    """
    total = sum(site.chips for site in problem.sites)
    cap = -math.expm1(math.log1p(-problem.false_alarms) / len(problem.sites)) if problem.false_alarms < 1 else 1.0
    found = []
    for site in problem.sites:
        part = replace(
            problem,
            sites=(site,),
            flop=problem.flop * site.chips / total,
            evasions=tuple(replace(each, sites=()) for each in problem.evasions),
            false_alarms=cap,
        )
        visits = cheapest_visits(part)
        if visits is None:
            return None
        found.append(visits)
    return found
