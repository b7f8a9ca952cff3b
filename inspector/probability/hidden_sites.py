"""Hidden stock: the chance to find an undeclared site, to miss chips in the books, to see a job that is split.

A site is found at a constant rate a year that grows with the power it draws, so the chance grows with size, power and
age. Books of chips made and sold have an error; chips that are missing beyond it raise an alarm. A job that is cut into
parts below a threshold shows only to who compares several of its holders.

Law: every function on hidden chips takes one description of them, ``HiddenSites``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, ndtri

from firmware_sim.errors import CallerError
from inspector.probability._logspace import Floats, counts, reals
from inspector.probability.detection import DAYS_PER_YEAR, FLOP_PER_CHIP_DAY, SHARE_SLACK, ChipsTooFewError

__all__ = [
    "IDLE_POWER",
    "WATTS_PER_CHIP",
    "FindingRate",
    "HiddenSites",
    "accounting_alarm",
    "draw_linked",
    "linked",
    "parts_needed",
]

WATTS_PER_CHIP = 1_400.0
"""A DGX H100's 10.2 kW over 8 chips, and a tenth more for the building."""

IDLE_POWER = 0.1
"""Share of that which a chip draws that does not work (assumed)."""

_BATCH = 5_000_000
"""Nodes times trials that are drawn at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenSites:
    """Undeclared sites, all alike, and the run on some of their chips.

    Attributes:
        held: chips over all sites.
        working: chips of them that work while the run lasts; all others idle, and before the run all do.
        days: of the run.
        age: days for which the sites had existed before, their chips in them.
        sites: how many.
        watts: of a chip at work, cooling and all else included.
        idle: share of that which an idle chip draws.
        utilisation: share of its peak that a chip at work reaches (MFU).
        flop_per_day: that peak.

    Raises:
        ChipsTooFewError: more chips are to work than are held.
        CallerError: a number out of range.
    """

    held: float
    working: float
    days: float
    age: float = 0.0
    sites: int = 1
    watts: float = WATTS_PER_CHIP
    idle: float = IDLE_POWER
    utilisation: float = 1.0
    flop_per_day: float = FLOP_PER_CHIP_DAY

    def __post_init__(self) -> None:
        for name in ("held", "working"):
            reals(f"{name} chips", getattr(self, name), low=0, high=np.inf)
        for name in ("days", "age"):
            reals(name, getattr(self, name), low=0, high=np.inf)
        for name in ("watts", "flop_per_day"):
            reals(name.replace("_", " "), getattr(self, name), low=0, high=np.inf, open_low=True)
        reals("idle power", self.idle, low=0, high=1)
        reals("utilisation", self.utilisation, low=0, high=1, open_low=True)
        counts("sites", self.sites, low=1)
        if self.working > self.held * (1.0 + SHARE_SLACK):
            raise ChipsTooFewError(f"{self.working:,.6g} chips are to work, but only {self.held:,.6g} are held")

    @classmethod
    def doing(
        cls,
        flop: float,
        *,
        days: float,
        held: float | None = None,
        sites: int = 1,
        utilisation: float = 1.0,
        flop_per_day: float = FLOP_PER_CHIP_DAY,
        **more: float,
    ) -> HiddenSites:
        """Return sites that do so many FLOP: whole chips, as many at each site.

        Args:
            flop: of the run.
            held: chips over all sites; None: as many as work.
            days, sites, utilisation, flop_per_day, more: as the attributes.

        Raises:
            ChipsTooFewError: the run takes more chips than are held.
            CallerError: a number out of range.
        """
        counts("sites", sites, low=1)
        work = {"flop": flop, "days": days, "utilisation": utilisation, "flop_per_day": flop_per_day}
        needed = float(sites * parts_needed(**work, chips=sites))
        # The last chip of each site may be one too many for a stock that is just enough.
        if held is not None and held < needed and parts_needed(**work, chips=1) <= held:
            needed = held
        about = {"days": days, "sites": sites, "utilisation": utilisation, "flop_per_day": flop_per_day, **more}
        return cls(held=needed if held is None else held, working=needed, **about)  # type: ignore[arg-type]

    @property
    def megawatts_working(self) -> float:
        """Power of the chips at work."""
        return self.working * self.watts / 1e6

    @property
    def megawatts(self) -> float:
        """Power of all chips held while the run lasts."""
        return (self.working + (self.held - self.working) * self.idle) * self.watts / 1e6

    @property
    def megawatts_before(self) -> float:
        """Power of all chips held before the run, when none works."""
        return self.held * self.idle * self.watts / 1e6

    @property
    def chip_hours(self) -> float:
        """Hours of chips at work."""
        return self.working * self.days * 24.0

    @property
    def flop(self) -> float:
        """FLOP that the chips at work can do while the run lasts."""
        return self.working * self.days * self.flop_per_day * self.utilisation


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingRate:
    """How fast undeclared sites are found.

    Attributes:
        per_year: finds a year of a site of the reference power.
        reference: that power, in MW.
        exponent: the rate grows with this power of the site's; 0: size does not matter.
        least: sites below this power, in MW, are never found.
    """

    per_year: float
    reference: float = 10.0
    exponent: float = 0.5
    least: float = 0.0

    def __post_init__(self) -> None:
        reals("found per year", self.per_year, low=0, high=np.inf)
        reals("reference power", self.reference, low=0, high=np.inf, open_low=True)
        reals("exponent of power", self.exponent, low=0, high=10)
        reals("least power", self.least, low=0, high=np.inf)

    def rate(self, power: ArrayLike) -> Floats:
        """Return finds a year of a site that draws ``power`` MW."""
        drawn = reals("power", power, low=0, high=np.inf)
        seen = (drawn > 0) & (drawn >= self.least)
        return np.asarray(np.where(seen, self.per_year * (drawn / self.reference) ** self.exponent, 0.0))[()]

    def found(self, there: HiddenSites, *, concealed: float = 0.0) -> float:
        """Return the chance that at least one of the sites is found by the end of the run.

        They are looked for while the run lasts and, by the power of idle chips, while they existed before.

        Args:
            there: the sites.
            concealed: share of each site's power that is hidden.
        """
        left = (1.0 - float(reals("concealed", concealed, low=0, high=1))) / there.sites
        before, during = self.rate([there.megawatts_before * left, there.megawatts * left])
        return float(-np.expm1(-there.sites * (before * there.age + during * there.days) / DAYS_PER_YEAR))


def accounting_alarm(*, missing: ArrayLike, error: ArrayLike, false_alarm: ArrayLike) -> Floats:
    """Return how often books with a normal error raise an alarm where so many chips are missing.

    Args:
        missing: chips that were made and are with no registered holder.
        error: standard deviation of the books, in chips.
        false_alarm: chance of an alarm where none is missing, which sets the threshold.
    """
    spread = reals("error of the books", error, low=0, high=np.inf, open_low=True)
    alarm = reals("false alarm", false_alarm, low=0, high=1)
    return np.asarray(ndtr(reals("missing chips", missing, low=0, high=np.inf) / spread + ndtri(alarm)))[()]


def parts_needed(
    *,
    flop: float,
    days: float,
    chips: int,
    utilisation: float = 1.0,
    flop_per_day: float = FLOP_PER_CHIP_DAY,
) -> int:
    """Return how many nodes of ``chips`` chips do ``flop`` FLOP in ``days`` days.

    Args:
        flop, days, flop_per_day: of the job, and of a chip.
        chips: of a node, the most that need no registration.
        utilisation: of a node that works with all others.

    Raises:
        CallerError: a number out of range, or more nodes than a whole number can say.
    """
    reals("utilisation", utilisation, low=0, high=1, open_low=True)
    counts("chips of a node", chips, low=1)
    work = reals("flop", flop, low=0, high=np.inf, open_low=True)
    done = reals("days", days, low=0, high=np.inf, open_low=True) * reals(
        "flop per day", flop_per_day, low=0, high=np.inf, open_low=True
    )
    nodes = float(np.ceil(work / (done * chips * utilisation) * (1 - 1e-12)))
    if nodes > 2.0**53:
        raise CallerError(f"{nodes:g} nodes are too many")
    return max(1, int(nodes))


def linked(*, nodes: ArrayLike, hit: ArrayLike, draws: ArrayLike, recognised: ArrayLike) -> Floats:
    """Return the chance that a job in parts shows: evidence of two nodes is drawn, and recognised as of one job.

    Exact for draws with replacement, of which each takes evidence of one node with chance ``hit``: none at all with
    (1 - k·hit)^m, of one node alone with k·((1 - (k-1)·hit)^m - (1 - k·hit)^m).

    Args:
        nodes: k, holders of parts.
        hit: chance that a draw takes evidence of a given node; k·hit at most 1.
        draws: m, over the whole job.
        recognised: chance that parts laid side by side are known for one job; 0 where holders are not compared.
    """
    number, each = counts("nodes", nodes, low=1), reals("hit", hit, low=0, high=1)
    times, known = counts("draws", draws), reals("recognised", recognised, low=0, high=1)
    if (number * each > 1 + 1e-12).any():
        raise CallerError("the chance that a draw takes evidence cannot exceed 1")
    with np.errstate(divide="ignore", invalid="ignore"):
        none = np.where(times > 0, np.exp(times * np.log1p(-np.minimum(number * each, 1.0))), 1.0)
        rest = np.where(times > 0, np.exp(times * np.log1p(-np.minimum((number - 1) * each, 1.0))), 1.0)
    return np.asarray(known * np.clip(1.0 - none - number * (rest - none), 0.0, 1.0))[()]


def draw_linked(
    *, nodes: int, hit: float, draws: int, recognised: float, trials: int, rng: Generator
) -> NDArray[np.bool_]:
    """Draw what ``linked`` gives in closed form: whether the job shows, in each of so many trials."""
    shown = np.zeros(trials, np.bool_)
    size = max(1, _BATCH // nodes)
    for start in range(0, trials, size):
        hits = rng.binomial(draws, min(1.0, nodes * hit), min(size, trials - start))
        held = rng.multinomial(hits, np.full(nodes, 1.0 / nodes))
        shown[start : start + size] = (held > 0).sum(axis=1) >= 2
    return shown & (rng.random(trials) < recognised)
