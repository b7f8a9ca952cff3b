"""The integer programme behind allowances: options of sites, placements that evade them, and linear bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle

import numpy as np
from numpy.typing import NDArray

from inspector.probability._logspace import Floats
from inspector.probability._responses import CELLS, best_response, false_alarm, filled
from inspector.probability._schedule import PlannedRun, Problem, Visits, schedule_work
from inspector.probability._search import Whole
from inspector.probability.alarms import log_tolerated, within_cap
from inspector.probability.detection import DAYS_PER_YEAR

__all__ = ["SLACK", "AllowanceSearch", "Options"]

Flags = NDArray[np.bool_]

_SITES_BY_THREE = 5
_HALVINGS = 30
_HALVED = 150
_NEAR = 0.05
_ROUNDS = 60
_GAP = 1e-4
_ZOOMS = (1.1, 1.05, 1.02, 1.005)
_COARSE = 1.03
_STEPS = 6
_GROUPS = 60
_TRIES = 20
_RECENT = 100
_LEAST_GAIN = 1e-5
_CHECKS = 1_000
_INFEASIBLE = 2
_NODES = 2_000
_NEGLIGIBLE = 1e-5
SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Options:
    """The options of all sites, one a row: samples from ``fewest`` to ``samples``, tolerated up to ``most``."""

    place: Whole
    period: Floats
    fewest: Whole
    samples: Whole
    tolerated: Whole
    most: Whole

    @property
    def single(self) -> Flags:
        """Whether a row is one option, not a range of several."""
        return np.asarray((self.fewest == self.samples) & (self.tolerated == self.most))

    def only(self, rows: Flags | Whole) -> Options:
        """Return some of the rows."""
        return Options(*(getattr(self, name)[rows] for name in self.__slots__))

    def with_(self, other: Options) -> Options:
        """Return these rows and another's."""
        return Options(*(np.concatenate([getattr(self, name), getattr(other, name)]) for name in self.__slots__))


class AllowanceSearch:
    """The integer programme, with one condition for each placement found so far."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._runs = {each.name: PlannedRun.of(problem, each) for each in problem.evasions}
        self._cap = -math.log1p(-problem.false_alarms)
        self._evasions = list(problem.evasions)
        self._cuts: list[tuple[str, Floats]] = []
        self._chips = np.array([site.chips for site in problem.sites])
        self._periods = np.array([*sorted(problem.periods), math.inf])
        self._windows: dict[str, Floats] = {}
        for name, run in self._runs.items():
            room = np.where(run.allowed, self._chips, 0.0)
            self._cuts.append((name, room * (run.chips / room.sum())))
            windows = [run.inspections(period) for period in self._periods[:-1].tolist()]
            self._windows[name] = np.array([*windows, (0.0, 0.0)]).T

    def work(self, visits: Sequence[Visits]) -> float:
        """Return what a schedule costs."""
        return schedule_work(self._problem, visits)

    def keeps(self, visits: Sequence[Visits]) -> bool:
        return within_cap(false_alarm(self._problem, visits, self._problem.longest), self._problem.false_alarms)

    def holds(self, visits: Sequence[Visits]) -> bool:
        """Return whether a schedule catches every evasion; the placements that evade it become conditions."""
        responses = [best_response(self._problem, visits, each) for each in self._problem.evasions]
        missed = [each for each in responses if each.detection < self._problem.confidence]
        self._cuts += [(each.evasion, np.array(each.placement)) for each in missed]
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

    def ranges(self, room: float) -> Options:
        """Return one range for each site and period, which together cover every schedule of at most ``room``."""
        rows: list[tuple[float, ...]] = []
        for place, site in enumerate(self._problem.sites):
            rows.append((place, math.inf, 0, 0, 0, 0))
            for period in self._problem.periods:
                yearly = Visits(site=site.name, period=period, samples=1).per_year
                left = (room / yearly - site.visit_work) / site.sample_work
                largest = math.floor(min(site.chips, left + SLACK))
                if largest >= 1:
                    rows.append((place, period, 1, largest, 0, largest - 1))
        places, periods, *rest = (np.array(each) for each in zip(*rows, strict=True))
        return self._able(Options(places, periods, *rest))

    def halved(self, options: Options, split: Flags) -> Options:
        """Return the options with some ranges in halves; what breaks the cap, or can be left out, is gone."""
        old = options.only(split)
        wide = old.samples * (old.tolerated + 1) >= old.fewest * (old.most + 1)  # in samples, rather than in tolerated
        middle = np.sqrt(old.fewest * old.samples.astype(float)).astype(np.int64)
        between = np.sqrt((old.tolerated + 1.0) * (old.most + 1.0)).astype(np.int64) - 1
        lower = replace(old, samples=np.where(wide, middle, old.samples), most=np.where(wide, old.most, between))
        upper = replace(
            old,
            fewest=np.where(wide, middle + 1, old.fewest),
            tolerated=np.where(wide, old.tolerated, between + 1),
        )
        return options.only(~split).with_(self._able(lower.with_(upper)))

    def exchanged(self, best: list[Visits]) -> list[Visits]:
        """Return a schedule that holds, no dearer: a few sites at a time pick anew among options near their own."""
        left = _GROUPS
        for ratio in _ZOOMS:
            coarse = ratio > _COARSE
            together = 3 if coarse and len(best) <= _SITES_BY_THREE else 2
            groups = list(combinations(range(len(best)), min(len(best), together)))
            still = 0  # groups in a row that found nothing
            for group in cycle(groups):
                if still == len(groups) or left == 0:
                    break
                left -= 1
                periods = [best[place].period for place in group] if coarse else self._problem.periods
                found = self._regrouped(best, group, ratio, sorted(set(periods)))
                best, still = (best, still + 1) if found is None else (found, 0)
        return best

    def _regrouped(
        self, best: list[Visits], group: tuple[int, ...], ratio: float, periods: Sequence[float]
    ) -> list[Visits] | None:
        """Return a cheaper schedule that holds and differs at a group of sites alone; None if none was found."""
        every = [self._around(place, best[place], ratio, periods) for place in group]
        if not all(len(each.place) for each in every):
            return None
        whole = self._chosen(
            [
                (place, each.period if each.samples else math.inf, each.samples, each.refusals_allowed)
                for place, each in enumerate(best)
            ]
        )
        fixed = ~np.isin(whole.place, group)
        present = float(self._cost(whole)[~fixed].sum())
        left = present * (1.0 - _LEAST_GAIN) - sum(float(self._cost(each).min()) for each in every)
        picks, cost = np.zeros((1, 0), dtype=np.int64), np.zeros(1)
        alarm = self._alarms(whole, whole.samples, whole.tolerated)[fixed].sum(keepdims=True)
        for each in every:
            dearer = self._cost(each) - self._cost(each).min()
            more = self._alarms(each, each.samples, each.tolerated)
            old, new = np.nonzero((cost[:, None] + dearer < left) & (alarm[:, None] + more <= self._cap))
            picks, cost, alarm = np.column_stack([picks[old], new]), cost[old] + dearer[new], alarm[old] + more[new]
        picks = picks[np.argsort(cost, kind="stable")]
        known = max(0, len(self._cuts) - _RECENT)
        for _ in range(_TRIES):
            needed = 1.0 - SLACK - self._conditions(whole, known)[:, fixed].sum(axis=1)
            caught = [self._conditions(each, known) for each in every]
            known = len(self._cuts)
            for row, wanted in enumerate(needed):
                picks = picks[sum(each[row, at] for each, at in zip(caught, picks.T, strict=True)) >= wanted]
            if not len(picks):
                return None
            trial = best.copy()
            for place, options, at in zip(group, every, picks[0].tolist(), strict=True):
                trial[place] = self._visits(options, at)
            if self.holds(trial) and self.keeps(trial):
                return trial
            picks = picks[1:]
        return None

    def _visits(self, options: Options, row: int) -> Visits:
        """Return what an option means at its site."""
        samples = int(options.samples[row])
        return Visits(
            site=self._problem.sites[options.place[row]].name,
            period=float(options.period[row]) if samples else max(self._problem.periods),
            samples=samples,
            refusals_allowed=int(options.tolerated[row]),
        )

    def _around(self, place: int, visits: Visits, ratio: float, periods: Sequence[float]) -> Options:
        """Return single options of a site near its present one, ``ratio`` apart, at these periods."""
        rows = {
            (math.inf, 0, 0),
            (visits.period if visits.samples else math.inf, visits.samples, visits.refusals_allowed),
        }
        steps = np.arange(-_STEPS, _STEPS + 1)
        for period in periods if visits.samples else ():
            scale = period / visits.period
            middle = round(visits.refusals_allowed * min(1.0, scale))
            near = max(2, visits.refusals_allowed // 16)
            numbers = np.round(visits.samples * scale * ratio**steps), np.round(visits.samples * scale) + steps
            samples = np.unique(np.concatenate(numbers).astype(int)).tolist()
            most = math.floor(self._problem.sites[place].chips)
            for allowed in range(max(0, middle - near), middle + near + 1, near // 2):
                rows |= {(period, number, allowed) for number in samples if allowed < number <= most}
        return self._able(self._chosen([(place, *row) for row in sorted(rows)]))

    @staticmethod
    def _chosen(rows: Sequence[tuple[int, float, int, int]]) -> Options:
        """Return single options: the number of a site, a period, samples and how many are tolerated."""
        place, period, samples, tolerated = (np.array(each) for each in zip(*rows, strict=True))
        return Options(place, period, samples, samples, tolerated, tolerated)

    def _able(self, options: Options) -> Options:
        """Return the options that a schedule within the cap may need, without those that let a whole run at a site go.

        One whose false alarms would not count with one refusal fewer tolerated either is left out for that.
        """
        options = replace(
            options,
            fewest=np.where(options.samples > 0, np.maximum(options.fewest, options.tolerated + 1), 0),
            most=np.maximum(np.minimum(options.most, options.samples - 1), 0),
        )
        options = options.only((options.fewest <= options.samples) & (options.tolerated <= options.most))
        fewer = np.maximum(options.tolerated - 1, 0)
        needless = (options.tolerated > 0) & (self._alarms(options, options.samples, fewer) <= _NEGLIGIBLE * self._cap)
        quiet = self._alarms(options, options.fewest, options.most) <= self._cap * (1.0 + SLACK)
        options = options.only(quiet & ~needless)
        able = np.ones(len(options.place), dtype=bool)
        for name, run in self._runs.items():
            alone = run.allowed & (run.chips <= self._chips)
            caught = self._caught(options, name, np.where(alone, run.chips, 0.0))
            able &= ~alone[options.place] | (caught >= self._problem.exponent * (1.0 - SLACK))
        return options.only(able)

    def _alarms(self, options: Options, samples: Whole, tolerated: Whole) -> Floats:
        """Return -log of the chance that honest refusals are never more than tolerated, in the longest run."""
        if not len(samples):
            return np.zeros(0)
        times = np.where(options.samples > 0, np.maximum(1.0, self._problem.longest / options.period), 0.0)
        quiet = log_tolerated(rate=self._problem.honest_refusal_rate, checks=samples, allowed=tolerated)
        return np.where(times > 0, -times * np.maximum(quiet, -1e300), 0.0)

    def _caught(self, options: Options, evasion: str, used: Floats) -> Floats:
        """Return -log of the miss of each option at its site, where ``used[..., site]`` chips are in the run."""
        if not len(options.place):
            return np.zeros((*used.shape[:-1], 0))
        times, catch = self._windows[evasion][:, np.searchsorted(self._periods, options.period)]
        log = self._runs[evasion].log_passes(
            share=np.minimum(used / self._chips, 1.0)[..., options.place],
            catch=catch,
            broken=self._problem.honest_refusal_rate,
            samples=options.samples,
            allowed=options.tolerated,
        )
        return np.where(times > 0, -np.maximum(times, 1.0) * log, 0.0)

    def _conditions(self, options: Options, first: int = 0) -> Floats:
        """Return what each option adds to the wanted exponent, by the cuts from the ``first`` on."""
        cuts = self._cuts[first:]
        rows = np.empty((len(cuts), len(options.place)))
        for evasion in self._runs:
            own = [number for number, (name, _) in enumerate(cuts) if name == evasion]
            if own:
                rows[own] = self._caught(options, evasion, np.array([cuts[number][1] for number in own]))
        return np.minimum(rows / self._problem.exponent, 1.0)

    def _visited(self, options: Options) -> Floats:
        """Return, for each evasion, what an option adds to the chips that must be visited: fewer would let it go.

        False alarms at the other sites would not reach the confidence, since their cap lies below it.
        """
        rows = np.ones((len(self._runs), len(options.place)))
        for row, run in zip(rows, self._runs.values(), strict=True):
            room = np.where(run.allowed, self._chips, 0.0)
            needed = room.sum() - run.chips
            if needed > 0:
                row[:] = np.where(options.samples > 0, room[options.place] / needed, 0.0)
        return np.minimum(rows, 1.0)

    def relaxed(self, options: Options, room: float) -> float:
        """Return a lower bound on the work of all schedules of at most ``room``, which the ranges cover."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        bound, number = 0.0, len(self._problem.sites)
        conditions = self._conditions(options)
        for _ in range(_HALVINGS):
            if len(set(options.place.tolist())) < number:
                return room
            columns = np.arange(len(options.place))
            one = csr_array((np.ones(len(columns)), (options.place, columns)), shape=(number, len(columns)))
            cost, alarm = self._cost(options), self._alarms(options, options.fewest, options.most)
            alarm = np.where(alarm <= _NEGLIGIBLE * self._cap, 0.0, alarm) / (self._cap or 1.0)
            result = linprog(
                cost / room,
                A_ub=np.vstack([alarm, -self._visited(options), -conditions]),
                b_ub=np.concatenate([[1.0], np.full(len(self._runs) + len(conditions), SLACK - 1.0)]),
                A_eq=one,
                b_eq=np.ones(number),
                method="highs",
            )
            if result.x is None:
                return room if result.status == _INFEASIBLE else bound
            bound = max(bound, float(result.fun) * room)
            above = result.lower.marginals * room
            first = len(self._cuts)
            self._evade(options, result.x)
            conditions = np.vstack([conditions, self._conditions(options, first)])
            kept = float(result.fun) * room + above <= room * (1.0 + SLACK)
            order = np.argsort(np.where(options.single | ~kept, np.inf, above), kind="stable")[:_HALVED]
            split = np.zeros(len(options.place), dtype=bool)
            split[order] = True
            split &= ~options.single & kept & ((above <= _NEAR * bound) | (result.x > 0))
            if not split.any() and len(self._cuts) == first:
                break
            old = options.only(kept & ~split)
            new = self.halved(options.only(split), np.ones(int(split.sum()), dtype=bool))
            conditions = np.hstack([conditions[:, kept & ~split], self._conditions(new)])
            options = old.with_(new)
        return bound

    def _evade(self, options: Options, weights: Floats) -> None:
        """Add to the cuts, for each evasion, the placement that evades a mixture of options best, if it escapes."""
        chosen = options.only(weights > SLACK)
        weights = weights[weights > SLACK]
        for name, run in self._runs.items():
            most = np.where(run.allowed, np.minimum(self._chips, run.chips), 0.0)
            grid = most[:, None] * np.linspace(0.0, 1.0, CELLS + 1)
            caught = weights * self._caught(chosen, name, grid.T)
            heights = np.zeros_like(grid)
            np.add.at(heights, chosen.place, caught.T)
            placed = filled(grid, heights, run.chips)
            at = sum(
                float(np.interp(used, line, height)) for used, line, height in zip(placed, grid, heights, strict=True)
            )
            if at < self._problem.exponent * (1.0 - 1e-3):
                self._cuts.append((name, placed))

    def _cost(self, options: Options) -> Floats:
        """Return the work of a year of each option, at its fewest samples."""
        visit, sample = (
            np.array([getattr(each, name) for each in self._problem.sites])[options.place]
            for name in ("visit_work", "sample_work")
        )
        return np.asarray(DAYS_PER_YEAR / options.period * (visit + sample * options.fewest))

    def solve(self, options: Options) -> tuple[list[Visits] | None, float]:
        """Return the cheapest pick of options that holds, None if there is none, and the bound that it proves."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        sites, number = self._problem.sites, len(options.place)
        if len(set(options.place.tolist())) < len(sites):
            return None, math.inf
        cost = self._cost(options)
        scale = cost.max() or 1.0
        alarm = self._alarms(options, options.fewest, options.most)
        alarm = np.where(alarm <= _NEGLIGIBLE * self._cap, 0.0, alarm) / (self._cap or 1.0)
        one = csr_array((np.ones(number), (options.place, np.arange(number))), shape=(len(sites), number))
        bound = 0.0
        rows = np.empty((0, number))
        for _ in range(_ROUNDS):
            rows = np.vstack([rows, self._conditions(options, len(rows))])
            result = milp(
                cost / scale,
                integrality=np.ones(number),
                bounds=Bounds(0, 1),
                constraints=[
                    LinearConstraint(one, 1, 1),
                    LinearConstraint(alarm[None], -np.inf, 1.0 - _NEGLIGIBLE * len(sites)),
                    LinearConstraint(np.vstack([self._visited(options), rows]), 1.0 - SLACK, np.inf),
                ],
                options={"mip_rel_gap": _GAP, "node_limit": _NODES},
            )
            proved = result.get("mip_dual_bound")
            bound = max(bound, 0.0 if proved is None else float(proved) * scale)
            if result.x is None:
                return None, math.inf if result.status == _INFEASIBLE else bound
            largest = [np.where(options.place == place, result.x, -1.0).argmax() for place in range(len(sites))]
            visits = [self._visits(options, int(each)) for each in largest]
            if self.holds(visits):
                return (visits if self.keeps(visits) else None), bound
        return None, bound
