"""How a lab does best against a schedule, and how often the same schedule accuses an honest lab."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from firmware_sim.errors import CallerError
from inspector.probability._logspace import Floats
from inspector.probability._schedule import Evasion, PlannedRun, Problem, Visits
from inspector.probability.alarms import fewest_tolerated, log_tolerated
from inspector.probability.detection import ChipsTooFewError, hit_probability, log_miss
from inspector.probability.sites import worst_placement

__all__ = ["CELLS", "Response", "best_response", "false_alarm", "filled", "tolerating"]

CELLS = 64
_HALF = math.log(0.5)
_ROUNDING = 1e-9
_REFINEMENTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """How the lab does best with one evasion against a schedule.

    Attributes:
        evasion: its name.
        placement: chips used at each site, in the order of the sites.
        detection: probability to be caught all the same.
        days: how long the run lasts under this evasion.
        median_day: first day of a visit by which half of such runs are caught, visits being counted from the run's
            begin; infinite if never. Beyond ``days`` where the run is over before somebody comes.
        false_alarm: probability that a lab without violation is accused over as many days by the same schedule.
    """

    evasion: str
    placement: tuple[float, ...]
    detection: float
    false_alarm: float
    days: float
    median_day: float

    @property
    def excess(self) -> float:
        """Detection less false alarm: how much more often the run is caught than an honest lab is accused."""
        return self.detection - self.false_alarm


def best_response(problem: Problem, visits: Sequence[Visits], evasion: Evasion) -> Response:
    """Return how the lab does best with ``evasion`` against a schedule.

    Raises:
        ChipsTooFewError: the evasion needs more chips than the sites that it may use hold.
        CallerError: the schedule does not name the problem's sites in order.
    """
    if [each.site for each in visits] != [site.name for site in problem.sites]:
        raise CallerError("the schedule must have one line for each site, in the same order")
    run = PlannedRun.of(problem, evasion)
    if not run.fits:
        raise ChipsTooFewError(f"evasion {evasion.name!r} needs more chips than there are at the sites that it may use")
    refusals = problem.honest_refusal_rate > 0 or any(each.refusals_allowed for each in visits)
    placed, by_site = (_with_refusals if refusals else _all_shown)(problem, visits, run)
    return Response(
        evasion=evasion.name,
        placement=tuple(map(float, placed)),
        detection=-math.expm1(float(by_site.sum())),
        false_alarm=false_alarm(problem, visits, run.days),
        days=run.days,
        median_day=_median_day(visits, run.days, by_site),
    )


def _median_day(visits: Sequence[Visits], days: float, by_site: Floats) -> float:
    """Return the first visit by which the log of the miss, ``by_site`` over the whole run, is that of a half."""
    seen = [
        (each.period, each.times(days), log / each.times(days))
        for each, log in zip(visits, by_site, strict=True)
        if log
    ]
    if sum(times * log for _, times, log in seen) > _HALF:
        return math.inf
    # Each visit adds its part; the last one of a site meets what is left of the run.
    dates = sorted(
        (period * number, log * (min(number, times) - (number - 1)))
        for period, times, log in seen
        for number in range(1, math.ceil(times - _ROUNDING) + 1)
    )
    total = 0.0
    for day, log in dates:
        total += log
        if total <= _HALF:
            return day
    return dates[-1][0]


def false_alarm(problem: Problem, visits: Sequence[Visits], days: float) -> float:
    """Return the chance that honest refusals alone, over ``days`` days, end in an accusation at some visit."""
    quiet = log_tolerated(
        rate=problem.honest_refusal_rate,
        checks=[each.samples for each in visits],
        allowed=[each.refusals_allowed for each in visits],
    )
    met = [each.times(days) for each in visits]
    return 0.0 - math.expm1(math.fsum(times * log for times, log in zip(met, quiet, strict=True) if times))


def tolerating(problem: Problem, visits: Sequence[Visits]) -> list[Visits]:
    """Return the schedule with the fewest tolerated refusals that keep an honest lab within the cap.

    Every visit of the longest run gets an equal part of the cap, so all of them together keep it too.
    """
    number = sum(each.times(problem.longest) for each in visits)

    def fewest(each: Visits) -> int:
        def alarm(allowed: int) -> float:
            quiet = log_tolerated(rate=problem.honest_refusal_rate, checks=each.samples, allowed=allowed)
            return 0.0 - math.expm1(number * float(quiet))

        # Where as many may be refused as are drawn, no one is accused, so some number always keeps the cap.
        return fewest_tolerated(alarm, most=each.samples, cap=problem.false_alarms) or 0

    return [replace(each, refusals_allowed=fewest(each)) for each in visits]


def _all_shown(problem: Problem, visits: Sequence[Visits], run: PlannedRun) -> tuple[Floats, Floats]:
    """Return the best placement and each site's log of the miss where every drawn chip is shown."""
    samples, catch = np.empty(len(visits)), np.empty(len(visits))
    for place, each in enumerate(visits):
        times, catch[place] = run.inspections(each.period)
        samples[place] = each.samples * times
    chips = np.array([site.chips for site in problem.sites])
    placed = np.zeros(len(visits))
    open_ = run.allowed
    placed[open_] = worst_placement(total=run.chips, chips=chips[open_], samples=samples[open_], catch=catch[open_])
    return placed, np.asarray(log_miss(hit=hit_probability(share=placed / chips, snapshot=catch), samples=samples))


def _with_refusals(problem: Problem, visits: Sequence[Visits], run: PlannedRun) -> tuple[Floats, Floats]:
    """Return the best placement and each site's log of the miss where some drawn chips are not shown.

    A visit passes if no chip with evidence is shown and no more are missing than it tolerates. Whether the lab
    refuses or not, -log of that chance is convex in the placement: it is the integral of a beta density, or a
    convolution of two powers, both log-concave. So the flattest pieces are filled first: on a grid over each site,
    then on finer ones around what was found.
    """
    chips = np.array([site.chips for site in problem.sites])[:, None]
    samples = np.array([each.samples for each in visits])[:, None]
    allowed = np.array([each.refusals_allowed for each in visits])[:, None]
    times = np.array([each.times(run.days) for each in visits])[:, None]
    catch = np.array([run.inspections(each.period)[1] for each in visits])[:, None]
    broken = problem.honest_refusal_rate

    def exponent(used: Floats) -> Floats:
        share = np.minimum(used / chips, 1.0)
        log = run.log_passes(share=share, catch=catch, broken=broken, samples=samples, allowed=allowed)
        return np.where(times > 0, -np.maximum(times, 1.0) * log, 0.0)

    most = np.where(run.allowed, np.minimum(chips[:, 0], run.chips), 0.0)
    low, high = np.zeros(len(visits)), most
    placed = low
    for _ in range(_REFINEMENTS):
        grid = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, CELLS + 1)
        placed = filled(grid, exponent(grid), run.chips)
        cell = (high - low) / CELLS
        low, high = np.maximum(placed - 2.0 * cell, 0.0), np.minimum(placed + 2.0 * cell, most)
    return placed, -exponent(placed[:, None])[:, 0]


def filled(grid: Floats, heights: Floats, total: float) -> Floats:
    """Return the placement of ``total`` chips, from each row's first point on, whose interpolated height is least."""
    widths = np.diff(grid, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = np.diff(heights, axis=1) / widths
    # Beyond the smallest float, and in cells without width, there is nothing to compare: those come last.
    order = np.argsort(np.where(np.isnan(slopes), np.inf, slopes).ravel(), kind="stable")
    sizes = widths.ravel()[order]
    before = np.concatenate(([0.0], np.cumsum(sizes)[:-1]))
    taken = np.empty(sizes.size)
    taken[order] = np.clip(total - grid[:, 0].sum() - before, 0.0, sizes)
    return np.asarray(grid[:, 0] + taken.reshape(widths.shape).sum(axis=1))
