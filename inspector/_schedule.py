"""What a plan is made of: sites, evasions, a schedule, and how the Prover does best against it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from firmware_sim.errors import CallerError
from inspector._logspace import Floats, counts, reals
from inspector.alarms import FALSE_ALARMS, fewest_tolerated, log_tolerated
from inspector.detection import (
    DAYS_PER_YEAR,
    FLOP_PER_CHIP_DAY,
    ChipsTooFewError,
    chips_needed,
    snapshot_probability,
)
from inspector.sites import sites_log_miss, worst_placement

__all__ = [
    "AS_DECLARED",
    "Evasion",
    "PlannedRun",
    "Problem",
    "Response",
    "Site",
    "Visits",
    "best_response",
    "false_alarm",
    "tolerating",
]

_MOST_SITES = 200
_LARGEST_HIT = 1.0 - 2.0**-53
_CELLS = 128
_REFINEMENTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A place that one visit inspects.

    Attributes:
        name: unique.
        chips: chips there.
        visit_work: what a visit costs beside the chips, in chips that could have been examined instead.
        sample_work: what examining a chip costs there; 1 is the usual chip.
    """

    name: str
    chips: float
    visit_work: float = 10.0
    sample_work: float = 1.0

    def __post_init__(self) -> None:
        reals(f"chips of site {self.name!r}", self.chips, low=1, high=2.0**53)
        reals(f"visit work of site {self.name!r}", self.visit_work, low=0, high=np.inf)
        reals(f"sample work of site {self.name!r}", self.sample_work, low=0, high=np.inf, open_low=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evasion:
    """What the Prover does beside choosing the sites.

    Attributes:
        name: unique.
        stretch: k; 1/k of the chips for k times as long, below 1 more chips for less time.
        visible: share of the used chips that the inspectors can sample (the others are undeclared or exempt).
        readout: chance that the log of a sampled used chip still incriminates (tampered logs, spoofed transcripts).
        refuses: whether drawn chips with evidence are refused, as many as are tolerated and one that is not.
        sites: names of the sites that the Prover is able to use; empty means all.
    """

    name: str
    stretch: float = 1.0
    visible: float = 1.0
    readout: float = 1.0
    refuses: bool = False
    sites: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        reals(f"stretch of evasion {self.name!r}", self.stretch, low=0, high=np.inf, open_low=True)
        for name, value in (("visible", self.visible), ("readout", self.readout)):
            reals(f"{name} of evasion {self.name!r}", value, low=0, high=1)


AS_DECLARED = Evasion(name="as declared")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is to be caught, where, and with what confidence.

    Attributes:
        flop: H.
        sites: at least one.
        periods: candidate values of T_m in days.
        evasions: what to hold against; at least one of them must be possible for the Prover.
        days: T of the run as declared.
        rate: f.
        confidence: p.
        flop_per_day: a.
        honest_refusal_rate: chance that a drawn chip cannot be shown for an innocent reason.
        false_alarms: largest chance of accusing an honest lab over the longest run; below ``confidence`` where there
            are honest refusals, for else false alarms alone would reach it.
    """

    flop: float
    sites: tuple[Site, ...]
    periods: tuple[float, ...] = (7.0, 14.0, 30.0, 60.0, 90.0, 180.0, 365.0)
    evasions: tuple[Evasion, ...] = (AS_DECLARED,)
    days: float = DAYS_PER_YEAR
    rate: float = 0.1
    confidence: float = 0.9
    flop_per_day: float = FLOP_PER_CHIP_DAY
    honest_refusal_rate: float = 0.0
    false_alarms: float = FALSE_ALARMS

    def __post_init__(self) -> None:
        for what, names in (("site", [s.name for s in self.sites]), ("evasion", [e.name for e in self.evasions])):
            if not names:
                raise CallerError(f"a plan needs at least one {what}")
            if len(set(names)) < len(names):
                raise CallerError(f"{what} names must be unique")
        if len(self.sites) > _MOST_SITES:
            raise CallerError(f"{len(self.sites)} sites are more than {_MOST_SITES}: merge the small ones")
        reals("periods", self.periods, low=0, high=np.inf, open_low=True)
        reals("days", self.days, low=0, high=np.inf, open_low=True)
        reals("rate", self.rate, low=0, high=np.inf, open_low=True)
        if not 0 < float(reals("confidence", self.confidence, low=0, high=1)) < 1:
            raise CallerError("confidence must be above 0 and below 1")
        reals("honest refusal rate", self.honest_refusal_rate, low=0, high=1)
        reals("false alarms", self.false_alarms, low=0, high=1)
        if self.honest_refusal_rate > 0 and self.false_alarms >= self.confidence:
            raise CallerError(
                f"false alarms of {self.false_alarms:g} would reach a confidence of {self.confidence:g} by themselves"
            )
        known = {site.name for site in self.sites}
        for evasion in self.evasions:
            if not known.issuperset(evasion.sites):
                raise CallerError(f"evasion {evasion.name!r} names a site that is not in the plan")
        chips_needed(flop=self.flop, days=self.days, flop_per_day=self.flop_per_day)

    @property
    def exponent(self) -> float:
        """The wanted -log(1 - p)."""
        return -math.log1p(-self.confidence)

    @property
    def evident_exponent(self) -> float:
        """-log of the largest chance that no chip with evidence is shown: what false alarms within the cap leave."""
        spared = self.false_alarms if self.honest_refusal_rate > 0 else 0.0
        return -math.log1p(spared - self.confidence)

    @property
    def longest(self) -> float:
        """Days of the longest run of the list, over which an honest lab is looked at as often as any other."""
        return self.days * max(evasion.stretch for evasion in self.evasions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """One line of a schedule: every ``period`` days ``samples`` chips of ``site``; no visits where samples is 0.

    More than ``refusals_allowed`` chips of one visit that are not shown count as a violation.
    """

    site: str
    period: float
    samples: int
    refusals_allowed: int = 0

    def __post_init__(self) -> None:
        reals(f"period of site {self.site!r}", self.period, low=0, high=np.inf, open_low=True)
        counts(f"samples of site {self.site!r}", self.samples)
        counts(f"tolerated refusals of site {self.site!r}", self.refusals_allowed)

    def times(self, days: float) -> float:
        """Visits that a run of so many days meets: one at least (Eq. 1, App. C.2), none where nothing is drawn."""
        return max(1.0, days / self.period) if self.samples else 0.0

    @property
    def per_year(self) -> float:
        """Visits a year."""
        return DAYS_PER_YEAR / self.period if self.samples else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """How the Prover does best with one evasion against a schedule.

    Attributes:
        evasion: its name.
        placement: chips used at each site, in the order of the sites.
        detection: probability to be caught all the same.
        false_alarm: probability that a lab without violation is accused over as many days by the same schedule.
    """

    evasion: str
    placement: tuple[float, ...]
    detection: float
    false_alarm: float

    @property
    def excess(self) -> float:
        """Detection less false alarm: how much more often the run is caught than an honest lab is accused."""
        return self.detection - self.false_alarm


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run under one evasion: visible chips, days, readout, whether it refuses, and which sites it may use."""

    chips: float
    days: float
    rate: float
    readout: float
    refuses: bool
    allowed: np.ndarray[tuple[int], np.dtype[np.bool_]]
    fits: bool

    @classmethod
    def of(cls, problem: Problem, evasion: Evasion) -> PlannedRun:
        total = float(chips_needed(flop=problem.flop, days=problem.days, flop_per_day=problem.flop_per_day))
        visible = total / evasion.stretch * evasion.visible
        allowed = np.array([not evasion.sites or site.name in evasion.sites for site in problem.sites])
        room = sum(site.chips for site, open_ in zip(problem.sites, allowed, strict=True) if open_)
        return cls(
            chips=min(visible, room),
            days=problem.days * evasion.stretch,
            rate=problem.rate,
            readout=evasion.readout,
            refuses=evasion.refuses,
            allowed=allowed,
            fits=visible <= room * (1.0 + 1e-12),
        )

    def inspections(self, period: float) -> tuple[float, float]:
        """Return how many inspections the run meets, and the chance that a drawn used chip incriminates in one."""
        window = snapshot_probability(rate=self.rate, days=min(self.days, period))
        return max(1.0, self.days / period), min(float(window) * self.readout, _LARGEST_HIT)


def best_response(problem: Problem, visits: Sequence[Visits], evasion: Evasion) -> Response:
    """Return how the Prover does best with ``evasion`` against a schedule.

    Raises:
        ChipsTooFewError: the evasion needs more chips than the sites that it may use hold.
        CallerError: the schedule does not name the problem's sites in order.
    """
    if [each.site for each in visits] != [site.name for site in problem.sites]:
        raise CallerError("the schedule must have one line for each site, in the same order")
    run = PlannedRun.of(problem, evasion)
    if not run.fits:
        raise ChipsTooFewError(f"evasion {evasion.name!r} needs more chips than the sites hold that it may use")
    refusals = problem.honest_refusal_rate > 0 or any(each.refusals_allowed for each in visits)
    placed, log_miss = (_with_refusals if refusals else _all_shown)(problem, visits, run)
    return Response(
        evasion=evasion.name,
        placement=tuple(map(float, placed)),
        detection=-math.expm1(log_miss),
        false_alarm=false_alarm(problem, visits, run.days),
    )


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

        # Where as many may be refused as are drawn, nobody is accused, so some number always keeps the cap.
        return fewest_tolerated(alarm, most=each.samples, cap=problem.false_alarms) or 0

    return [replace(each, refusals_allowed=fewest(each)) for each in visits]


def _all_shown(problem: Problem, visits: Sequence[Visits], run: PlannedRun) -> tuple[Floats, float]:
    """Return the best placement and its log of the miss where every drawn chip is shown."""
    samples, catch = np.empty(len(visits)), np.empty(len(visits))
    for place, each in enumerate(visits):
        times, catch[place] = run.inspections(each.period)
        samples[place] = each.samples * times
    chips = np.array([site.chips for site in problem.sites])
    placed = np.zeros(len(visits))
    open_ = run.allowed
    placed[open_] = worst_placement(total=run.chips, chips=chips[open_], samples=samples[open_], catch=catch[open_])
    return placed, float(sites_log_miss(used=placed, chips=chips, samples=samples, catch=catch))


def _with_refusals(problem: Problem, visits: Sequence[Visits], run: PlannedRun) -> tuple[Floats, float]:
    """Return the best placement and its log of the miss where some drawn chips are not shown.

    A visit passes if no chip with evidence is shown and no more are missing than it tolerates. Whether the Prover
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
        evident = (1.0 - broken) * catch * np.minimum(used / chips, 1.0)
        missing = np.minimum(broken + evident, 1.0) if run.refuses else np.minimum(broken / (1.0 - evident), 1.0)
        log = log_tolerated(rate=missing, checks=samples, allowed=allowed)
        if not run.refuses:
            log = log + samples * np.log1p(-evident)
        return np.where(times > 0, -np.maximum(times, 1.0) * log, 0.0)

    most = np.where(run.allowed, np.minimum(chips[:, 0], run.chips), 0.0)
    low, high = np.zeros(len(visits)), most
    placed = low
    for _ in range(_REFINEMENTS):
        grid = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, _CELLS + 1)
        placed = _filled(grid, exponent(grid), run.chips)
        cell = (high - low) / _CELLS
        low, high = np.maximum(placed - 2.0 * cell, 0.0), np.minimum(placed + 2.0 * cell, most)
    return placed, -float(exponent(placed[:, None]).sum())


def _filled(grid: Floats, heights: Floats, total: float) -> Floats:
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
