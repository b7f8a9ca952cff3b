"""What a plan is made of: sites, evasions, a schedule, and the run that it must catch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike

from firmware_sim.errors import CallerError
from inspector.probability._logspace import Floats, counts, reals
from inspector.probability.alarms import FALSE_ALARMS, log_tolerated
from inspector.probability.detection import (
    DAYS_PER_YEAR,
    FLOP_PER_CHIP_DAY,
    chips_needed,
    snapshot_probability,
)

__all__ = ["AS_DECLARED", "Evasion", "PlannedRun", "Problem", "VisitedSite", "Visits", "schedule_work"]

_MOST_SITES = 200
_LARGEST_HIT = 1.0 - 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitedSite:
    """A place that one visit inspects.

    Attributes:
        name: unique.
        chips: chips there.
        visit_work: what a visit costs apart from the chips, in chips that could have been examined instead.
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
    """A lab's evasion, apart from its choice of sites.

    Attributes:
        name: unique.
        stretch: k; 1/k of the chips for k times as long, below 1 more chips for less time.
        visible: share of the used chips that the inspectors can sample (the others are undeclared or exempt).
        readout: chance that the log of a sampled used chip still incriminates (tampered logs, spoofed transcripts).
        refuses: whether drawn chips with evidence are refused, as many as are tolerated and one that is not.
        sites: names of the sites that the lab is able to use; empty means all.
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
    """The planning problem: the run to catch, the sites, and the confidence.

    Attributes:
        flop: H, of the run to be caught.
        sites: at least one.
        periods: candidate values of T_m, days between visits.
        evasions: what to hold against; at least one of them must be possible for the lab.
        days: T, how long the declared run lasts.
        rate: f, snapshots of a chip in a day.
        confidence: p, the wanted probability to catch the run.
        flop_per_day: a, what a chip does.
        honest_refusal_rate: chance that a drawn chip cannot be shown for an innocent reason.
        false_alarms: largest chance of accusing an honest lab over the longest run; below ``confidence`` where there
            are honest refusals, for else false alarms alone would reach it.
    """

    flop: float
    sites: tuple[VisitedSite, ...]
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
                f"a false-alarm rate of {self.false_alarms:g} already reaches the wanted confidence of "
                f"{self.confidence:g}, so detection would show nothing"
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
        counts(f"tolerated chips of site {self.site!r} that could not be shown", self.refusals_allowed)

    def times(self, days: float) -> float:
        """Visits that a run of so many days meets: one at least (Eq. 1, App. C.2), none where nothing is drawn."""
        return max(1.0, days / self.period) if self.samples else 0.0

    @property
    def per_year(self) -> float:
        """Visits a year."""
        return DAYS_PER_YEAR / self.period if self.samples else 0.0


def schedule_work(problem: Problem, visits: Sequence[Visits]) -> float:
    """Return chips examined a year by a schedule with one line for each site, visits counted in chips."""
    return sum(
        each.per_year * (site.visit_work + site.sample_work * each.samples)
        for site, each in zip(problem.sites, visits, strict=True)
    )


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
        window = _window(self.rate, min(self.days, period))
        return max(1.0, self.days / period), min(window * self.readout, _LARGEST_HIT)

    def log_passes(
        self, *, share: ArrayLike, catch: ArrayLike, broken: float, samples: ArrayLike, allowed: ArrayLike
    ) -> Floats:
        """Return the log of the chance that one visit passes: no evidence is shown, and no more missing than allowed.

        Args:
            share: share of the site's chips that the run uses.
            catch: chance that a drawn used chip incriminates.
            broken: chance that a drawn chip cannot be shown for an innocent reason.
            samples: chips drawn.
            allowed: chips that may be missing.
        """
        evident = (1.0 - broken) * np.asarray(catch) * np.asarray(share)
        missing = np.minimum(broken + evident if self.refuses else broken / (1.0 - evident), 1.0)
        log = log_tolerated(rate=missing, checks=samples, allowed=allowed)
        return log if self.refuses else log + np.asarray(samples) * np.log1p(-evident)


@lru_cache(maxsize=1_024)
def _window(rate: float, days: float) -> float:
    """Return the chance of a snapshot in so many days: a search asks for few of them, many times."""
    return float(snapshot_probability(rate=rate, days=days))
