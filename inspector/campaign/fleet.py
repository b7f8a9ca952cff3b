"""Who owns which chips, which runs must be found, and how the inspector looks for them (Shavit 2023, sections 2-4)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from firmware_sim.errors import CallerError
from inspector.campaign.checks import at_least, fraction, named, positive, probability, whole
from inspector.probability.hidden_sites import IDLE_POWER, WATTS_PER_CHIP

__all__ = [
    "Evidence",
    "Fleet",
    "Inspection",
    "Kind",
    "Lab",
    "LogSpan",
    "Pool",
    "Run",
    "Sampling",
    "Site",
    "Status",
    "Threshold",
]


class Status(enum.StrEnum):
    """Registration status of a pool; only registered chips can be drawn for inspection."""

    REGISTERED = "registered"
    EXEMPT = "exempt"
    UNDECLARED = "undeclared"
    LOST = "lost"


class Sampling(enum.StrEnum):
    """Over which stock one draw is made: the whole world (App. C, colluding labs), each lab, or each site."""

    POOLED = "pooled"
    PER_LAB = "per-lab"
    PER_SITE = "per-site"


class LogSpan(enum.StrEnum):
    """How far back a chip's log reaches at an inspection: the last period (Eq. 1's bound) or the whole run."""

    PERIOD = "period"
    RUN = "run"


class Evidence(enum.StrEnum):
    """Which snapshots of a run above the threshold incriminate.

    With ``AFTER_THRESHOLD`` only those taken once H FLOP were spent, hence the paper's 2H guarantee; with
    ``WHOLE_RUN`` all of them.
    """

    AFTER_THRESHOLD = "after-threshold"
    WHOLE_RUN = "whole-run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A chip model.

    Attributes:
        name: unique.
        flop_per_day: at full utilisation.
        link_gbps: GB/s of its link; None: never the bottleneck.
        watts: drawn at work, with its share of server and cooling.
    """

    name: str
    flop_per_day: float
    link_gbps: float | None = None
    watts: float = WATTS_PER_CHIP

    def __post_init__(self) -> None:
        named("kind.name", self.name)
        positive("kind.flop_per_day", self.flop_per_day)
        if self.link_gbps is not None:
            positive("kind.link_gbps", self.link_gbps)
        positive("kind.watts", self.watts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """``count`` equal chips on one site. A lost pool is one that the lab claims lost but still has.

    ``as_of`` is the month of the public stock that they are from, if they are from one.
    """

    kind: Kind
    count: int
    status: Status = Status.REGISTERED
    as_of: str = ""

    def __post_init__(self) -> None:
        whole("chips.count", self.count, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A data centre; inspectors can only search one that was declared.

    An undeclared one existed ``age_days`` before day 0, represents so many equal ``sites`` that share its chips, and
    each chip that idles there draws ``idle_power``, as a share of its power at work.
    """

    name: str
    pools: tuple[Pool, ...]
    declared: bool = True
    age_days: float = 0.0
    sites: int = 1
    idle_power: float = IDLE_POWER

    def __post_init__(self) -> None:
        named("site.name", self.name)
        at_least("site.age_days", self.age_days, 0)
        whole("site.sites", self.sites, 1)
        probability("site.idle_power", self.idle_power)
        if not self.pools:
            raise CallerError(f"site {self.name!r} has no chips")
        if not self.declared and any(pool.status is Status.REGISTERED for pool in self.pools):
            raise CallerError(f"site {self.name!r} is not declared, so it cannot hold registered chips")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """A lab: the owner of sites."""

    name: str
    sites: tuple[Site, ...]

    def __post_init__(self) -> None:
        named("lab.name", self.name)
        if not self.sites:
            raise CallerError(f"lab {self.name!r} has no site; give it at least one")
        _unique(f"site of lab {self.name!r}", [site.name for site in self.sites])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Every lab under inspection."""

    labs: tuple[Lab, ...]

    def __post_init__(self) -> None:
        if not self.labs:
            raise CallerError("a fleet needs at least one lab")
        _unique("lab", [lab.name for lab in self.labs])

    def months(self) -> tuple[str, ...]:
        """Return the months of the public stocks that it is from."""
        found = {pool.as_of for lab in self.labs for site in lab.sites for pool in site.pools}
        return tuple(sorted(found - {""}))

    def registered(self) -> int:
        """Chips that can be drawn."""
        return sum(
            pool.count
            for lab in self.labs
            for site in lab.sites
            for pool in site.pools
            if pool.status is Status.REGISTERED
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A training run that breaks the rule: ``flop`` FLOP over ``days`` days from day ``start`` on."""

    name: str
    lab: str
    flop: float
    days: float
    start: float = 0.0
    utilisation: float = 1.0

    def __post_init__(self) -> None:
        named("run.name", self.name)
        named("run.lab", self.lab)
        positive("run.flop", self.flop)
        positive("run.days", self.days)
        at_least("run.start", self.start, 0)
        positive("run.utilisation", self.utilisation)
        probability("run.utilisation", self.utilisation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """The FLOP threshold H of a run that must be caught, and which of its snapshots incriminate."""

    threshold_flop: float
    evidence: Evidence = Evidence.AFTER_THRESHOLD

    def __post_init__(self) -> None:
        positive("rule.threshold_flop", self.threshold_flop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The inspector's regime: at the end of each period, ``samples`` registered chips are drawn and inspected.

    Attributes:
        period_days: T_m.
        samples: s over all labs together, before the cap by capacity.
        snapshot_rate: f, expected snapshots per chip and day (Poisson). 0 is allowed: then no snapshot incriminates.
        replacement: whether one inspection may draw a chip twice (Eq. 1 assumes so).
        redraw: whether a chip inspected once may be drawn in a later period.
        honest_refusal_rate: probability that a drawn chip cannot be shown for an innocent reason.
        refusals_allowed: refusals per draw (urn and period) that are tolerated; one more counts as failure.
        capacity: chips that the inspectors can handle in a period (None: no limit).
        searches: whether declared sites are searched for unregistered chips in each period.
        search_chips: chips that a search looks at, drawn from all on the site; None: a search sees through hidden
            chips with the assumed rate, however many they are.
        aggregates: chance that parts of one job, found with several labs, are recognised as one; 0: labs are judged
            alone.
        loss_rate_per_year: honest losses per registered chip and year.
        loss_alarm: false-alarm probability of the test on claimed losses at the end; None: no test.
    """

    period_days: float
    samples: int
    snapshot_rate: float
    sampling: Sampling = Sampling.POOLED
    replacement: bool = False
    redraw: bool = True
    log: LogSpan = LogSpan.PERIOD
    honest_refusal_rate: float = 0.0
    refusals_allowed: int = 0
    capacity: int | None = None
    searches: bool = False
    search_chips: int | None = None
    aggregates: float = 0.0
    loss_rate_per_year: float = 0.0
    loss_alarm: float | None = None

    def __post_init__(self) -> None:
        positive("inspection.period_days", self.period_days)
        whole("inspection.samples", self.samples)
        at_least("inspection.snapshot_rate", self.snapshot_rate, 0)
        probability("inspection.honest_refusal_rate", self.honest_refusal_rate)
        whole("inspection.refusals_allowed", self.refusals_allowed)
        if self.capacity is not None:
            whole("inspection.capacity", self.capacity)
        if self.search_chips is not None:
            whole("inspection.search_chips", self.search_chips)
        probability("inspection.aggregates", self.aggregates)
        at_least("inspection.loss_rate_per_year", self.loss_rate_per_year, 0)
        if self.loss_alarm is not None:
            fraction("inspection.loss_alarm", self.loss_alarm)
        if self.replacement and not self.redraw:
            raise CallerError("inspection.redraw = false needs inspection.replacement = false")

    def samples_done(self) -> int:
        """Chips really inspected in a period: the wish, capped by the inspectors' capacity."""
        return self.samples if self.capacity is None else min(self.samples, self.capacity)


def _unique(what: str, names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise CallerError(f"two entries of {what} are named {name!r}")
