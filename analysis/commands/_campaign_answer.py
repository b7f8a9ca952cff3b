"""What ``campaign`` answers about one regime: the scenario, and a row for each strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from analysis.commands._uncertainty import OneBand, banded
from analysis.hidden_sites import target_json

if TYPE_CHECKING:
    from analysis.montecarlo import CampaignRow, Estimate
    from inspector.campaign import Scenario
    from inspector.probability.uncertainty import Band

__all__ = ["BeyondChips", "CampaignAnswer", "Interval", "Posterior", "ScenarioFacts", "StrategyRow", "facts_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioFacts:
    """What a scenario asks for.

    Attributes:
        stocks_as_of: months of the published chip counts that are used.
        inspectors: rounded up.
        money: currency and year or null.
        false_alarm: exact chance of an accusation if all labs are honest.
        false_alarms: its cap.
    """

    title: str
    threshold_flop: float
    period_days: float
    snapshot_rate: float
    days: float
    periods: int
    registered_chips: int
    stocks_as_of: Sequence[str]
    samples_per_period: int
    samples_per_year: int
    inspectors: int
    cost_per_year: float
    money: str | None
    wanted: float
    refusals_allowed: int
    false_alarm: float
    false_alarms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A measured probability, the ends of its interval, and how these were found."""

    value: float
    low: float
    high: float
    method: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """A detection less its false alarm, with the ends of its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """What verdicts make of the prior; null if a verdict never occurs.

    Attributes:
        accused, passed: chance of a violation after an accusation, and after a pass.
        likelihood_ratio: of an accusation.
    """

    accused: float | None
    passed: float | None
    likelihood_ratio: float | None

    @classmethod
    def of(cls, row: CampaignRow, prior: float) -> Posterior:
        """By the closed form, or what was measured where there is none."""
        from inspector.probability.alarms import likelihood_ratio, posterior
        from inspector.probability.tolerances import finite

        caught, alarm = row.predicted.detection, row.false_alarm
        caught = row.detection.value if caught is None else caught
        return cls(
            accused=finite(posterior(prior=prior, detection=caught, false_alarm=alarm)),
            passed=finite(posterior(prior=prior, detection=caught, false_alarm=alarm, accused=False)),
            likelihood_ratio=finite(likelihood_ratio(detection=caught, false_alarm=alarm)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BeyondChips:
    """What evidence beyond chips makes of a strategy.

    Attributes:
        accused: exact chance that the evidence from other sources than chips leads to an accusation by the end of the
            days.
        found: for each source that looks for hidden sites, the chance that it finds one if the lab does not evade it.
        evades: the evasions of the strategy.
    """

    accused: float
    found: Mapping[str, float]
    evades: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyRow:
    """One strategy.

    Attributes:
        strategy: its name; "honest": no lab violates anything, so a detection is a false alarm.
        false_alarm: as in scenario, for this row's days.
        excess: detection less false alarm.
        predicted: closed form of detection or null.
        predicted_log_miss: natural logarithm of the predicted chance of a miss; null if there is none or detection is
            certain.
        prediction: name of the closed form.
        completed: share of trials that finished unseen.
        days_to_detection: 10 %, 50 %, 90 % quantiles over the trials that were caught, or null.
        median_interval: interval of the 50 % quantile.
        in_time: chance of detection before the run ends; null if the lab changes its run after inspections.
        involved_chips: registered chips that take part.
        hidden_chips: chips outside the registry.
        samples_needed: samples a period that reach the wanted probability within the cap on false alarms, or null.
        refusals_needed: refusals that are tolerated with samples_needed.
        measured_lies, assumed_lies: lies of this strategy whose chance of being caught was measured, or is assumed.
        needed_reason: why no number is enough, or null.
        lawful_runs: runs of at most threshold_flop, which are no violation.
        hidden: its hidden sites, each with lab, site and the keys listed under "hidden sites".
        evidence: what sources other than chips find; null if the scenario has none.
        band: range of ``predicted`` over draws of the scenario's uncertain numbers; null without such numbers.
        posterior: with --prior, null without.
    """

    strategy: str
    detection: Interval
    miss: Interval
    false_alarm: float
    excess: Excess
    predicted: float | None
    predicted_excess: float | None
    predicted_log_miss: float | None
    prediction: str
    completed: float
    days_to_detection: tuple[float, float, float] | None
    median_interval: tuple[float, float] | None
    in_time: float | None
    involved_chips: int
    hidden_chips: int
    samples_needed: int | None
    refusals_needed: int | None
    needed_reason: str | None
    inspectors_needed: int | None
    measured_lies: tuple[str, ...]
    assumed_lies: tuple[str, ...]
    lawful_runs: tuple[str, ...]
    hidden: Sequence[Mapping[str, object]]
    evidence: BeyondChips | None
    band: OneBand | None
    posterior: Posterior | None

    @classmethod
    def of(cls, scenario: Scenario, row: CampaignRow, band: Band | None, prior: float | None) -> StrategyRow:
        """What was simulated and predicted of a strategy of the scenario, or of honest labs."""
        log_miss, sizing = row.predicted.log_miss, row.sizing
        samples = None if sizing is None else sizing.samples
        hidden, evidence = _beyond(scenario, row.name)
        return cls(
            strategy=row.name,
            detection=_interval(row.detection),
            miss=_interval(row.miss),
            false_alarm=row.false_alarm,
            excess=Excess(**dict(zip(("value", "low", "high"), row.excess, strict=True))),
            predicted=row.predicted.detection,
            predicted_excess=row.predicted_excess,
            predicted_log_miss=None if log_miss is None or math.isinf(log_miss) else log_miss,
            prediction=row.predicted.reason,
            completed=row.completed,
            days_to_detection=row.days_to_detection,
            median_interval=row.median_interval,
            in_time=row.in_time,
            involved_chips=row.involved_chips,
            hidden_chips=row.hidden_chips,
            samples_needed=samples,
            refusals_needed=None if sizing is None else sizing.refusals_allowed,
            needed_reason=(sizing.reason or None) if sizing else None,
            inspectors_needed=None if samples is None else scenario.inspectors(samples),
            measured_lies=row.measured_lies,
            assumed_lies=row.assumed_lies,
            lawful_runs=row.lawful_runs,
            hidden=hidden,
            evidence=evidence,
            band=None if band is None else banded(band),
            posterior=None if prior is None or row.name == "honest" else Posterior.of(row, prior),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignAnswer:
    """A campaign under one regime.

    Attributes:
        uncertain: the file's distributions by key.
        draws: number of draws of the uncertain numbers; null if there are none.
    """

    scenario: ScenarioFacts
    engine: str
    trials: int
    seed: int
    confidence: float
    rows: Sequence[StrategyRow]
    uncertain: Mapping[str, str]
    draws: int | None
    prior: float | None


def facts_of(scenario: Scenario) -> ScenarioFacts:
    """What a scenario asks for, with what its regime costs."""
    inspection = scenario.inspection
    samples = inspection.samples_done()
    return ScenarioFacts(
        title=scenario.title,
        threshold_flop=scenario.rule.threshold_flop,
        period_days=inspection.period_days,
        snapshot_rate=inspection.snapshot_rate,
        days=scenario.days,
        periods=scenario.honest().periods,
        registered_chips=scenario.fleet.registered(),
        stocks_as_of=scenario.fleet.months(),
        samples_per_period=samples,
        samples_per_year=math.ceil(samples * 365 / inspection.period_days),
        inspectors=scenario.inspectors(samples),
        cost_per_year=scenario.cost_per_year(),
        money=scenario.money or None,
        wanted=scenario.wanted,
        refusals_allowed=inspection.refusals_allowed,
        false_alarm=scenario.false_alarm(),
        false_alarms=scenario.false_alarms,
    )


def _beyond(scenario: Scenario, name: str) -> tuple[Sequence[Mapping[str, object]], BeyondChips | None]:
    """A strategy's hidden sites, and what evidence beyond chips alone makes of it; None where there is none."""
    strategy = next((each for each in scenario.strategies if each.name == name), None)
    if strategy is None:
        return [], None
    plan = scenario.plan(strategy)
    hidden = target_json(plan.target)
    if plan.weighing is None:
        return hidden, None
    found = scenario.observations.found(plan.target)
    return hidden, BeyondChips(accused=plan.weighing.probability(), found=found, evades=strategy.evades)


def _interval(estimate: Estimate) -> Interval:
    return Interval(value=estimate.value, low=estimate.low, high=estimate.high, method=estimate.method)
