"""The cheapest inspection schedule over sites and periods, minimax against evasions (Shavit 2023, App. B and C).

The lab knows the schedule, picks the worst evasion of the list and places its run over the sites as it likes. For
one site the search over periods, refusals tolerated and samples is exact (``_search``). For one placement the exponent
-log(miss) of several sites is linear in the samples, so without honest refusals the good schedules are an intersection
of half spaces: a linear programme chooses samples and periods, an oracle returns the placements that evade it best,
these become constraints, and so on. With honest refusals an integer programme does the same (``_allowances``). Either
optimum is a lower bound on the cost of every schedule over the same periods; a whole schedule, which the oracle
accepts, is the plan. ``VisitSchedule.dearer`` shows how far apart the two are.

Law: without honest refusals snapshots wait in the log, so a longer period is never dearer. What limits the period then
is how late a run may be noticed, and a site with too few chips for a longer one. With honest refusals visits more
often may be cheaper.

Law: no confidence through false alarms. Honest labs refuse some chips too; a schedule tolerates enough refusals a visit
to keep an honest lab within the cap, the lab uses up what is tolerated, and what it takes to catch it then is the
plan. Sites that are held to one allowance together (``pooled_plan``) tolerate fewer in all than sites with one each.

A run of t days meets t/T_m inspections for t >= T_m (Eq. 1) and one, with a window of t, for t < T_m (App. C.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from firmware_sim.errors import CallerError, DeviceError
from inspector.probability._allowances import allowances
from inspector.probability._logspace import Floats, reals
from inspector.probability._responses import Response, best_response, false_alarm, tolerating
from inspector.probability._schedule import (
    AS_DECLARED,
    Evasion,
    PlannedRun,
    Problem,
    VisitedSite,
    Visits,
    schedule_work,
)
from inspector.probability._search import cheapest_visits, pooled
from inspector.probability.detection import CHIPS_PER_INSPECTOR, DAYS_PER_YEAR, ChipsTooFewError, OutOfReachError

__all__ = [
    "AS_DECLARED",
    "Evasion",
    "Problem",
    "Response",
    "Sensitivity",
    "VisitSchedule",
    "VisitedSite",
    "Visits",
    "best_response",
    "cheapest_plan",
    "false_alarm",
    "holding_inputs",
    "pooled",
    "pooled_plan",
    "sensitivity",
    "tolerating",
]

_ROUNDS = 200
_MOST_TRIMS = 3
_INFEASIBLE = 2
_FEW_CHIPS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitSchedule:
    """A schedule that holds against every evasion of the problem.

    Attributes:
        visits: one line for each site.
        work: chips examined a year, visits counted in chips.
        lower_bound: no schedule over the candidate periods needs less work.
        responses: the lab's best against it, most dangerous first.
        impossible: evasions that need more chips than there are.
    """

    visits: tuple[Visits, ...]
    work: float
    lower_bound: float
    responses: tuple[Response, ...]
    impossible: tuple[str, ...]

    @property
    def detection(self) -> float:
        """The guaranteed detection probability."""
        return self.responses[0].detection

    @property
    def false_alarm(self) -> float:
        """The largest probability that an honest lab is accused while one of the runs lasts."""
        return max(each.false_alarm for each in self.responses)

    @property
    def excess(self) -> float:
        """Guaranteed detection less largest false alarm; no evasion has a smaller excess."""
        return self.detection - self.false_alarm

    @property
    def dearer(self) -> float:
        """The share by which the plan is dearer than the cheapest schedule over the same periods, at most."""
        return self.work / self.lower_bound - 1.0 if self.lower_bound > 0 else math.inf

    @property
    def days_between(self) -> float:
        """Days of the longest period: a run is looked at so many days after it begins, at the latest."""
        return max((each.period for each in self.visits if each.samples), default=math.inf)

    @property
    def samples_per_year(self) -> int:
        """Whole chips examined a year."""
        return math.ceil(sum(each.per_year * each.samples for each in self.visits))

    @property
    def visits_per_year(self) -> float:
        """Visits a year."""
        return sum(each.per_year for each in self.visits)

    @property
    def inspectors(self) -> int:
        """Whole inspectors, at 1,000 chips' work each a year."""
        return math.ceil(self.work / CHIPS_PER_INSPECTOR)


def cheapest_plan(problem: Problem, *, gap: float = 0.005) -> VisitSchedule:
    """Return the cheapest schedule whose detection probability is at least ``confidence`` under every evasion.

    Only schedules that accuse an honest lab with ``problem.false_alarms`` at most are candidates.

    Args:
        problem: what to plan for.
        gap: stop when the plan's work is within this share of the lower bound. The search also ends when it repeats
            itself (whole samples may leave a wider gap on a tiny problem); ``VisitSchedule.lower_bound`` tells.

    Raises:
        ChipsTooFewError: no evasion is possible: the run does not fit the sites at all.
        OutOfReachError: even examining every chip at the shortest period does not reach the confidence within the cap
            on false alarms.
        DeviceError: the solver failed.
    """
    possible: list[Evasion] = []
    impossible: list[Evasion] = []
    for evasion in problem.evasions:
        (possible if PlannedRun.of(problem, evasion).fits else impossible).append(evasion)
    if not possible:
        raise ChipsTooFewError("the sites hold fewer chips than the run needs, under every evasion of the list")
    problem = replace(problem, evasions=tuple(possible))
    best, bound = _cheapest(problem, gap)
    ranked = sorted((best_response(problem, best, each) for each in possible), key=lambda each: each.detection)
    return VisitSchedule(
        visits=tuple(best),
        work=schedule_work(problem, best),
        lower_bound=min(bound, schedule_work(problem, best)),
        responses=tuple(ranked),
        impossible=tuple(each.name for each in impossible),
    )


def pooled_plan(problem: Problem) -> VisitSchedule:
    """Return the cheapest schedule with one allowance over all sites, as of one site; it fits sites of one party.

    The draw of a visit is uniform over the chips of all sites, so each site's part is in proportion to its chips.

    Raises:
        ChipsTooFewError, OutOfReachError: as ``cheapest_plan``.
    """
    impossible = tuple(each.name for each in problem.evasions if not PlannedRun.of(problem, each).fits)
    if len(impossible) == len(problem.evasions):
        raise ChipsTooFewError("the sites hold fewer chips than the run needs, under every evasion of the list")
    return replace(cheapest_plan(pooled(problem)), impossible=impossible)


def _cheapest(problem: Problem, gap: float) -> tuple[Sequence[Visits], float]:
    """Return the cheapest schedule found, and a lower bound on the work of all."""
    if len(problem.sites) == 1:
        only = cheapest_visits(problem)
        if only is None:
            raise OutOfReachError(_out_of_reach(problem))
        return [only], schedule_work(problem, [only])
    if problem.honest_refusal_rate > 0:
        try:
            shape = _cheapest(replace(problem, honest_refusal_rate=0.0), gap)[0]
        except OutOfReachError:
            shape = None
        found, bound = allowances(problem, shape)
        if found is None:
            raise OutOfReachError(_out_of_reach(problem))
        return found, bound
    best = _proportional_plan(problem)
    programme = _Programme(problem)
    bound = 0.0
    tried: set[tuple[Visits, ...]] = set()
    for _ in range(_ROUNDS):
        responses = [best_response(problem, best, each) for each in problem.evasions]
        programme.cut(responses)
        visits, bound = programme.solve(bound, schedule_work(problem, best))
        if visits is None:
            break
        trial = [best_response(problem, visits, each) for each in problem.evasions]
        programme.cut(trial)
        repaired = _scaled(problem, visits)
        if repaired is not None:
            best = min(best, _trimmed(problem, repaired), key=lambda each: schedule_work(problem, each))
        if schedule_work(problem, best) <= bound * (1.0 + gap) or tuple(visits) in tried:
            break
        tried.add(tuple(visits))
    return best, bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """How much an answer depends on one parameter.

    Attributes:
        parameter: its name.
        lower: answer with the parameter divided by the factor, relative to the answer as it is; NaN if impossible.
        higher: with the parameter times the factor; NaN if impossible.
        elasticity: log(change of the answer)/log(change of the parameter); -1 means that double halves it.
    """

    parameter: str
    lower: float
    higher: float
    elasticity: float


def sensitivity(
    answer: Callable[[Mapping[str, float]], float], parameters: Mapping[str, float], *, factor: float = 2.0
) -> list[Sensitivity]:
    """Return the parameters by how strongly a positive ``answer`` depends on them, strongest first.

    Each is divided and multiplied by ``factor`` in turn; a change that the answer refuses with ``CallerError`` counts
    as impossible and the other side alone gives the elasticity (NaN, ranked first, if both are impossible).
    """
    reals("factor", factor, low=1, high=np.inf, open_low=True)
    base = answer(parameters)

    def ratio(name: str, value: float) -> float:
        try:
            return answer({**parameters, name: value}) / base
        except CallerError:
            return math.nan

    rows = []
    for name, value in parameters.items():
        lower, higher = ratio(name, value / factor), ratio(name, value * factor)
        steps = [math.log(each) * sign for each, sign in ((lower, -1), (higher, 1)) if not math.isnan(each)]
        elasticity = sum(steps) / len(steps) / math.log(factor) if steps else math.nan
        rows.append(Sensitivity(parameter=name, lower=lower, higher=higher, elasticity=elasticity))
    return sorted(rows, key=lambda each: -math.inf if math.isnan(each.elasticity) else -abs(each.elasticity))


class _Programme:
    """The linear programme over samples and visits, with one constraint for each placement found so far."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._choices = [(site, period) for site in problem.sites for period in problem.periods]
        self._rows: list[Floats] = []
        runs = [PlannedRun.of(problem, each) for each in problem.evasions]
        # A site that alone can hold a whole run must be visited, or that run goes there.
        self._needed = [
            any(run.allowed[place] and run.chips <= site.chips for run in runs)
            for place, site in enumerate(problem.sites)
        ]

    def cut(self, responses: Sequence[Response]) -> None:
        """Demand the wanted exponent against the placements that evade, or nearly; the others would bind nothing."""
        evasions = {each.name: each for each in self._problem.evasions}
        nearly = max(-math.expm1(-1.5 * self._problem.exponent), min(each.detection for each in responses))
        for response in responses:
            if response.detection > nearly:
                continue
            run = PlannedRun.of(self._problem, evasions[response.evasion])
            used = np.repeat(response.placement, len(self._problem.periods))
            row = np.empty(len(self._choices))
            for place, (site, period) in enumerate(self._choices):
                times, catch = run.inspections(period)
                row[place] = -times * math.log1p(-min(1.0, used[place] / site.chips) * catch)
            self._rows.append(row)

    def solve(self, bound: float, work: float) -> tuple[list[Visits] | None, float]:
        """Return the cheapest schedule under the constraints so far, and the lower bound that it proves.

        ``work`` is that of a schedule known to hold: a better one spends no more on any site, which bounds the samples
        there and keeps the link between samples and visits well scaled. None, and ``work``, where there is no better.
        """
        from scipy.optimize import linprog

        sites, periods = len(self._problem.sites), len(self._problem.periods)
        number = len(self._choices)
        yearly = np.array([DAYS_PER_YEAR / period for _, period in self._choices])
        each_sample = yearly * [site.sample_work for site, _ in self._choices]
        each_visit = yearly * [site.visit_work for site, _ in self._choices]
        most = np.minimum([float(math.floor(site.chips)) for site, _ in self._choices], 1.0 + work / each_sample)
        visits = np.zeros((sites, 2 * number))
        for place in range(sites):
            visits[place, number + place * periods : number + (place + 1) * periods] = 1
        caught = np.hstack([np.array(self._rows) * most / self._problem.exponent, np.zeros((len(self._rows), number))])
        result = linprog(
            np.concatenate([each_sample * most, each_visit]) / work,
            A_ub=np.vstack([np.hstack([np.eye(number), -np.eye(number)]), visits, -caught, -visits[self._needed]]),
            b_ub=np.concatenate([np.zeros(number), np.ones(sites), -np.ones(len(caught) + sum(self._needed))]),
            bounds=(0, 1),
        )
        if result.get("status") == _INFEASIBLE:
            return None, work
        if result.x is None:
            raise DeviceError(f"the solver found no schedule: {result.message}")
        samples = np.ceil(result.x[:number] * most - 1e-9).astype(int).reshape(sites, periods)
        chosen = samples.argmax(axis=1)
        schedule = [
            Visits(site=site.name, period=self._problem.periods[chosen[place]], samples=int(samples[place].max()))
            for place, site in enumerate(self._problem.sites)
        ]
        return schedule, max(bound, float(result.fun) * work)


def _holds(problem: Problem, visits: Sequence[Visits]) -> bool:
    return all(best_response(problem, visits, each).detection >= problem.confidence for each in problem.evasions)


def _scaled(problem: Problem, visits: Sequence[Visits]) -> list[Visits] | None:
    """Return the smallest multiple of a schedule that holds, at most every chip; None if no multiple does."""
    low, high = 0.0, 1.0
    most = max(site.chips / max(each.samples, 1) for site, each in zip(problem.sites, visits, strict=True))
    while not _holds(problem, _times(problem, visits, high)):
        if high >= most:
            return None
        low, high = high, high * 2.0
    while high - low > 1e-4 * high:
        middle = (low + high) / 2.0
        low, high = (low, middle) if _holds(problem, _times(problem, visits, middle)) else (middle, high)
    return _times(problem, visits, high)


def _times(problem: Problem, visits: Sequence[Visits], factor: float) -> list[Visits]:
    """Return a multiple of a schedule, rounded up, at most every chip."""
    return [
        replace(each, samples=min(math.floor(site.chips), math.ceil(factor * each.samples - 1e-9)))
        for site, each in zip(problem.sites, visits, strict=True)
    ]


def _trimmed(problem: Problem, visits: list[Visits]) -> list[Visits]:
    """Return the schedule with whole samples taken off, dearest first, as long as it holds (rounding up adds some)."""
    order = sorted(range(len(visits)), key=lambda place: -visits[place].per_year * problem.sites[place].sample_work)
    for place in order:
        for _ in range(_MOST_TRIMS):
            if visits[place].samples == 0:
                break
            fewer = visits.copy()
            fewer[place] = replace(visits[place], samples=visits[place].samples - 1)
            if not _holds(problem, fewer):
                break
            visits = fewer
    return visits


def _proportional_plan(problem: Problem) -> list[Visits]:
    """Return the cheapest schedule with one period for all sites and samples in proportion to their chips."""
    total = sum(site.chips for site in problem.sites)
    best: list[Visits] | None = None
    for period in sorted(problem.periods, reverse=True):
        even = [
            Visits(site=site.name, period=period, samples=max(1, round(1e6 * site.chips / total)))
            for site in problem.sites
        ]
        shrunk = [
            replace(each, samples=min(each.samples, math.floor(site.chips)))
            for site, each in zip(problem.sites, even, strict=True)
        ]
        if best is not None:  # A shorter period has to make do with what is left of the work for samples.
            left = schedule_work(problem, best) * period / DAYS_PER_YEAR - sum(
                each.visit_work for each in problem.sites
            )
            most = left / sum(site.sample_work * each.samples for site, each in zip(problem.sites, shrunk, strict=True))
            if most <= 0 or not _holds(problem, _times(problem, shrunk, most)):
                continue
        plan = _scaled(problem, shrunk)
        if plan is not None:
            best = plan if best is None else min(best, plan, key=lambda plan: schedule_work(problem, plan))
    if best is None:
        raise OutOfReachError(_out_of_reach(problem))
    return best


def _out_of_reach(problem: Problem) -> str:
    census = [
        Visits(site=site.name, period=min(problem.periods), samples=math.floor(site.chips)) for site in problem.sites
    ]
    responses = [best_response(problem, tolerating(problem, census), each) for each in problem.evasions]
    best = min(responses, key=lambda each: each.detection).evasion
    rate = problem.honest_refusal_rate
    honest = (
        f" with false alarms of {problem.false_alarms:g} at most where {rate:g} of honest labs' chips cannot be shown"
        if rate
        else ""
    )
    # Without honest refusals a census at the shortest period is the most that can be done; with them it need not be.
    found = "found that " if rate else ""
    return (
        f"no schedule {found}reaches {problem.confidence:g}{honest}: examining every chip every "
        f"{min(problem.periods):g} days does not catch the best evasion, {best!r}"
    )


def holding_inputs(problem: Problem) -> dict[str, float]:
    """Return which inputs alone, and at what value nearest to their own, would make a schedule hold; empty if none.

    One allowance over all sites counts as a schedule. Values are exact to 0.1 %; on more than 100,000 chips only a look
    at every chip counts, which with so many draws is as good as any.
    """
    limits = {
        "flop": problem.flop * _largest_run(problem),
        "confidence": 1e-3,
        "rate": problem.rate * 1e6,
        "honest_refusal_rate": 0.0,
        "false_alarms": problem.confidence * (1.0 - 1e-9),
    }
    if not problem.honest_refusal_rate:
        del limits["honest_refusal_rate"], limits["false_alarms"]

    def holds(name: str, value: float) -> bool:
        try:
            changed = replace(problem, **{name: value})  # type: ignore[arg-type]
            return _census_holds(changed) or (few and bool(pooled_plan(changed)))
        except CallerError:
            return False

    few = sum(site.chips for site in problem.sites) <= _FEW_CHIPS
    found = {}
    for name, good in limits.items():
        bad = getattr(problem, name)
        if not holds(name, good):
            continue
        while abs(good - bad) > 1e-3 * abs(good) and abs(good - bad) > 1e-9:
            middle = math.sqrt(good * bad) if good * bad > 0 else (good + bad) / 2.0
            good, bad = (middle, bad) if holds(name, middle) else (good, middle)
        found[name] = float(good)
    return found


def _census_holds(problem: Problem) -> bool:
    """Return whether a look at every chip holds, at one of the periods and under one allowance over all sites."""
    whole = pooled(problem)
    (site,) = whole.sites
    visits = [Visits(site=site.name, period=each, samples=math.floor(site.chips)) for each in problem.periods]
    return any(_holds(whole, tolerating(whole, [each])) for each in visits)


def _largest_run(problem: Problem) -> float:
    """Return how many times as large a run the sites can still hold under every evasion that is possible now."""
    runs = [PlannedRun.of(problem, each) for each in problem.evasions]
    rooms = [
        sum(site.chips for site, open_ in zip(problem.sites, run.allowed, strict=True) if open_) / run.chips
        for run in runs
        if run.fits and run.chips > 0
    ]
    return min(rooms, default=1.0)
