"""A scenario: one fleet, its runs, an inspection regime and the strategies to compare, ready to plan and to predict."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from firmware_sim.errors import CallerError
from inspector.campaign._toml import ScenarioError
from inspector.campaign.checks import at_least, fraction, named, positive, probability
from inspector.campaign.evidence import Observations, Weighing
from inspector.campaign.fleet import Fleet, Inspection, Kind, Run, Threshold
from inspector.campaign.plan import Plan, honest_plan, make_plan
from inspector.campaign.policies import Strategy
from inspector.campaign.rates import IntervalEnd, RateBook
from inspector.campaign.sizing import Sizing, false_alarm, size
from inspector.probability.alarms import FALSE_ALARMS
from inspector.probability.detection import OutOfReachError
from inspector.probability.distributions import Distribution
from inspector.probability.evidence import DecisionRule

__all__ = ["Catalogue", "Cost", "NoScheduleError", "Scenario", "ScenarioError"]


class NoScheduleError(ScenarioError, OutOfReachError):
    """The scenario asks for a confidence that no schedule reaches within its cap on false alarms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Public figures that a scenario may name: chip kinds, models (FLOP), stocks (holder, month → chips of a kind)."""

    kinds: Mapping[str, Kind] = field(default_factory=dict)
    models: Mapping[str, float] = field(default_factory=dict)
    stocks: Mapping[tuple[str, str], tuple[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a regime costs in addition to its inspectors' time, in money.

    Attributes:
        inspector: an inspector's year.
        fixed: a year of everything else, such as servers or changes to chips.
    """

    inspector: float = 0.0
    fixed: float = 0.0

    def __post_init__(self) -> None:
        at_least("inspector_cost", self.inspector, 0)
        at_least("fixed_cost", self.fixed, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One campaign to simulate.

    ``wanted`` is the detection probability that a planner asks for; where the file gives it instead of ``samples``,
    the inspection holds the number that reaches it against the first strategy. No number that accuses an honest lab
    with more than ``false_alarms`` is ever proposed; where ``chooses_refusals``, as few refusals are tolerated as that
    takes. ``uncertain`` holds the distributions of the file's numbers by their dotted keys. ``regime`` names the regime
    where a file has several, and ``source`` says where its numbers are from;
    ``money`` names currency and year of its prices.
    ``observations`` is its evidence beyond chips, ``weighs`` the rule that weighs it, made for all strategies alike.
    """

    title: str
    description: str
    days: float
    fleet: Fleet
    runs: tuple[Run, ...]
    rule: Threshold
    inspection: Inspection
    strategies: tuple[Strategy, ...]
    rates: RateBook
    wanted: float
    chips_per_inspector_year: float
    false_alarms: float = FALSE_ALARMS
    chooses_refusals: bool = False
    uncertain: Mapping[str, Distribution] = field(default_factory=dict)
    regime: str = ""
    source: str = ""
    cost: Cost = Cost()
    money: str = ""
    observations: Observations = field(default_factory=Observations)
    weighs: DecisionRule | None = None

    def __post_init__(self) -> None:
        named("title", self.title)
        positive("days", self.days)
        fraction("confidence", self.wanted)
        probability("false_alarms", self.false_alarms)
        alarming = self.inspection.honest_refusal_rate > 0 or self.inspection.loss_alarm is not None
        if alarming and self.false_alarms >= self.wanted:
            raise CallerError(
                f"false_alarms of {self.false_alarms:g} already reaches the wanted confidence of {self.wanted:g}, so "
                "detection would show nothing"
            )
        positive("chips_per_inspector_year", self.chips_per_inspector_year)
        if not self.strategies:
            raise CallerError("a scenario needs at least one strategy")

    def plan(self, strategy: Strategy, bound: IntervalEnd = IntervalEnd.POINT, confidence: float = 0.95) -> Plan:
        """Return the plan of one strategy at one end of the measured rates."""
        made = make_plan(
            self.fleet,
            self.runs,
            self.rule,
            self.inspection,
            strategy,
            self.rates,
            days=self.days,
            bound=bound,
            confidence=confidence,
        )
        if self.weighs is None:
            return made
        sources = self.observations.of(made.target)
        if len(made.lawful) == len(self.runs):  # It breaks no rule, and gives alarms as the honest do.
            return dataclasses.replace(made, weighing=Weighing(rule=self.weighs, sources=sources, evading=None))
        evading = sources.among([each for each in strategy.evades if each == "all" or each in sources.names])
        return dataclasses.replace(made, weighing=Weighing(rule=self.weighs, sources=sources, evading=evading))

    def weighed(self) -> Scenario:
        """Return the scenario with the rule that weighs its evidence beyond chips, made for all strategies alike."""
        if not self.observations.each:
            return self
        targets = [self.plan(strategy).target for strategy in self.strategies]
        return dataclasses.replace(self, weighs=self.observations.rule(targets))

    def honest(self) -> Plan:
        """Return the plan of a world in which no lab breaks the rule."""
        made = honest_plan(self.fleet, self.inspection, days=self.days)
        if self.weighs is None:
            return made
        sources = self.observations.of(made.target)
        return dataclasses.replace(made, weighing=Weighing(rule=self.weighs, sources=sources, evading=None))

    def false_alarm(self) -> float:
        """Return the exact chance that this regime accuses a lab in a world in which none breaks the rule."""
        return false_alarm(self.honest())

    def sizing(self, strategy: Strategy) -> Sizing:
        """Return the fewest samples a period whose closed form reaches ``wanted`` within the cap on false alarms."""
        return size(
            self.inspection,
            plan=lambda regime: dataclasses.replace(self, inspection=regime).plan(strategy),
            honest=lambda regime: dataclasses.replace(self, inspection=regime).honest(),
            most=self.fleet.registered(),
            wanted=self.wanted,
            cap=self.false_alarms,
            chooses=self.chooses_refusals,
        )

    def samples_needed(self, strategy: Strategy) -> int | None:
        """Return the samples of ``sizing``; None if no number serves or no closed form exists."""
        return self.sizing(strategy).samples

    def cost_per_year(self) -> float:
        """Return the money that the regime costs a year; 0 where the file names none."""
        return self.inspectors(self.inspection.samples_done()) * self.cost.inspector + self.cost.fixed

    def inspectors(self, samples: int) -> int:
        """Return the whole inspectors that so many samples a period keep busy."""
        return math.ceil(samples * 365 / self.inspection.period_days / self.chips_per_inspector_year * (1 - 1e-12))
