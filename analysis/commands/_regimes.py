"""``campaign`` with several regimes: one table and one figure of detection, delay, cost and alarms."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from analysis.commands._answers import fields_of
from analysis.commands._campaign_answer import facts_of
from analysis.commands._common import finish, plural
from analysis.hidden_sites import hidden_lines, target_json
from analysis.regimes import RegimeCell, RegimeResult

if TYPE_CHECKING:
    from inspector.campaign import Scenario

__all__ = ["RegimesAnswer", "columns_of", "command_of", "no_evidence", "reopening", "side_by_side", "stock_lines"]

_TRIALS = 2_000
"""A cell's detection is a closed form in most regimes, so that its trials only give the delay."""


def side_by_side(arguments: argparse.Namespace, scenarios: Sequence[Scenario]) -> int:
    """Print all regimes of a scenario file, and draw them if a figure is wanted."""
    from tqdm import tqdm

    from analysis.montecarlo import TrialEngine
    from analysis.regimes import compare

    trials = _TRIALS if arguments.trials is None else arguments.trials
    total = len(scenarios) * len(scenarios[0].strategies)
    with tqdm(total=total, unit="cell", disable=not sys.stderr.isatty(), leave=False) as bar:
        results = compare(
            scenarios,
            trials,
            arguments.seed,
            engine=TrialEngine(arguments.engine),
            confidence=arguments.confidence,
            progress=bar.update,
        )
    if arguments.out is not None:
        _draw(arguments, results, trials)
    data = _answer(arguments, results, trials)
    if arguments.brief is not None:
        _brief(arguments, results, data, trials)
    return finish(arguments, data, _lines(data))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioOfRegimes:
    """What all regimes of a file share.

    Attributes:
        money: currency and year or null.
    """

    title: str
    threshold_flop: float
    days: float
    wanted: float
    money: str | None
    stocks_as_of: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell(RegimeCell):
    """One strategy under one regime.

    Attributes:
        exact: whether detection is a closed form and not simulated.
        delay, delay_low, delay_high: median day of detection of the trials that were caught, and its interval, or null.
        in_time: chance of detection before the run ends; null if the lab changes its run after inspections.
        found: for each source, the chance that it finds a hidden site.
        evidence: true if the strategy is caught more often than an honest lab is accused.
    """

    false_alarm: float
    excess: float
    evidence: bool

    @classmethod
    def of(cls, cell: RegimeCell, false_alarm: float) -> Cell:
        """With what honest labs meet under the same regime."""
        silent = no_evidence(cell.detection if cell.exact else None, false_alarm)
        excess = cell.detection - false_alarm
        return cls(**fields_of(cell), false_alarm=false_alarm, excess=excess, evidence=not silent)

    @property
    def interval(self) -> str:
        """Of a simulated detection, in words."""
        return "" if self.exact else f" ({self.low:.4f} to {self.high:.4f})"

    @property
    def text(self) -> str:
        """In a table."""
        day = "never" if self.delay is None else f"day {self.delay:g} ({self.delay_low:g}-{self.delay_high:g})"
        mark = "~" if not self.exact else "" if self.evidence else "="
        return f"{mark}{self.detection:.3f}, {day}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """One regime.

    Attributes:
        cost_per_year: 0 where the file names no cost.
        false_alarm: chance of an accusation over these days if all labs are honest.
        worst: the strategy with the least detection.
    """

    regime: str
    source: str
    threshold_flop: float
    samples_per_period: int
    period_days: float
    samples_per_year: int
    inspectors: int
    cost_per_year: float
    false_alarm: float
    cells: Sequence[Cell]
    worst: Cell

    @classmethod
    def of(cls, result: RegimeResult) -> Regime:
        """From what was compared."""
        scenario = result.scenario
        about, alarm = facts_of(scenario), scenario.false_alarm()
        shared = {name: getattr(about, name) for name in cls.__slots__ if hasattr(about, name)}
        cells = [Cell.of(cell, alarm) for cell in result.cells]
        worst = cells[result.cells.index(result.worst)]
        return cls(regime=scenario.regime, source=scenario.source, cells=cells, worst=worst, **shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimesAnswer:
    """All regimes of a scenario file, side by side.

    Attributes:
        hidden: the hidden sites of each strategy.
        uncertain: the file's distributions by key, which are taken at their medians.
    """

    scenario: ScenarioOfRegimes
    trials: int
    seed: int
    confidence: float
    hidden: Mapping[str, Sequence[Mapping[str, object]]]
    uncertain: Mapping[str, str]
    regimes: Sequence[Regime]

    @property
    def money(self) -> str:
        """Currency and year in words, where the file names them."""
        return f", {self.scenario.money}" if self.scenario.money else ""


def _answer(arguments: argparse.Namespace, results: Sequence[RegimeResult], trials: int) -> RegimesAnswer:
    first = results[0].scenario
    about = facts_of(first)
    return RegimesAnswer(
        scenario=ScenarioOfRegimes(**{name: getattr(about, name) for name in ScenarioOfRegimes.__slots__}),
        trials=trials,
        seed=arguments.seed,
        confidence=arguments.confidence,
        hidden={each.name: target_json(first.plan(each).target) for each in first.strategies},
        uncertain={name: str(each) for name, each in first.uncertain.items()},
        regimes=[Regime.of(result) for result in results],
    )


def _lines(data: RegimesAnswer) -> list[str]:
    from analysis.report.tables import aligned

    regimes, about = data.regimes, data.scenario
    rows = [["caught, median day of the caught", *(each.regime for each in regimes)]]
    for place, cell in enumerate(regimes[0].cells):
        rows.append([cell.strategy, *(each.cells[place].text for each in regimes)])
    rows += [
        ["worst case", *(each.worst.text for each in regimes)],
        ["  by", *(each.worst.strategy for each in regimes)],
        ["honest labs accused", *(f"{each.false_alarm:.4f}" for each in regimes)],
        ["chips inspected a year", *(f"{each.samples_per_year:,}" for each in regimes)],
        ["inspectors", *(f"{each.inspectors:,}" for each in regimes)],
        [f"cost a year{data.money}", *(f"{each.cost_per_year:,.0f}" for each in regimes)],
    ]
    lines = [
        about.title,
        f"runs above {_thresholds(regimes)} FLOP, over {about.days:g} days; detection is a closed form but "
        f"where marked ~ (simulated); days from {data.trials:,} trials a cell, seed {data.seed}",
        "",
        *aligned(rows),
        "",
        *(f"{each.regime}: {each.source}" for each in regimes if each.source),
        f"Days: medians of the trials that were caught, before or after the run ended, with {data.confidence:.0%} "
        "intervals; --json also has the share caught in time.",
        "Detection rates and costs are the file's assumptions: campaign --show NAME prints them.",
    ]
    if any(not cell.evidence for each in regimes for cell in each.cells):
        lines.append("=: as often as honest labs are accused, which is no evidence.")
    lines += hidden_lines(data.hidden)
    lines += stock_lines(about.stocks_as_of)
    if data.uncertain:
        lines.append(f"Taken at their medians: {', '.join(data.uncertain)}; --regime NAME gives bands.")
    return lines


def _thresholds(regimes: Sequence[Regime]) -> str:
    """Return the threshold, or of several each with its regime."""
    each = [f"{regime.threshold_flop:.3g}" for regime in regimes]
    if len(set(each)) == 1:
        return each[0]
    return ", ".join(f"{flop} ({regime.regime})" for flop, regime in zip(each, regimes, strict=True))


def reopening(arguments: argparse.Namespace, scenario: Scenario) -> Callable[[Mapping[str, float]], Scenario]:
    """Return what opens the file again at other values of its uncertain numbers, with the samples that it has."""
    from analysis.scenarios import open_scenario

    regime = scenario.regime or None
    return lambda at: open_scenario(
        arguments.scenario, regime=regime, false_alarms=arguments.false_alarms, at=at, sized=scenario
    )


def _brief(arguments: argparse.Namespace, results: Sequence[RegimeResult], data: RegimesAnswer, trials: int) -> None:
    """Write two sides about the regime whose worst case is caught most."""
    from analysis.commands._brief import campaign_brief

    best = max(results, key=lambda result: result.worst.detection)
    (chosen,) = (each for each in data.regimes if each.regime == best.scenario.regime)
    answer = [
        f"{each.regime}: at worst {each.worst.detection:.4f}{each.worst.interval}, by "
        f"{each.worst.strategy!r}; honest labs accused with {each.false_alarm:.4f}; "
        f"{plural(each.inspectors, 'inspector')}, cost {each.cost_per_year:,.0f} a year{data.money}."
        for each in data.regimes
    ]
    campaign_brief(
        arguments.brief,
        best.scenario,
        answer=[*answer, f"The worst case is caught most by {best.scenario.regime!r}."],
        strategy=best.worst.strategy,
        reopened=reopening(arguments, best.scenario),
        silent=[cell.strategy for cell in chosen.cells if not cell.evidence],
        command=command_of(arguments, trials),
    )


def command_of(arguments: argparse.Namespace, trials: int) -> str:
    """Return the command with what shaped its result."""
    names = ("seed", "engine", "confidence", "false_alarms", "regime")
    given = {"trials": trials, **{name: getattr(arguments, name) for name in names}}
    options = [(f"--{name.replace('_', '-')}", value) for name, value in given.items() if value is not None]
    words = [str(word) for option in options for word in option]
    return shlex.join(["chipwitness", "campaign", arguments.scenario, *words])


def _draw(arguments: argparse.Namespace, results: Sequence[RegimeResult], trials: int) -> None:
    from analysis.report.figures import Origin, regimes_figure

    regimes_figure(
        arguments.out,
        **columns_of(results),
        title=results[0].scenario.title,
        origin=Origin(command=command_of(arguments, trials), seed=arguments.seed),
    )


def stock_lines(months: Sequence[str]) -> list[str]:
    """Say how old public stocks are."""
    when = ", ".join(months)
    return [f"public stocks are estimates of the end of {when}; nothing newer is complete"] if months else []


def no_evidence(detection: float | None, false_alarm: float) -> bool:
    """Return whether a detection, in closed form, is that of an honest world."""
    return detection is not None and detection <= false_alarm * (1 + 1e-9) + 1e-15


def columns_of(results: Sequence[RegimeResult]) -> dict[str, Any]:
    """Return what ``regimes_figure`` draws of the results."""
    from analysis.report.figures import RegimeColumn
    from analysis.report.style import setting

    first = results[0].scenario
    columns = [
        RegimeColumn(
            name=result.scenario.regime,
            detections=tuple(cell.detection for cell in result.cells),
            delays=tuple(cell.delay for cell in result.cells),
            worst=result.cells.index(result.worst),
            false_alarm=result.scenario.false_alarm(),
            inspectors=result.scenario.inspectors(result.scenario.inspection.samples_done()),
            cost=result.scenario.cost_per_year(),
        )
        for result in results
    ]
    note = setting(flop=first.rule.threshold_flop, chips=first.fleet.registered(), days=first.days)
    return {"strategies": [cell.strategy for cell in results[0].cells], "columns": columns, "note": note}
