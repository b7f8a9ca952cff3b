"""``campaign``: Monte Carlo over a fleet, every strategy of a scenario with its closed form."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands import _regimes
from analysis.commands._brief import add_brief
from analysis.commands._campaign_text import campaign_lines
from analysis.commands._common import add_json, count, finish, plural, print_json
from analysis.commands._detection_options import campaign_note
from analysis.commands._uncertainty import banded
from analysis.hidden_sites import KEYS, target_json
from analysis.parser import show_every_day
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

    from analysis.montecarlo import CampaignRow, Estimate
    from inspector.campaign import Scenario

__all__ = ["register"]

_TRIALS = {"counts": 20_000, "agents": 2_000}

_KEYS = """
JSON keys: scenario (title, threshold_flop, period_days, snapshot_rate, days, periods, registered_chips, stocks_as_of:
months of the public stocks that are used, samples_per_period, samples_per_year, inspectors (whole ones), cost_per_year,
money (currency and year or null), wanted, refusals_allowed, false_alarm: exact chance of an accusation if all labs are
honest, false_alarms: its cap), engine, trials, seed, confidence, rows. Each row: strategy ("honest": no lab violates
anything, so a detection is a false alarm), detection and miss (value, low, high, method), false_alarm (as above, for
this row's days), excess (detection less false alarm: value, low, high), predicted (closed form of detection or null),
predicted_excess, predicted_log_miss (natural logarithm, null if there is none or detection is certain), prediction
(which law), completed (share of trials that finished unseen), days_to_detection (10 %, 50 %, 90 % quantiles over the
trials that were caught, or null), median_interval (interval of the 50 % quantile), in_time (the part of detection
before the run ends; null if the lab reacts to inspections), involved_chips (registered), hidden_chips (outside the
registry), samples_needed (samples a period that reach the wanted probability within the cap on false alarms, or null),
refusals_needed (refusals tolerated then), needed_reason (why no number is enough, or null), inspectors_needed,
measured_lies, assumed_lies, lawful_runs (runs of at most threshold_flop, which are no violation), band (closed form
over draws of the scenario's uncertain numbers: low, median, high, and possible: the share of draws with an answer; null
without such numbers), posterior (with --prior: chance of a violation after an accusation and after a pass, and
likelihood_ratio of an accusation; null if the verdict never occurs), hidden (its hidden sites: lab, site and the
description), evidence (beyond chips; accused: exact chance of an accusation by its rule alone, at the end of the days,
found: chance by each source that looks for hidden sites, without false alarms and evasions, and the evasions of the
strategy; null without such evidence). Further keys: prior, uncertain (the file's distributions by key) and draws (null
without). If no schedule reaches the scenario's confidence within the cap, rows is null, reason says why, and the exit
code is 2. With --list: scenarios (name, title, regimes); with --show: name, toml; with --keys: sections (path, header,
text, keys: name, kind, default, text, span) and policies (name, text, parameters).
"""


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "campaign",
        description="Simulate inspections of a fleet against evasion strategies, and compare with theory.",
        epilog=_KEYS + _regimes.KEYS + KEYS,
    )
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help="a TOML file, or the name of a ready scenario")
    parser.add_argument("--list", action="store_true", help="list the ready scenarios")
    parser.add_argument("--show", metavar="NAME", help="print a ready scenario, to start one of your own from")
    parser.add_argument(
        "--keys",
        nargs="?",
        const="all",
        metavar="SECTION",
        help="list the keys of scenario files with their defaults, or those of one section, and the policies",
    )
    parser.add_argument(
        "--regime", metavar="NAME", help="one of the scenario's regimes in full (default: all of them side by side)"
    )
    parser.add_argument(
        "--trials",
        type=count,
        metavar="N",
        help="trials per strategy (default 20000; 2000 with --engine agents or several regimes)",
    )
    parser.add_argument("--seed", type=count, default=0, metavar="S", help="seed of all random draws (default 0)")
    parser.add_argument(
        "--engine", choices=("agents", "counts"), default="counts", help="chip by chip, or aggregated (default)"
    )
    parser.add_argument("--confidence", type=float, default=0.95, metavar="P", help="of the intervals (default 0.95)")
    parser.add_argument(
        "--false-alarms",
        type=float,
        metavar="P",
        help="cap on the chance of accusing honest labs, for proposed sizes (default: the scenario's, else 0.01)",
    )
    parser.add_argument(
        "--prior",
        type=float,
        metavar="Q",
        help="chance of a violation beforehand; also print the chance after each verdict",
    )
    parser.add_argument("--out", metavar="FIGURE", help="draw the strategies side by side (.png, .svg or .pdf)")
    parser.add_argument(
        "--draws", type=count, default=100, metavar="N", help="draws of the scenario's uncertain numbers (default 100)"
    )
    add_brief(parser)
    add_json(parser)
    show_every_day(parser, "list show keys regime trials seed engine prior out draws brief")
    parser.set_defaults(handler=_campaign)


def _campaign(arguments: argparse.Namespace) -> int:
    if arguments.keys is not None:
        return _keys(arguments)
    if arguments.list or arguments.show is not None:
        if arguments.scenario is not None:
            raise CallerError(f"{'--list' if arguments.list else '--show NAME'} takes no scenario")
        return _list(arguments) if arguments.list else _show(arguments)
    scenarios = _asked(arguments)
    if len(scenarios) > 1:
        return _regimes.side_by_side(arguments, scenarios)
    if arguments.trials is None:
        arguments.trials = _TRIALS[arguments.engine]
    (scenario,) = scenarios
    rows = _simulate(arguments, scenario)
    if arguments.out is not None:
        _draw(arguments, scenario, rows)
    data = _document(arguments, scenario, rows)
    _add_evidence(scenario, data)
    _add_bands(arguments, scenario, data)
    _add_posteriors(arguments, data)
    if arguments.brief is not None:
        _brief(arguments, scenario, data)
    return finish(arguments, data, campaign_lines(data))


def _asked(arguments: argparse.Namespace) -> Sequence[Scenario]:
    """The scenario's regimes, once the other options are known to be sound; with ``--json`` says why there are none."""
    from inspector.campaign import NoScheduleError
    from inspector.campaign.checks import probability

    if arguments.scenario is None:
        raise CallerError("name a scenario, or use --list")
    if arguments.out is not None:
        _check_figure(Path(arguments.out))
    if arguments.prior is not None:
        probability("prior", arguments.prior)
    try:
        return _opened(arguments)
    except NoScheduleError as error:
        if arguments.json:
            print_json({"rows": None, "reason": str(error)})
        raise


def _brief(arguments: argparse.Namespace, scenario: Scenario, data: dict[str, Any]) -> None:
    """Write two sides about the strategy that is caught least."""
    from analysis.commands._brief import campaign_brief

    rows, about = data["rows"][1:], data["scenario"]
    none = [row["strategy"] for row in rows if _regimes.no_evidence(row["predicted"], row["false_alarm"])]
    guilty = [row for row in rows if not row["lawful_runs"]]
    if not guilty:
        raise CallerError("--brief is about violations, and no strategy of the scenario breaks the rule")
    worst = min(guilty, key=lambda row: row["detection"]["value"])
    caught, band = worst["detection"], worst["band"]
    known = "" if not band or band["median"] is None else f"; {band['low']:.4f} to {band['high']:.4f} over its inputs"
    campaign_brief(
        arguments.brief,
        scenario,
        answer=[
            f"Caught least is {worst['strategy']!r}: {caught['value']:.4f} ({caught['low']:.4f} to "
            f"{caught['high']:.4f} in {arguments.trials:,} trials{known}).",
            f"An honest lab is accused with {about['false_alarm']:.4f} by the same rule.",
            f"{about['samples_per_year']:,} chips a year take {plural(about['inspectors'], 'inspector')}.",
        ],
        strategy=worst["strategy"],
        reopened=_regimes.reopening(arguments, scenario),
        silent=none,
        command=_regimes.command_of(arguments, arguments.trials),
    )


def _opened(arguments: argparse.Namespace) -> Sequence[Scenario]:
    """Return every regime of the scenario, or the one that ``--regime`` names."""
    from analysis.scenarios import open_regimes, open_scenario

    name, cap = arguments.scenario, arguments.false_alarms
    if arguments.regime is not None:
        return [open_scenario(name, regime=arguments.regime, false_alarms=cap)]
    return open_regimes(name, false_alarms=cap)


def _check_figure(path: Path) -> None:
    """Refuse before hours of simulation what could not be drawn after them."""
    from analysis.report.style import FORMATS

    if path.suffix[1:].lower() not in FORMATS:
        raise CallerError(f"figure {path}: the extension must be .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise CallerError(f"figure {path}: no such folder")


def _show(arguments: argparse.Namespace) -> int:
    from analysis.scenarios import scenario_text

    text = scenario_text(arguments.show)
    return finish(arguments, {"name": arguments.show, "toml": text}, text.rstrip("\n").split("\n"))


def _keys(arguments: argparse.Namespace) -> int:
    """Print what a scenario file may hold."""
    import dataclasses

    from analysis.report.tables import aligned
    from inspector.campaign.schema import SECTIONS, policy_pages

    name = arguments.keys
    found = [each for each in SECTIONS if name == "all" or each.path == name or each.path.startswith(f"{name}.")]
    policies = policy_pages() if name in ("all", "strategy", "policies") else ()
    if not found and not policies:
        known = ", ".join([*(each.path for each in SECTIONS if each.path), "policies"])
        raise CallerError(f"no section {name!r}; known: {known}")
    lines: list[str] = []
    for section in found:
        lines += [f"{section.header}: {section.text}"]
        rows = [[f"  {key.name}", key.kind, key.default or "-", key.text] for key in section.keys]
        lines += [*aligned(rows, left=4), ""]
    for policy in policies:
        given = ", ".join(key if value is None else f"{key} = {value}" for key, value in policy.parameters.items())
        lines.append(f'policy = "{policy.name}"{", " if given else ""}{given}: {policy.text}')
    data = {
        "sections": [dataclasses.asdict(section) for section in found],
        "policies": [dataclasses.asdict(policy) for policy in policies],
    }
    return finish(arguments, data, lines)


def _list(arguments: argparse.Namespace) -> int:
    from analysis.scenarios import open_regimes, ready_scenarios

    scenarios = [
        {"name": name, "title": found[0].title, "regimes": [each.regime for each in found if each.regime]}
        for name in ready_scenarios()
        for found in (open_regimes(name),)
    ]
    width = max(len(entry["name"]) for entry in scenarios)
    return finish(
        arguments, {"scenarios": scenarios}, (f"{entry['name']:{width}}  {entry['title']}" for entry in scenarios)
    )


def _simulate(arguments: argparse.Namespace, scenario: Scenario) -> list[CampaignRow]:
    from tqdm import tqdm

    from analysis.montecarlo import TrialEngine, run_campaign

    total = arguments.trials * (len(scenario.strategies) + 1)
    with tqdm(total=total, unit="trial", disable=not sys.stderr.isatty(), leave=False) as bar:
        return run_campaign(
            scenario,
            arguments.trials,
            arguments.seed,
            engine=TrialEngine(arguments.engine),
            confidence=arguments.confidence,
            progress=bar.update,
        )


def _draw(arguments: argparse.Namespace, scenario: Scenario, rows: list[CampaignRow]) -> None:
    from analysis.report.figures import EvasionBar, Origin, evasion_figure

    evasion_figure(
        arguments.out,
        estimates=[
            EvasionBar(
                name=row.name,
                value=row.detection.value,
                low=row.detection.low,
                high=row.detection.high,
                closed_form=row.predicted.detection,
            )
            for row in rows
        ],
        confidence=scenario.wanted,
        interval=f"{100 * arguments.confidence:g}% interval",
        title=scenario.title,
        note=campaign_note(_about(scenario)),
        origin=Origin(command=_regimes.command_of(arguments, arguments.trials), seed=arguments.seed),
    )


def _add_posteriors(arguments: argparse.Namespace, data: dict[str, Any]) -> None:
    """Add what an accusation and a pass say about each strategy, for the prior that the caller states."""
    import math

    from inspector.probability.alarms import likelihood_ratio, posterior

    data["prior"] = arguments.prior
    for row in data["rows"]:
        row["posterior"] = None
        if arguments.prior is None or row["strategy"] == "honest":
            continue
        caught = row["detection"]["value"] if row["predicted"] is None else row["predicted"]
        both: dict[str, Any] = {"detection": caught, "false_alarm": row["false_alarm"]}
        found = {
            "accused": posterior(prior=arguments.prior, **both),
            "passed": posterior(prior=arguments.prior, **both, accused=False),
            "likelihood_ratio": likelihood_ratio(**both),
        }
        row["posterior"] = {name: float(value) if math.isfinite(value) else None for name, value in found.items()}


def _add_evidence(scenario: Scenario, data: dict[str, Any]) -> None:
    """Add each strategy's hidden sites, and what evidence beyond chips alone makes of it; null where there is none."""
    strategies = {strategy.name: strategy for strategy in scenario.strategies}
    for row in data["rows"]:
        row |= {"hidden": [], "evidence": None}
        if (strategy := strategies.get(row["strategy"])) is None:
            continue
        plan = scenario.plan(strategy)
        row["hidden"] = target_json(plan.target)
        if plan.weighing is not None:
            row["evidence"] = {
                "accused": plan.weighing.probability(),
                "found": scenario.observations.found(plan.target),
                "evades": list(strategy.evades),
            }


def _add_bands(arguments: argparse.Namespace, scenario: Scenario, data: dict[str, Any]) -> None:
    """Add what uncertain numbers of the scenario do to each closed form."""
    from tqdm import tqdm

    from inspector.campaign import detection_bands

    bands = {}
    if scenario.uncertain:
        with tqdm(total=arguments.draws, unit="draw", disable=not sys.stderr.isatty(), leave=False) as bar:
            bands = detection_bands(
                scenario,
                _regimes.reopening(arguments, scenario),
                number=arguments.draws,
                seed=arguments.seed,
                progress=bar.update,
            )
    for row in data["rows"]:
        row["band"] = banded(bands[row["strategy"]]) if row["strategy"] in bands else None
    data["uncertain"] = {name: str(each) for name, each in scenario.uncertain.items()}
    data["draws"] = arguments.draws if scenario.uncertain else None


def _document(arguments: argparse.Namespace, scenario: Scenario, rows: list[CampaignRow]) -> dict[str, Any]:
    return {
        "scenario": _about(scenario),
        "engine": arguments.engine,
        "trials": arguments.trials,
        "seed": arguments.seed,
        "confidence": arguments.confidence,
        "rows": [_row(scenario, row) for row in rows],
    }


def _about(scenario: Scenario) -> dict[str, Any]:
    import math

    inspection = scenario.inspection
    samples = inspection.samples_done()
    return {
        "title": scenario.title,
        "threshold_flop": scenario.rule.threshold_flop,
        "period_days": inspection.period_days,
        "snapshot_rate": inspection.snapshot_rate,
        "days": scenario.days,
        "periods": scenario.honest().periods,
        "registered_chips": scenario.fleet.registered(),
        "stocks_as_of": list(scenario.fleet.months()),
        "samples_per_period": samples,
        "samples_per_year": math.ceil(samples * 365 / inspection.period_days),
        "inspectors": scenario.inspectors(samples),
        "cost_per_year": scenario.cost_per_year(),
        "money": scenario.money or None,
        "wanted": scenario.wanted,
        "refusals_allowed": inspection.refusals_allowed,
        "false_alarm": scenario.false_alarm(),
        "false_alarms": scenario.false_alarms,
    }


def _row(scenario: Scenario, row: CampaignRow) -> dict[str, Any]:
    import math

    log_miss, sizing = row.predicted.log_miss, row.sizing
    samples = None if sizing is None else sizing.samples
    return {
        "strategy": row.name,
        "detection": _interval(row.detection),
        "miss": _interval(row.miss),
        "false_alarm": row.false_alarm,
        "excess": dict(zip(("value", "low", "high"), row.excess, strict=True)),
        "predicted": row.predicted.detection,
        "predicted_excess": row.predicted_excess,
        "predicted_log_miss": None if log_miss is None or math.isinf(log_miss) else log_miss,
        "prediction": row.predicted.reason,
        "completed": row.completed,
        "days_to_detection": None if row.days_to_detection is None else list(row.days_to_detection),
        "median_interval": None if row.median_interval is None else list(row.median_interval),
        "in_time": row.in_time,
        "involved_chips": row.involved_chips,
        "hidden_chips": row.hidden_chips,
        "samples_needed": samples,
        "refusals_needed": None if sizing is None else sizing.refusals_allowed,
        "needed_reason": (sizing.reason or None) if sizing else None,
        "inspectors_needed": None if samples is None else scenario.inspectors(samples),
        "measured_lies": list(row.measured_lies),
        "assumed_lies": list(row.assumed_lies),
        "lawful_runs": list(row.lawful_runs),
    }


def _interval(estimate: Estimate) -> dict[str, Any]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high, "method": estimate.method}
