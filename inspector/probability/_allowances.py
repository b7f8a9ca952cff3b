"""Search over sites that each keep an allowance of their own: how the cap on false alarms is split best.

Every site picks one option: a period, a number tolerated and a sample. The logarithms of the misses and of the quiet
visits add up over sites, so for a known placement of the run both conditions are linear in the picks, and an integer
programme chooses. An oracle returns the placement that evades its choice best; this becomes a condition, and so on.
On a large problem an option stands for a range of samples and of numbers tolerated, at the range's least cost, fewest
false alarms and surest catch: what the programme proves is then still a lower bound on the cost of every schedule.
Finer options around its choice, at their true values, give the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from inspector.probability._logspace import Floats
from inspector.probability._responses import best_response, false_alarm, tolerating
from inspector.probability._schedule import PlannedRun, Problem, Visits, schedule_work
from inspector.probability._search import Whole, cheapest_visits, last_sample
from inspector.probability.alarms import log_tolerated, within_cap
from inspector.probability.detection import DAYS_PER_YEAR

__all__ = ["allowances"]

_MOST_OPTIONS = 1_500
_FEW_OPTIONS = 500
_MOST_RANGES = 1_000
_RATIOS = (1.1, 1.2, 1.4, 1.8, 2.5)
_ZOOMS = (1.06, 1.02, 1.005)
_ROUNDS = 60
_FEW_ROUNDS = 5
_FEW_NODES = 20
_FEW_SITES = 4
_CHECKS = 1_000
_INFEASIBLE = 2
_NODES = 2_000
_NEGLIGIBLE = 1e-5
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class _Options:
    """The options of all sites, one a row: samples from ``fewest`` to ``samples``, tolerated up to ``most``."""

    place: Whole
    period: Floats
    fewest: Whole
    samples: Whole
    tolerated: Whole
    most: Whole

    @classmethod
    def of(cls, rows: Sequence[tuple[int, float, int, int, int, int]]) -> _Options:
        place, period, *rest = zip(*rows, strict=True)
        return cls(np.array(place), np.array(period), *(np.array(each, dtype=np.int64) for each in rest))


def allowances(problem: Problem, shape: Sequence[Visits] | None) -> tuple[list[Visits] | None, float]:
    """Return the cheapest schedule found, None if none was, and a lower bound on the work of every schedule.

    ``shape`` is a good schedule without honest refusals: multiples of it are tried too.
    """
    search = _Search(problem)
    simple = [each for each in (_proportional(problem), _multiple(problem, shape) if shape else None) if each]
    start = min(simple, key=search.work) if simple else _even(problem)
    best = None if start is None else search.tightened(start)
    room = math.inf if best is None else search.work(best)
    every = search.options(1.0, room)
    most = _MOST_OPTIONS if len(problem.sites) <= _FEW_SITES else _FEW_OPTIONS
    if every is not None and len(every.place) <= most:
        chosen, bound = search.solve(every, gap=1e-4, nodes=_NODES)
        if chosen is None or search.work(chosen) > room:
            chosen = best
        return chosen, min(bound, room)
    if best is None:
        return None, 0.0
    ranges = (search.options(ratio, room) for ratio in _RATIOS)
    coarse = next((each for each in ranges if each is not None and len(each.place) <= _MOST_RANGES), None)
    bound = 0.0 if coarse is None else float(search.solve(coarse, gap=1.0, nodes=0)[1])
    for ratio in _ZOOMS if len(problem.sites) <= _FEW_SITES else ():
        chosen, _ = search.solve(search.around(best, ratio), gap=1e-3, nodes=_FEW_NODES)
        if chosen is not None and search.work(chosen) < search.work(best):
            best = chosen
    return best, min(bound, room)


def _proportional(problem: Problem) -> list[Visits] | None:
    """Return a schedule of one period for all sites, draws in proportion to chips and the cap split equally."""
    chips = [site.chips for site in problem.sites]
    search = _Search(problem)
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
    search = _Search(problem)

    def times(factor: float) -> list[Visits]:
        more = [
            replace(each, samples=min(math.floor(site.chips), math.ceil(factor * each.samples - _SLACK)))
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

    The Prover puts at least that part on some site, so the whole holds.
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


class _Search:
    """The integer programme, with one condition for each placement found so far."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._runs = {each.name: PlannedRun.of(problem, each) for each in problem.evasions}
        self._cap = -math.log1p(-problem.false_alarms)
        self._evasions = list(problem.evasions)
        self._cuts: list[tuple[PlannedRun, Floats]] = []
        chips = np.array([site.chips for site in problem.sites])
        for run in self._runs.values():
            room = np.where(run.allowed, chips, 0.0)
            self._cuts.append((run, room * (run.chips / room.sum())))

    def work(self, visits: Sequence[Visits]) -> float:
        """Return what a schedule costs."""
        return schedule_work(self._problem, visits)

    def keeps(self, visits: Sequence[Visits]) -> bool:
        return within_cap(false_alarm(self._problem, visits, self._problem.longest), self._problem.false_alarms)

    def holds(self, visits: Sequence[Visits]) -> bool:
        """Return whether a schedule catches every evasion; the placements that evade it become conditions."""
        responses = [best_response(self._problem, visits, each) for each in self._problem.evasions]
        missed = [each for each in responses if each.detection < self._problem.confidence]
        self._cuts += [(self._runs[each.evasion], np.array(each.placement)) for each in missed]
        return not missed

    def catches(self, visits: Sequence[Visits]) -> bool:
        """Return whether a schedule catches every evasion; the one that escaped last is tried first."""
        for each in self._evasions:
            if best_response(self._problem, visits, each).detection < self._problem.confidence:
                self._evasions.remove(each)
                self._evasions.insert(0, each)
                return False
        return True

    def tightened(self, best: list[Visits]) -> list[Visits]:
        """Return a schedule that holds, no dearer: site by site one refusal fewer, or as many, and fewer samples.

        An equal part of the cap for each visit leaves some of it unused; this uses it up. The number of schedules that
        are tried is bounded.
        """
        left = _CHECKS // len(best)
        moved = True
        while moved and left > 0:
            moved = False
            for place in sorted(range(len(best)), key=lambda place: -best[place].samples):
                for fewer in (1, 0):
                    each, trial = best[place], best.copy()
                    allowed = max(0, each.refusals_allowed - fewer)
                    low, high = each.samples // 2, each.samples
                    while high - low > max(1, each.samples // 2_000) and left > 0:
                        middle = high - 1 if high == each.samples and not fewer else (low + high) // 2
                        left -= 1
                        trial[place] = replace(each, samples=middle, refusals_allowed=allowed)
                        low, high = (low, middle) if self.catches(trial) else (middle, high)
                    trial[place] = replace(each, samples=high, refusals_allowed=allowed)
                    if high < each.samples and self.keeps(trial):
                        best, moved = trial, True
                        break
        return best

    def options(self, ratio: float, room: float) -> _Options | None:
        """Return ranges that cover every schedule of at most ``room``; their ends lie ``ratio`` apart.

        None where there are too many.
        """
        rows: list[tuple[int, float, int, int, int, int]] = []
        for place, site in enumerate(self._problem.sites):
            rows.append((place, math.inf, 0, 0, 0, 0))
            for period in self._problem.periods:
                yearly = Visits(site=site.name, period=period, samples=1).per_year
                left = (room / yearly - site.visit_work) / site.sample_work
                largest = math.floor(min(site.chips, left + _SLACK))
                tolerated = 0
                while tolerated < largest:
                    last = max(tolerated, math.floor(tolerated * ratio))
                    low = self._quiet(period, tolerated - 1, largest, _NEGLIGIBLE * self._cap) if tolerated else 0
                    high = self._quiet(period, last, largest, self._cap)
                    if low >= largest:
                        break
                    fewest = low + 1
                    while fewest <= high:
                        if len(rows) > 2 * _MOST_RANGES:
                            return None
                        samples = min(high, max(fewest, math.floor(fewest * ratio)))
                        rows.append((place, period, fewest, samples, tolerated, last))
                        fewest = samples + 1
                    tolerated = last + 1
        return self._able(_Options.of(rows))

    def around(self, visits: Sequence[Visits], ratio: float) -> _Options:
        """Return single options near a schedule, ``ratio`` apart, and those of the periods next to its own."""
        rows: list[tuple[int, float, int, int, int, int]] = []
        periods = sorted(self._problem.periods)
        for place, (site, each) in enumerate(zip(self._problem.sites, visits, strict=True)):
            rows.append((place, math.inf, 0, 0, 0, 0))
            if not each.samples:
                continue
            coarse = each.samples * (ratio**8 - 1.0)
            near = max(3, each.refusals_allowed // 8)
            for period in periods if len(visits) < 4 else [each.period]:
                scale = period / each.period
                middle = round(each.refusals_allowed * min(1.0, scale))
                for tolerated in range(max(0, middle - near), middle + near + 1, max(1, near // 4)):
                    for step in range(-8, 9):
                        moved = round(each.samples * scale)
                        moved = moved + step if coarse < 8 else round(moved * ratio**step)
                        if tolerated < moved <= math.floor(site.chips):
                            rows.append((place, period, moved, moved, tolerated, tolerated))
        return self._able(_Options.of(sorted(set(rows))))

    def _able(self, options: _Options) -> _Options:
        """Return the options without those with which a whole run at their site alone goes unseen."""
        able = np.ones(len(options.place), dtype=bool)
        chips = np.array([site.chips for site in self._problem.sites])
        for run in self._runs.values():
            alone = run.allowed & (run.chips <= chips)
            caught = self._caught(options, run, np.where(alone, run.chips, 0.0))
            able &= ~alone[options.place] | (caught >= self._problem.exponent * (1.0 - _SLACK))
        names = ("place", "period", "fewest", "samples", "tolerated", "most")
        return _Options(*(getattr(options, name)[able] for name in names))

    def _quiet(self, period: float, tolerated: int, most: int, cap: float) -> int:
        times = max(1.0, self._problem.longest / period)

        def keeps(samples: Whole, allowed: Whole) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
            quiet = log_tolerated(rate=self._problem.honest_refusal_rate, checks=samples, allowed=allowed)
            return np.asarray(-times * quiet <= cap * (1.0 + _SLACK))

        return int(last_sample(keeps, np.array([tolerated]), most)[0])

    def _caught(self, options: _Options, run: PlannedRun, used: Floats) -> Floats:
        """Return -log of the miss of each option at its site, where ``used`` chips of each site are in the run."""
        chips = np.array([site.chips for site in self._problem.sites])
        windows = {period: run.inspections(period) for period in self._problem.periods} | {math.inf: (0.0, 0.0)}
        times, catch = np.array([windows[each] for each in options.period.tolist()]).reshape(-1, 2).T
        log = run.log_passes(
            share=np.minimum(used / chips, 1.0)[options.place],
            catch=catch,
            broken=self._problem.honest_refusal_rate,
            samples=options.samples,
            allowed=options.tolerated,
        )
        return np.where(times > 0, -np.maximum(times, 1.0) * log, 0.0)

    def solve(self, options: _Options, *, gap: float, nodes: int) -> tuple[list[Visits] | None, float]:
        """Return the cheapest pick of options that holds, None if there is none, and the bound that it proves."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        sites, number = self._problem.sites, len(options.place)
        if len(set(options.place.tolist())) < len(sites):
            return None, math.inf
        yearly = np.array([0.0 if math.isinf(each) else DAYS_PER_YEAR / each for each in options.period])
        visit, sample = (
            np.array([getattr(each, name) for each in sites])[options.place] for name in ("visit_work", "sample_work")
        )
        cost = yearly * (visit + sample * options.fewest)
        scale = cost.max() or 1.0
        times = np.where(yearly > 0, np.maximum(1.0, self._problem.longest / options.period), 0.0)
        quiet = log_tolerated(rate=self._problem.honest_refusal_rate, checks=options.fewest, allowed=options.most)
        alarm = np.where(times > 0, -times * np.maximum(quiet, -1e300), 0.0)
        alarm = np.where(alarm <= _NEGLIGIBLE * self._cap, 0.0, alarm) / (self._cap or 1.0)
        one = csr_array((np.ones(number), (options.place, np.arange(number))), shape=(len(sites), number))
        bound = 0.0
        rows: list[Floats] = []
        tight = bool((options.fewest == options.samples).all())
        for _ in range(_ROUNDS if nodes == _NODES else _FEW_ROUNDS):
            for run, placed in self._cuts[len(rows) :]:
                rows.append(np.minimum(self._caught(options, run, placed) / self._problem.exponent, 1.0))
            result = milp(
                cost / scale,
                integrality=np.full(number, int(nodes > 0)),
                bounds=Bounds(0, 1),
                constraints=[
                    LinearConstraint(one, 1, 1),
                    LinearConstraint(alarm[None], -np.inf, 1.0 - (_NEGLIGIBLE * len(sites) if tight else 0.0)),
                    LinearConstraint(np.array(rows), 1.0 - _SLACK, np.inf),
                ],
                options={"mip_rel_gap": gap, "node_limit": nodes},
            )
            proved = result.get("mip_dual_bound") if nodes else result.fun
            bound = max(bound, 0.0 if proved is None else float(proved) * scale)
            if result.x is None:
                return None, math.inf if result.status == _INFEASIBLE else bound
            largest = [np.where(options.place == place, result.x, -1.0).argmax() for place in range(len(sites))]
            visits = [
                Visits(
                    site=site.name,
                    period=float(options.period[each]) if yearly[each] else max(self._problem.periods),
                    samples=int(options.samples[each]),
                    refusals_allowed=int(options.tolerated[each]),
                )
                for site, each in zip(sites, largest, strict=True)
            ]
            if self.holds(visits):
                return (visits if self.keeps(visits) else None), bound
        return None, bound
