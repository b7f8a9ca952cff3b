"""What ``plan`` answers: a schedule, what it costs, how a lab would best evade it, and what it depends on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from analysis.commands._answers import fields_of
from inspector.probability.detection import detection, log_miss_without_replacement
from inspector.probability.planning import Problem, Response, Sensitivity, Visits, VisitSchedule

__all__ = [
    "CostParts",
    "Deterrence",
    "LabBurden",
    "NoPlan",
    "OtherSchedule",
    "PlanAnswer",
    "Replaying",
    "RunSize",
    "Schedule",
    "SegmentReplay",
    "SiteResponse",
    "SiteVisits",
    "Spread",
    "Tried",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteVisits(Visits):
    """The visits of one site.

    Attributes:
        period: in days.
        samples: chips drawn at a visit.
        refusals_allowed: drawn chips that may remain unshown at a visit.
    """

    visits_per_year: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule that reaches the confidence against every listed evasion.

    Attributes:
        work: chips a year; a visit counts as --visit-work chips.
        lower_bound: no schedule over these periods needs less work.
        detection: probability that the schedule guarantees.
        false_alarm: chance that it accuses an honest lab in as many days as the slowest evasion takes.
    """

    visits: Sequence[SiteVisits]
    work: float
    samples_per_year: int
    lower_bound: float
    detection: float
    false_alarm: float

    @classmethod
    def of(cls, plan: VisitSchedule) -> Schedule:
        """From a schedule as it was found."""
        return Schedule(
            visits=[SiteVisits(**fields_of(each), visits_per_year=each.per_year) for each in plan.visits],
            work=plan.work,
            samples_per_year=plan.samples_per_year,
            lower_bound=plan.lower_bound,
            detection=plan.detection,
            false_alarm=plan.false_alarm,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSchedule(Schedule):
    """The dearer of two schedules.

    Attributes:
        allowances: 1 if tolerated refusals are counted over all sites, else one for each site.
    """

    allowances: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """The run to be caught."""

    chips: float
    chip_hours: float
    megawatts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A number with its 5 % and its 95 % quantile."""

    low: float
    median: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostParts:
    """Money a year."""

    staff: float
    travel: float
    replay: float
    confidentiality: float
    chips_time: float
    total: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LabBurden:
    """What monitoring asks of the lab.

    Attributes:
        slowdown: length of a monitored step, relative to plain training.
        replayed_chip_hours: a year.
        log_bytes: of a chip in a year.
        transcript_bytes: of a year of training.
    """

    slowdown: Spread
    replayed_chip_hours: Spread
    log_bytes: Spread
    transcript_bytes: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Replaying:
    """``replayed`` of a run's ``segments`` are repeated for each drawn chip; a liar makes a share of them false."""

    segments: int
    replayed: int
    false_share: float

    @property
    def caught(self) -> float:
        """Chance that a false segment is among those replayed (hypergeometric)."""
        false = max(1, math.ceil(self.false_share * self.segments * (1 - 1e-12)))
        return float(detection(log_miss_without_replacement(chips=self.segments, used=false, samples=self.replayed)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A number of replayed segments that was tried.

    Attributes:
        total: cost a year; None where no schedule is enough.
    """

    replayed: int
    total: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentReplay:
    """The replays with --segments.

    Attributes:
        replayed: segments replayed for each drawn chip.
        false_share: share of the segments that a lie falsifies.
        caught: chance that at least one replayed segment is a false one.
        false_alarm: always 0.
    """

    segments: int
    replayed: int
    false_share: float
    caught: float
    false_alarm: float = 0.0
    flop_per_year: float
    tried: Sequence[Tried]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteResponse:
    """How a lab does best with one evasion.

    Attributes:
        detection, false_alarm, excess: over run_days.
        run_days: how long the evading run lasts.
        median_day: day of the visit by which half of the runs are caught; None if that never comes.
        placement: chips used at each site.
    """

    evasion: str
    detection: float
    false_alarm: float
    excess: float
    run_days: float
    median_day: float
    placement: Mapping[str, float]

    @classmethod
    def of(cls, found: Response, sites: Sequence[str]) -> SiteResponse:
        """From a response as it was found, for sites of these names."""
        return cls(
            evasion=found.evasion,
            detection=found.detection,
            false_alarm=found.false_alarm,
            excess=found.excess,
            run_days=found.days,
            median_day=found.median_day,
            placement=dict(zip(sites, found.placement, strict=True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deterrence:
    """Whether a violation pays under the plan, and from where on it does not.

    Attributes:
        aversion: the lab's to risk.
        utility: above 0 a violation pays; None if it is out of range.
        deterring_penalty: None if none is enough.
    """

    gain: float
    penalty: float
    aversion: float
    utility: float
    deterring_detection: float
    deterring_penalty: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer(Schedule):
    """The cheapest schedule, for the medians of uncertain inputs.

    Attributes:
        reason: None, since there is a schedule.
        other: the dearer of two plans, of which one counts tolerated refusals for each site and one over all sites;
            None if only one of them works.
        dearer_at_most: how much the work can exceed the least possible, as a share; None if unknown.
        noticed_within_days: most days from the start of a run until it is found, --second-look included.
        inspectors: a whole number.
        inspector_load: chips that an inspector inspects in a year, median.
        money: currency and year of the prices, or None.
        cost_band: of the total cost, since --inspector-cost and load are uncertain; None without --inspector-cost.
        run: the run to be caught.
        lab: what monitoring asks of the lab.
        cost: the total of costs, or None.
        costs: money a year; None without --inspector-cost.
        replaying: None without --segments.
        excess: detection less false_alarm.
        guaranteed_flop: 2H.
        responses: the most dangerous evasion first.
        deterrence: None without --gain.
        not_covered: evasions outside the guarantee.
        impossible: evasions that need more chips than there are.
        sensitivity: work with a parameter halved and doubled, relative to the plan's, the strongest first; None
            without --sensitivity.
        stocks_as_of: month of the chip counts; None without --today.
        parameters: the problem as it was solved.
    """

    reason: None = None
    other: OtherSchedule | None
    visits_per_year: float
    dearer_at_most: float
    noticed_within_days: float
    inspectors: int
    inspector_load: float
    money: str | None
    cost_band: Spread | None
    run: RunSize
    lab: LabBurden
    cost: float | None
    costs: CostParts | None
    replaying: SegmentReplay | None
    excess: float
    guaranteed_flop: float
    responses: Sequence[SiteResponse]
    deterrence: Deterrence | None
    not_covered: Sequence[str]
    impossible: Sequence[str]
    sensitivity: Sequence[Sensitivity] | None
    stocks_as_of: str | None
    parameters: Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPlan:
    """No schedule reaches the confidence within the cap on false alarms.

    Attributes:
        visits: None.
        reason: why there is no schedule.
        would_hold: for each input, the value at which there would be a schedule with all other inputs unchanged.
    """

    visits: None = None
    reason: str
    would_hold: Mapping[str, float]
