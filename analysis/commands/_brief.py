"""Two sides for people who decide: the question and its answer, then what it rests on and what it does not cover."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import plural
from firmware_sim.errors import CallerError, file_error

if TYPE_CHECKING:
    from analysis.commands._influences import UncertainAnswer
    from analysis.commands._plan_answer import PlanAnswer
    from inspector.campaign import Scenario

__all__ = ["add_brief", "campaign_brief", "plan_brief", "write_brief"]

_MOST = 3
"""Assumptions that are named, those that matter most."""

Swing = tuple[str, str, str]
"""An assumption, and the answer at its lower and at its higher end."""


def add_brief(parser: argparse.ArgumentParser) -> None:
    """Add ``--brief``."""
    parser.add_argument(
        "--brief",
        type=_markdown,
        metavar="FILE",
        help="write a two-page brief for decision-makers (.md): question, answer with its band, the three assumptions "
        "that matter most, what it does not cover",
    )


def _markdown(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".md":
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .md")
    return path


def write_brief(
    path: Path,
    *,
    title: str,
    question: str,
    answer: Iterable[str],
    swings: Sequence[Swing],
    uncovered: Iterable[str],
    command: str,
) -> None:
    """Write the two sides.

    Args:
        path: of the file; one that is there is replaced.
        title, question: one line each.
        answer: lines of text, with the band.
        swings: the assumptions, strongest first; more than three are left out.
        uncovered: what the answer says nothing about, a line each.
        command: that prints the figures again.

    Raises:
        CallerError: the file cannot be written.
    """
    text = [f"# {title}", "", "## The question", "", question, "", "## The answer", "", *(f"- {a}" for a in answer), ""]
    text += ["## What it rests on most", ""]
    if swings:
        text += ["| assumption | answer at its lower end | answer at its higher end |", "|---|---|---|"]
        text += [f"| {' | '.join(each)} |" for each in swings[:_MOST]]
    else:
        text += ["No assumption moves the answer."]
    text += ["", "## What it does not cover", "", *(f"- {each}" for each in uncovered), "", f"Again: `{command}`", ""]
    try:
        path.write_text("\n".join(text), encoding="utf-8")
    except OSError as error:
        raise file_error(f"cannot write {path}", error) from None


def plan_brief(path: Path, answer: PlanAnswer, uncertain: UncertainAnswer | None, command: str) -> None:
    """Write two sides about a plan with a sensitivity or, of uncertain inputs, a tornado."""
    about, work, unit = answer.parameters, answer.work, answer.money or "in the unit of the prices"
    low: float | None
    high: float | None
    if uncertain is None:
        rows = [(f"{r.parameter} (halved, doubled)", r.lower, r.higher) for r in (answer.sensitivity or ())[:_MOST]]
        factors = [1.0, *(each for row in rows for each in row[1:] if not math.isnan(each))]
        low, high, scale = min(factors) * work, max(factors) * work, work
        known = "where one of the three below is halved or doubled"
    else:
        rows = [(f"{r.parameter} (5 %, 95 %)", r.low, r.high) for r in uncertain.tornado]
        low, high, scale = uncertain.bands["work"].low, uncertain.bands["work"].high, 1.0
        known = "over the uncertain inputs (5 % to 95 %)"
    swings = [(name, _chips(least, scale), _chips(most, scale)) for name, least, most in rows]
    lines = [
        f"Inspect {answer.samples_per_year:,} chips a year at {plural(len(about.sites), 'site')}: "
        f"{plural(answer.inspectors, 'inspector')} at {answer.inspector_load:,.0f} chips' work a year.",
        f"That is work for {_chips(work)}; {_chips(low)} to {_chips(high)} {known}.",
        f"Such a run is then caught with {answer.detection:.3f}. An honest lab is accused with "
        f"{answer.false_alarm:.4f} at most by the same rule; the excess is {answer.excess:.3f}.",
        f"A run may be noticed {answer.noticed_within_days:g} days after it begins.",
    ]
    if answer.cost_band is not None:
        low, high = answer.cost_band.low, answer.cost_band.high
        lines.append(f"It costs {answer.cost:,.0f} ({low:,.0f} to {high:,.0f}) a year, {unit}.")
    slow = answer.lab.slowdown
    lines.append(f"A monitored step takes {slow.low:.2g} to {slow.high:.2g} times as long.")
    write_brief(
        path,
        title="A schedule of inspections",
        question=f"What does it take to catch a training run of {answer.guaranteed_flop:.3g} FLOP with "
        f"{about.confidence:g}, and to accuse an honest lab with {about.false_alarms:g} at most?",
        answer=lines,
        swings=swings,
        uncovered=[
            f"Evasions other than {', '.join(each.evasion for each in answer.responses)}.",
            *(["A lab that refuses drawn chips with evidence while that is tolerated."] if answer.not_covered else []),
            "Chips at no site of the plan: evidence unmetered and evidence site are about those.",
            f"Runs between {about.flop:.3g} and {answer.guaranteed_flop:.3g} FLOP, which leave less evidence.",
            *([f"What was bought since {answer.stocks_as_of}."] if answer.stocks_as_of else []),
        ],
        command=command,
    )


def _chips(value: float | None, scale: float = 1.0) -> str:
    return "no schedule" if value is None or math.isnan(value) else f"{float(f'{value * scale:.3g}'):,.0f} chips a year"


def _swings(scenario: Scenario, strategy: str, reopened: Callable[[Mapping[str, float]], Scenario]) -> list[Swing]:
    """Return how the closed form of a strategy moves with each assumption alone, strongest first.

    An uncertain number is taken at its 5 % and 95 %; an assumed detection rate is halved, and doubled up to 1.

    Args:
        scenario: at the medians.
        strategy: its name.
        reopened: makes the scenario of values by dotted key.
    """
    from inspector.campaign import predict

    def caught(one: Scenario) -> float | None:
        try:
            (found,) = (each for each in one.strategies if each.name == strategy)
            return predict(one.plan(found)).detection
        except CallerError:
            return None

    def rated(lie: str, factor: float) -> Scenario:
        rate = min(1.0, scenario.rates.assumed[lie] * factor)
        rates = dataclasses.replace(scenario.rates, assumed={**scenario.rates.assumed, lie: rate})
        return dataclasses.replace(scenario, rates=rates)

    ends: dict[str, tuple[float | None, ...]] = {}
    for name, each in scenario.uncertain.items():
        pair = (_or_none(reopened, {name: float(each.ppf(share))}) for share in (0.05, 0.95))
        ends[f"{name} (5 %, 95 %)"] = tuple(None if one is None else caught(one) for one in pair)
    for lie in scenario.rates.assumed:
        ends[f"detection of {lie} (halved, doubled)"] = (caught(rated(lie, 0.5)), caught(rated(lie, 2.0)))
    middle = caught(scenario) or 0.0

    def size(pair: tuple[float | None, ...]) -> float:
        there = [middle, *(value for value in pair if value is not None)]
        return max(there) - min(there)

    order = sorted((name for name in ends if size(ends[name]) > 1e-9), key=lambda name: -size(ends[name]))
    shown = {name: ["-" if value is None else f"{value:.4f}" for value in ends[name]] for name in order}
    return [(name, low, high) for name, (low, high) in shown.items()]


def _or_none(reopened: Callable[[Mapping[str, float]], Scenario], at: Mapping[str, float]) -> Scenario | None:
    try:
        return reopened(at)
    except CallerError:
        return None


def campaign_brief(
    path: Path,
    scenario: Scenario,
    *,
    answer: Iterable[str],
    strategy: str,
    reopened: Callable[[Mapping[str, float]], Scenario],
    silent: Sequence[str],
    command: str,
) -> None:
    """Write two sides about a campaign or regimes; the assumptions are those of ``strategy`` in ``scenario``.

    ``silent`` names strategies that are caught no more often than the honest are accused.
    """
    swings = _swings(scenario, strategy, reopened)
    ends = sorted(each for row in swings[:_MOST] for each in row[1:] if each != "-")
    band = f" It is {ends[0]} to {ends[-1]} where one of them is at its end." if ends else ""
    write_brief(
        path,
        title=scenario.title,
        question=f"How often is a run above {scenario.rule.threshold_flop:.3g} FLOP caught within {scenario.days:g} "
        "days, whichever way of the file the lab takes, and how often is an honest lab accused?",
        answer=[*answer, f"The assumptions below are those of {strategy!r}, by the file's keys.{band}"],
        swings=swings,
        uncovered=[
            f"Ways to break the rule other than the {len(scenario.strategies)} of the file.",
            *(f"{name!r}: it is caught no more often than honest labs are accused." for name in silent),
            "Errors in the file's rates that hold for several at once: each is moved alone.",
            *(f"What was bought since {month}." for month in scenario.fleet.months()[-1:]),
        ],
        command=command,
    )
