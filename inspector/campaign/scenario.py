"""Scenario files: a fleet, its runs, the inspector's regime, and the strategies to compare, in TOML.

Keys, with their defaults; a key that is not listed is refused::

    title, description = "", days                    horizon in days
    [rule]        threshold_flop | model, times = 1; evidence = "after-threshold" | "whole-run"
    [inspection]  period_days, snapshot_rate, samples (a period) and/or confidence = 0.9 (alone: sets the samples),
                  sampling = "pooled" | "per-lab" | "per-site", replacement = false, redraw = true,
                  log = "period" | "run", honest_refusal_rate = 0, refusals_allowed = 0 | "fewest" (that keep honest
                  labs within the cap), false_alarms = 0.01 (the cap: samples and refusals that accuse an honest lab
                  more often are not chosen), searches = false,
                  loss_rate_per_year = 0, loss_alarm (none), inspectors (no limit), chips_per_inspector_year = 1000
    [detection]   table (JSON of measured rates), device, settings (choose its rows), assumed = { lie = rate }
    [[kind]]      name, flop_per_second, link_gbps (never limits)
    [[lab]]       name; [[lab.site]] name, declared = true (false: never searched; needs searches = true);
                  [[lab.site.chips]] kind and count, or stock, as_of and
                  share = 1; status = "registered" | "exempt" | "undeclared" | "lost"
    [[run]]       name, lab, flop | model, times = 1; days, start = 0, utilisation = 1
    [[strategy]]  name, policies = [{ policy = "stretch", factor = 2 }, ...]

A number (but a policy's) may be uncertain, as a text: flop = "1e25/2e25/5e25" and the other forms of
`inspector.probability.uncertain`. It is read as its median; ``Scenario.uncertain`` names its distribution.

Models, stocks and chip kinds may come from a `Catalogue` of public figures. Policies and their parameters are those of
`inspector.campaign.policies.POLICIES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from firmware_sim.errors import CallerError
from inspector.campaign._toml import Numbers, ScenarioError, Table, read_toml
from inspector.campaign.checks import fraction, named, positive, probability
from inspector.campaign.fleet import (
    Evidence,
    Fleet,
    Inspection,
    Kind,
    Lab,
    LogSpan,
    Pool,
    Rule,
    Run,
    Sampling,
    Site,
    Status,
)
from inspector.campaign.plan import Plan, honest_plan, make_plan
from inspector.campaign.policies import Policy, Strategy, policy_from
from inspector.campaign.rates import IntervalEnd, RateBook, load_rates
from inspector.campaign.sizing import Sizing, false_alarm, fewest_refusals, size
from inspector.probability.alarms import FALSE_ALARMS
from inspector.probability.detection import CHIPS_PER_INSPECTOR, OutOfReachError
from inspector.probability.uncertain import Distribution

__all__ = ["Catalogue", "NoScheduleError", "Scenario", "ScenarioError", "load_scenario"]

SECONDS_PER_DAY = 86_400.0
_BUSY = float(CHIPS_PER_INSPECTOR)
E = TypeVar("E", bound=StrEnum)


class NoScheduleError(ScenarioError, OutOfReachError):
    """The scenario asks for a confidence that no schedule reaches within its cap on false alarms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """Public figures that a scenario may name: chip kinds, models (FLOP), stocks (holder, month → chips of a kind)."""

    kinds: Mapping[str, Kind] = field(default_factory=dict)
    models: Mapping[str, float] = field(default_factory=dict)
    stocks: Mapping[tuple[str, str], tuple[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One campaign to simulate.

    ``wanted`` is the detection probability that a planner asks for; where the file gives it instead of ``samples``,
    the inspection holds the number that reaches it against the first strategy. No number that accuses an honest lab
    with more than ``false_alarms`` is ever proposed; where ``chooses_refusals``, as few refusals are tolerated as that
    takes. ``uncertain`` holds the distributions of the file's numbers by their dotted keys.
    """

    title: str
    description: str
    days: float
    fleet: Fleet
    runs: tuple[Run, ...]
    rule: Rule
    inspection: Inspection
    strategies: tuple[Strategy, ...]
    rates: RateBook
    wanted: float
    chips_per_inspector_year: float
    false_alarms: float = FALSE_ALARMS
    chooses_refusals: bool = False
    uncertain: Mapping[str, Distribution] = field(default_factory=dict)

    def __post_init__(self) -> None:
        named("title", self.title)
        positive("days", self.days)
        fraction("confidence", self.wanted)
        probability("false_alarms", self.false_alarms)
        alarming = self.inspection.honest_refusal_rate > 0 or self.inspection.loss_alarm is not None
        if alarming and self.false_alarms >= self.wanted:
            raise CallerError(
                f"false_alarms of {self.false_alarms:g} would reach a confidence of {self.wanted:g} by themselves"
            )
        positive("chips_per_inspector_year", self.chips_per_inspector_year)
        if not self.strategies:
            raise CallerError("a scenario needs at least one strategy")

    def plan(self, strategy: Strategy, bound: IntervalEnd = IntervalEnd.POINT, confidence: float = 0.95) -> Plan:
        """Return the plan of one strategy at one end of the measured rates."""
        return make_plan(
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

    def honest(self) -> Plan:
        """Return the plan of a world in which nobody breaks the rule."""
        return honest_plan(self.fleet, self.inspection, days=self.days)

    def false_alarm(self) -> float:
        """Return the exact chance that this regime accuses somebody in a world in which nobody breaks the rule."""
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

    def inspectors(self, samples: int) -> float:
        """Return the inspectors that so many samples a period keep busy."""
        return samples * 365 / self.inspection.period_days / self.chips_per_inspector_year


def load_scenario(
    path: Path,
    catalogue: Catalogue | None = None,
    *,
    false_alarms: float | None = None,
    at: Mapping[str, float] | None = None,
    sized: Inspection | None = None,
) -> Scenario:
    """Read and check a scenario file; paths in it are relative to it.

    Args:
        path: the file.
        catalogue: public figures that it may name.
        false_alarms: cap on false alarms, instead of the file's.
        at: values of uncertain numbers by their dotted keys, instead of their medians.
        sized: take samples and tolerated refusals from there, where the file leaves them to be chosen.

    Raises:
        NoScheduleError: No schedule reaches the confidence that the file asks for, within the cap on false alarms.
        ScenarioError: Anything in the file is wrong; the text names line and key.
    """
    numbers = Numbers(at)
    root = read_toml(path, numbers)
    known = catalogue or Catalogue()
    kinds = dict(known.kinds)
    for table in root.tables("kind", required=False):
        kind = _kind(table)
        kinds[kind.name] = kind
    searched = bool(root.mapping("inspection").get("searches"))
    labs = [_lab(table, kinds, known, searched) for table in root.tables("lab")]
    fleet = root.build(lambda: Fleet(labs=tuple(labs)))
    rule = _rule(root.table("rule"), known)
    runs = tuple(_run(table, known) for table in root.tables("run"))
    strategies = tuple(_strategy(table) for table in root.tables("strategy"))
    seen: set[str] = set()
    for strategy, table in zip(strategies, root.tables("strategy"), strict=True):
        if strategy.name in seen:
            raise table.fail(f"two strategies are named {strategy.name!r}", "name")
        seen.add(strategy.name)
    rates = _rates(root.table("detection"), path.parent)
    section = root.table("inspection")
    regime, sampled = _inspection(section)
    wanted, busy = _wanted(section)
    cap, chooses = _cap(section, false_alarms)
    section.close()
    title, description, days = root.text("title"), root.text("description", ""), root.number("days")
    root.close()
    made = root.build(
        lambda: Scenario(
            title=title,
            description=description,
            days=days,
            fleet=fleet,
            runs=runs,
            rule=rule,
            inspection=regime,
            strategies=strategies,
            rates=rates,
            wanted=wanted,
            chips_per_inspector_year=busy,
            false_alarms=cap,
            chooses_refusals=chooses,
            uncertain=numbers.met,
        )
    )
    if sized is None:
        regime = _sized(made, section, sampled=sampled)
    else:
        samples = regime.samples if sampled else sized.samples
        refusals = sized.refusals_allowed if chooses or not sampled else regime.refusals_allowed
        regime = dataclasses.replace(regime, samples=samples, refusals_allowed=refusals)
    made = dataclasses.replace(made, inspection=regime)
    section.build(made.honest)
    for strategy, table in zip(strategies, root.tables("strategy"), strict=True):
        table.build(lambda strategy=strategy: made.plan(strategy))  # type: ignore[misc]
    return made


def _sized(scenario: Scenario, section: Table, *, sampled: bool) -> Inspection:
    """Return the regime with the samples and tolerated refusals that the file leaves to be chosen."""
    regime, cap = scenario.inspection, scenario.false_alarms
    if not sampled:
        found = section.build(lambda: scenario.sizing(scenario.strategies[0]))
        if found.samples is None or found.refusals_allowed is None:
            message = (
                f"no number of samples reaches {scenario.wanted:g} against {scenario.strategies[0].name!r} with false "
                f"alarms of {cap:g} at most: {found.reason}; give 'samples'"
            )
            raise NoScheduleError(str(section.fail(message, "confidence")))
        return dataclasses.replace(regime, samples=found.samples, refusals_allowed=found.refusals_allowed)
    if not scenario.chooses_refusals:
        return regime
    fewest = section.build(
        lambda: fewest_refusals(regime, lambda each: dataclasses.replace(scenario, inspection=each).honest(), cap)
    )
    if fewest is None:
        message = f"an honest lab is accused with more than {cap:g}, however many refusals are tolerated"
        raise NoScheduleError(str(section.fail(message, "refusals_allowed")))
    return dataclasses.replace(regime, refusals_allowed=fewest)


def _choice(table: Table, key: str, kind: type[E], default: E) -> E:
    text = table.text(key, default)
    try:
        return kind(text)
    except ValueError:
        raise table.fail(f"unknown value {text!r}; known: {', '.join(kind)}", key) from None


def _kind(table: Table) -> Kind:
    name, speed = table.text("name"), table.number("flop_per_second")
    link = table.number("link_gbps") if table.has("link_gbps") else None
    if link is None:
        table.text("link_gbps", "")
    table.close()
    if speed <= 0:
        raise table.fail(f"must be above 0, got {speed!r}", "flop_per_second")
    return table.build(lambda: Kind(name=name, flop_per_day=speed * SECONDS_PER_DAY, link_gbps=link))


def _lab(table: Table, kinds: Mapping[str, Kind], known: Catalogue, searched: bool) -> Lab:
    name = table.text("name")
    sites = []
    for entry in table.tables("site"):
        pools = tuple(_pool(chips, kinds, known) for chips in entry.tables("chips"))
        site_name, declared = entry.text("name"), entry.switch("declared", True)
        entry.close()
        if not declared and not searched:
            message = "false changes nothing while no site is searched: it needs 'searches = true' in [inspection]"
            raise entry.fail(message, "declared")
        sites.append(entry.build(lambda n=site_name, p=pools, d=declared: Site(name=n, pools=p, declared=d)))  # type: ignore[misc]
    table.close()
    return table.build(lambda: Lab(name=name, sites=tuple(sites)))


def _pool(table: Table, kinds: Mapping[str, Kind], known: Catalogue) -> Pool:
    status = _choice(table, "status", Status, Status.REGISTERED)
    if table.has("stock"):
        holder, month = table.text("stock"), table.text("as_of")
        share = table.number("share", 1.0, share=True)
        if (holder, month) not in known.stocks:
            raise table.fail(f"no public stock of {holder!r} at {month!r}; {_stocks_of(month, known)}", "stock")
        if not 0 < share <= 1:
            raise table.fail(f"must be above 0 and at most 1, got {share!r}", "share")
        kind_name, chips = known.stocks[holder, month]
        count, key = max(1, round(chips * share)), "stock"
    else:
        kind_name, count, key = table.text("kind"), table.whole("count"), "kind"
        for unused in ("stock", "as_of"):
            if table.has(unused):
                raise table.fail("needs 'stock' and 'as_of' together", unused)
    table.close()
    if kind_name not in kinds:
        raise table.fail(f"unknown chip kind {kind_name!r}; known: {', '.join(kinds)}", key)
    return table.build(lambda: Pool(kind=kinds[kind_name], count=count, status=status))


def _stocks_of(month: str, known: Catalogue) -> str:
    """Say which stocks there are: those of the month, or else the months."""
    there = [holder for holder, when in known.stocks if when == month]
    if there:
        return _listed(there)
    return f"no stock of that month; {_listed(when for _, when in known.stocks)}"


def _listed(names: Iterable[str]) -> str:
    return f"known: {', '.join(sorted(set(names))) or 'none'}"


def _flop(table: Table, key: str, known: Catalogue) -> float:
    if not table.has("model"):
        return table.number(key)
    if table.has(key):
        raise table.fail(f"give either {key!r} or 'model'", "model")
    model, times = table.text("model"), table.number("times", 1.0)
    if model not in known.models:
        raise table.fail(f"unknown model {model!r}; {_listed(known.models)}", "model")
    return known.models[model] * times


def _rule(table: Table, known: Catalogue) -> Rule:
    threshold = _flop(table, "threshold_flop", known)
    evidence = _choice(table, "evidence", Evidence, Evidence.AFTER_THRESHOLD)
    table.close()
    return table.build(lambda: Rule(threshold_flop=threshold, evidence=evidence))


def _run(table: Table, known: Catalogue) -> Run:
    flop = _flop(table, "flop", known)
    name, lab, days = table.text("name"), table.text("lab"), table.number("days")
    start, utilisation = table.number("start", 0.0), table.number("utilisation", 1.0, share=True)
    table.close()
    return table.build(lambda: Run(name=name, lab=lab, flop=flop, days=days, start=start, utilisation=utilisation))


def _strategy(table: Table) -> Strategy:
    policies: list[Policy] = []
    for entry in table.tables("policies", required=False):
        name = entry.text("policy")
        policies.append(entry.build(lambda n=name, e=entry: policy_from(n, e.rest())))  # type: ignore[misc]
    name = table.text("name")
    table.close()
    strategy = table.build(lambda: Strategy(name=name, policies=tuple(policies)))
    table.build(strategy.conduct)
    return strategy


def _rates(table: Table, folder: Path) -> RateBook:
    measured = {}
    device = table.text("device", "") or None
    settings = table.text("settings", "") or None
    if table.has("table"):
        path = folder / table.text("table")
        measured = table.build(lambda: load_rates(path, device=device, settings=settings), "table")
    elif device or settings:
        raise table.fail("needs 'table'", "device" if device else "settings")
    else:
        table.text("table", "")
    given = table.table("assumed") if table.has("assumed") else None
    assumed = {} if given is None else {lie: given.number(lie, share=True) for lie in given.names()}
    table.mapping("assumed")
    table.close()
    return table.build(lambda: RateBook(measured=measured, assumed=assumed), "assumed")


def _inspection(table: Table) -> tuple[Inspection, bool]:
    """Return the regime, and whether the file gives its samples."""
    sampled = table.has("samples")
    if not sampled and not table.has("confidence"):
        raise table.fail("give 'samples' or 'confidence'")
    samples = table.whole("samples", 0)
    period = table.number("period_days")
    table.build(lambda: positive("inspection.period_days", period))
    inspectors, busy = table.number("inspectors", -1.0), table.number("chips_per_inspector_year", _BUSY)
    if table.has("inspectors") and not inspectors >= 0:
        raise table.fail(f"must be at least 0, got {inspectors!r}", "inspectors")
    table.build(lambda: positive("inspection.chips_per_inspector_year", busy))
    capacity = int(inspectors * busy * period / 365) if table.has("inspectors") else None
    alarm = table.number("loss_alarm", share=True) if table.has("loss_alarm") else None
    values = {
        "snapshot_rate": table.number("snapshot_rate"),
        "sampling": _choice(table, "sampling", Sampling, Sampling.POOLED),
        "replacement": table.switch("replacement", False),
        "redraw": table.switch("redraw", True),
        "log": _choice(table, "log", LogSpan, LogSpan.PERIOD),
        "honest_refusal_rate": table.number("honest_refusal_rate", 0.0, share=True),
        "refusals_allowed": 0 if table.is_text("refusals_allowed") else table.whole("refusals_allowed", 0),
        "searches": table.switch("searches", False),
        "loss_rate_per_year": table.number("loss_rate_per_year", 0.0),
    }
    table.number("loss_alarm", 0.0)
    made = table.build(
        lambda: Inspection(period_days=period, samples=samples, capacity=capacity, loss_alarm=alarm, **values)  # type: ignore[arg-type]
    )
    return made, sampled


def _wanted(table: Table) -> tuple[float, float]:
    """Return the wanted confidence, and the chips that keep an inspector busy for a year."""
    wanted = table.number("confidence", 0.9, share=True)
    table.build(lambda: fraction("inspection.confidence", wanted))
    return wanted, table.number("chips_per_inspector_year", _BUSY)


def _cap(table: Table, given: float | None) -> tuple[float, bool]:
    """Return the cap on false alarms, and whether tolerated refusals are to be chosen."""
    cap = table.number("false_alarms", FALSE_ALARMS, share=True)
    table.build(lambda: probability("inspection.false_alarms", cap))
    if given is not None:
        probability("false alarms", given)
    chooses = table.is_text("refusals_allowed")
    if chooses and table.text("refusals_allowed") != "fewest":
        raise table.fail("must be a whole number or 'fewest'", "refusals_allowed")
    return cap if given is None else given, chooses
