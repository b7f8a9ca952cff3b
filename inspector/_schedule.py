"""What a plan is made of: sites, evasions, a schedule, and how the Prover does best against it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from firmware_sim.errors import CallerError
from inspector._logspace import counts, reals
from inspector.detection import (
    DAYS_PER_YEAR,
    FLOP_PER_CHIP_DAY,
    ChipsTooFewError,
    chips_needed,
    snapshot_probability,
)
from inspector.sites import sites_log_miss, worst_placement

__all__ = ["AS_DECLARED", "Evasion", "PlannedRun", "Problem", "Response", "Site", "Visits", "best_response"]

_MOST_SITES = 200
_LARGEST_HIT = 1.0 - 2.0**-53


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
        sites: names of the sites that the Prover is able to use; empty means all.
    """

    name: str
    stretch: float = 1.0
    visible: float = 1.0
    readout: float = 1.0
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
    """

    flop: float
    sites: tuple[Site, ...]
    periods: tuple[float, ...] = (7.0, 14.0, 30.0, 60.0, 90.0, 180.0, 365.0)
    evasions: tuple[Evasion, ...] = (AS_DECLARED,)
    days: float = DAYS_PER_YEAR
    rate: float = 0.1
    confidence: float = 0.9
    flop_per_day: float = FLOP_PER_CHIP_DAY

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
        known = {site.name for site in self.sites}
        for evasion in self.evasions:
            if not known.issuperset(evasion.sites):
                raise CallerError(f"evasion {evasion.name!r} names a site that is not in the plan")
        chips_needed(flop=self.flop, days=self.days, flop_per_day=self.flop_per_day)

    @property
    def exponent(self) -> float:
        """The wanted -log(1 - p)."""
        return -math.log1p(-self.confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visits:
    """One line of a schedule: every ``period`` days ``samples`` chips of ``site``; no visits where samples is 0."""

    site: str
    period: float
    samples: int

    def __post_init__(self) -> None:
        reals(f"period of site {self.site!r}", self.period, low=0, high=np.inf, open_low=True)
        counts(f"samples of site {self.site!r}", self.samples)

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
    """

    evasion: str
    placement: tuple[float, ...]
    detection: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run under one evasion: visible chips, days, readout, and which sites it may use."""

    chips: float
    days: float
    rate: float
    readout: float
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
    samples, catch = np.empty(len(visits)), np.empty(len(visits))
    for place, each in enumerate(visits):
        times, catch[place] = run.inspections(each.period)
        samples[place] = each.samples * times
    chips = np.array([site.chips for site in problem.sites])
    placed = np.zeros(len(visits))
    open_ = run.allowed
    placed[open_] = worst_placement(total=run.chips, chips=chips[open_], samples=samples[open_], catch=catch[open_])
    miss = sites_log_miss(used=placed, chips=chips, samples=samples, catch=catch)
    return Response(evasion=evasion.name, placement=tuple(map(float, placed)), detection=float(-np.expm1(miss)))
