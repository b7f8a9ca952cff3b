"""Scenario files: a fleet, its runs, the inspector's regime, and the strategies to compare, in TOML.

`inspector.campaign.schema.SECTIONS` lists every key with its default and unit; a key that is not listed is refused.
A number (but a policy's) may be uncertain, as a text: flop = "1e25/2e25/5e25" and the other forms of
`inspector.probability.distributions`. It is read as its median; ``Scenario.uncertain`` names its distribution.

Models, stocks and chip kinds may come from a `Catalogue` of public figures. Policies and their parameters are those of
`inspector.campaign.policies.POLICIES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from inspector.campaign._observations import chosen_evidence, evidence_of
from inspector.campaign._sections import (
    assumed_of,
    cap_of,
    check_exempt,
    cost_of,
    inspection_of,
    kind_of,
    lab_of,
    rates_of,
    rule_of,
    run_of,
    source_of,
    strategy_of,
    wanted_of,
)
from inspector.campaign._toml import Numbers, Table, read_toml
from inspector.campaign.fleet import Fleet, Inspection
from inspector.campaign.policies import told_lies
from inspector.campaign.scenario import Catalogue, NoScheduleError, Scenario, ScenarioError
from inspector.campaign.schema import SPANS
from inspector.campaign.sizing import fewest_refusals
from inspector.probability.inputs import money_of

__all__ = ["load_regimes", "load_scenario"]


def load_scenario(
    path: Path,
    catalogue: Catalogue | None = None,
    *,
    regime: str | None = None,
    false_alarms: float | None = None,
    at: Mapping[str, float] | None = None,
    sized: Scenario | None = None,
) -> Scenario:
    """Read and check a scenario file; paths in it are relative to it.

    Args:
        path: the file.
        catalogue: public figures that it may name.
        regime: which of several regimes to take; a file with one needs none.
        false_alarms: cap on false alarms, instead of the file's.
        at: values of uncertain numbers by their dotted keys, instead of their medians.
        sized: take samples and tolerated refusals from there, where the file leaves them to be chosen, and the rule
            that weighs evidence beyond chips.

    Raises:
        NoScheduleError: No schedule reaches the confidence that the file asks for, within the cap on false alarms.
        ScenarioError: Anything in the file is wrong; the text names line and key.
    """
    root = read_toml(path, numbers := Numbers(at, SPANS))
    sections = _sections(root)
    names = [name for name, _ in sections]
    if regime is None and len(sections) > 1:
        raise ScenarioError(f"{path.name} has several regimes; name one of them: {', '.join(names)}")
    if regime is not None and regime not in names:
        raise ScenarioError(f"{path.name} has no regime {regime!r}; known: {', '.join(filter(None, names)) or 'none'}")
    found = _load(path, root, sections, numbers, catalogue or Catalogue(), false_alarms, regime or names[0], sized)
    return found[0]


def load_regimes(
    path: Path, catalogue: Catalogue | None = None, *, false_alarms: float | None = None
) -> tuple[Scenario, ...]:
    """Read a scenario file once for each of its regimes, in the file's order; arguments and errors as `load_scenario`.

    All of them have the same fleet, runs and strategies.
    """
    root = read_toml(path, numbers := Numbers(spans=SPANS))
    return _load(path, root, _sections(root), numbers, catalogue or Catalogue(), false_alarms, None, None)


def _sections(root: Table) -> list[tuple[str, Table]]:
    """Return the regimes with their names; one without name where the file has an [inspection]."""
    if not root.has("regime"):
        return [("", root.table("inspection"))]
    if root.has("inspection"):
        raise root.fail("give [inspection] or [[regime]], not both", "inspection")
    found: list[tuple[str, Table]] = []
    for table in root.tables("regime"):
        name = table.text("name")
        if name in (other for other, _ in found):
            raise table.fail(f"two regimes are named {name!r}", "name")
        found.append((name, table))
    if not found:
        raise root.fail("needs at least one regime", "regime")
    return found


def _load(
    path: Path,
    root: Table,
    sections: list[tuple[str, Table]],
    numbers: Numbers,
    known: Catalogue,
    false_alarms: float | None,
    wanted: str | None,
    sized: Scenario | None,
) -> tuple[Scenario, ...]:
    for key in ("kind", "lab", "run", "strategy", "evidence"):
        _distinct(root, key)
    kinds = dict(known.kinds)
    for table in root.tables("kind", required=False):
        kind = kind_of(table)
        kinds[kind.name] = kind
    observed = evidence_of(root)
    searched = bool(observed.each) or any(section.switch("searches", False) for _, section in sections)
    labs = [lab_of(table, kinds, known, searched) for table in root.tables("lab")]
    fleet = root.build(lambda: Fleet(labs=tuple(labs)))
    rule = rule_of(root.table("rule"), known)
    check_exempt(root.table("rule"), labs, kinds)
    runs = tuple(run_of(table, known) for table in root.tables("run"))
    strategies = tuple(strategy_of(table) for table in root.tables("strategy"))
    for strategy, table in zip(strategies, root.tables("strategy"), strict=True):
        if strategy.evades:
            if not observed.each:
                raise table.fail("has no effect without [[evidence]]", "evades")
            table.build(lambda names=strategy.evades: observed.among(names), "evades")  # type: ignore[misc]
    told = told_lies(strategies)
    title, description, days = root.text("title"), root.text("description", ""), root.number("days")
    money = root.text("money", "")
    if root.has("money"):
        root.build(lambda: money_of(money), "money")
    made = []
    for name, section in sections:
        under = assumed_of(section, told) if name else {}
        rates = rates_of(root.table("detection"), path.parent, under, told)
        for entry in (each for table in root.tables("strategy") for each in table.tables("policies", required=False)):
            if entry.has("lie"):
                entry.build(partial(rates.rate, entry.text("lie")), "lie")
        regime, sampled = inspection_of(section, fleet)
        confidence, busy = wanted_of(section)
        cap, chooses = cap_of(section, false_alarms)
        cost, source = cost_of(section), source_of(section, "") if name else ""
        threshold = section.number("threshold_flop", rule.threshold_flop) if name else rule.threshold_flop
        observations = chosen_evidence(section, observed)
        section.close()
        one = partial(
            Scenario,
            title=title,
            description=description,
            days=days,
            fleet=fleet,
            runs=runs,
            rule=dataclasses.replace(rule, threshold_flop=threshold),
            inspection=regime,
            strategies=strategies,
            rates=rates,
            wanted=confidence,
            chips_per_inspector_year=busy,
            false_alarms=cap,
            chooses_refusals=chooses,
            uncertain=numbers.met,
            regime=name,
            source=source,
            cost=cost,
            money=money,
            observations=observations,
        )
        made.append((root.build(one, other=section), section, sampled))
    root.close()
    return tuple(
        _checked(one, root, section, sampled, sized)
        for one, section, sampled in made
        if wanted is None or one.regime == wanted
    )


def _distinct(root: Table, key: str) -> None:
    """Refuse two tables of an array with one name."""
    seen: set[str] = set()
    for table in root.tables(key, required=False):
        name = table.text("name")
        if name in seen:
            raise table.fail(f"another [[{key}]] is named {name!r}", "name")
        seen.add(name)


def _checked(made: Scenario, root: Table, section: Table, sampled: bool, sized: Scenario | None) -> Scenario:
    """Return the scenario with its regime sized, every strategy tried."""
    regime = made.inspection
    if sized is None:
        if made.observations.each:
            _tried(made, root, section)
            made = root.build(made.weighed)
        regime = _sized(made, section, sampled=sampled)
    else:
        made = dataclasses.replace(made, weighs=sized.weighs)
        samples = regime.samples if sampled else sized.inspection.samples
        refusals = (
            sized.inspection.refusals_allowed if made.chooses_refusals or not sampled else regime.refusals_allowed
        )
        regime = dataclasses.replace(regime, samples=samples, refusals_allowed=refusals)
    made = dataclasses.replace(made, inspection=regime)
    _tried(made, root, section)
    return made


def _tried(made: Scenario, root: Table, section: Table) -> None:
    """Refuse a strategy that cannot be carried out, or a regime that cannot be held."""
    section.build(made.honest, other=root)
    for strategy, table in zip(made.strategies, root.tables("strategy"), strict=True):
        table.build(lambda strategy=strategy: made.plan(strategy), other=section)  # type: ignore[misc]


def _sized(scenario: Scenario, section: Table, *, sampled: bool) -> Inspection:
    """Return the regime with the samples and tolerated refusals that the file leaves to be chosen."""
    regime, cap = scenario.inspection, scenario.false_alarms
    if not sampled:
        found = section.build(lambda: scenario.sizing(scenario.strategies[0]))
        if found.samples is None or found.refusals_allowed is None:
            first = scenario.runs[0]
            if first.name in scenario.plan(scenario.strategies[0]).lawful:
                message = (
                    f"no more than the threshold of {scenario.rule.threshold_flop:.4g}: the run breaks no rule, so no "
                    "number of samples finds it"
                )
                raise section.fail(message, path=("run", 0, "flop"))
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
        message = (
            f"an honest lab is accused with more than {cap:g}, however many chips that could not be shown are tolerated"
        )
        raise NoScheduleError(str(section.fail(message, "refusals_allowed")))
    return dataclasses.replace(regime, refusals_allowed=fewest)
