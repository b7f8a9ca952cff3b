"""``campaign``: Monte Carlo over a fleet, every strategy of a scenario with its closed form."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands import _regimes
from analysis.commands._answers import fields_of, keys_text
from analysis.commands._brief import add_brief
from analysis.commands._campaign_answer import CampaignAnswer, StrategyRow, facts_of
from analysis.commands._campaign_text import campaign_lines
from analysis.commands._common import add_json, count, finish, plural, print_json
from analysis.commands._detection_options import campaign_note
from analysis.hidden_sites import KEYS
from analysis.parser import show_every_day
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

    from analysis.montecarlo import CampaignRow
    from inspector.campaign import Scenario
    from inspector.probability.uncertainty import Band

__all__ = ["register"]

_TRIALS = {"counts": 20_000, "agents": 2_000}

_KEYS = """
If no schedule reaches the scenario's confidence within the cap, rows is null, reason says why, and the exit code is 2.
With --list: scenarios (each: name, title, regimes).
With --show: name, toml.
With --keys: sections (each: path, header, text, keys (each: name, kind, default, text, span)), policies (each: name,
text, parameters).
"""
_SEVERAL = "With several regimes and no --regime"


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "campaign",
        description="Simulate inspections of a fleet against evasion strategies, and compare with theory.",
        epilog=keys_text(CampaignAnswer)
        + _KEYS
        + keys_text(_regimes.RegimesAnswer, "With several regimes and no --regime")
        + KEYS,
    )
    parser.add_argument("scenario", nargs="?", metavar="SCENARIO", help="a TOML file, or the name of a ready scenario")
    _add_lists(parser)
    parser.add_argument(
        "--regime",
        metavar="NAME",
        help="show this way of monitoring (regime) in full (default: compare all regimes of the scenario)",
    )
    _add_trials(parser)
    parser.add_argument(
        "--false-alarms",
        type=float,
        metavar="P",
        help=(
            "cap on the chance of accusing an honest lab, used when the needed samples are computed (default: the "
            "scenario's, else 0.01)"
        ),
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


def _add_trials(parser: ArgumentParser) -> None:
    """Add what says how a campaign is simulated."""
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
    parser.add_argument(
        "--confidence", type=float, default=0.95, metavar="P", help="confidence level of intervals (default 0.95)"
    )


def _add_lists(parser: ArgumentParser) -> None:
    """Add the options that list scenarios and their keys."""
    parser.add_argument("--list", action="store_true", help="list the built-in scenarios")
    parser.add_argument("--show", metavar="NAME", help="print a built-in scenario, as a start for your own")
    parser.add_argument(
        "--keys",
        nargs="?",
        const="all",
        metavar="SECTION",
        help="list the keys of scenario files with their defaults (all, or one section), and the known policies",
    )


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
    data = _answer(arguments, scenario, rows)
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


def _brief(arguments: argparse.Namespace, scenario: Scenario, data: CampaignAnswer) -> None:
    """Write two sides about the strategy that is caught least."""
    from analysis.commands._brief import campaign_brief

    rows, about = data.rows[1:], data.scenario
    none = [row.strategy for row in rows if _regimes.no_evidence(row.predicted, row.false_alarm)]
    guilty = [row for row in rows if not row.lawful_runs]
    if not guilty:
        raise CallerError("--brief is about violations, but no strategy of the scenario breaks the rule")
    worst = min(guilty, key=lambda row: row.detection.value)
    caught, band = worst.detection, worst.band
    known = "" if band is None or band.median is None else f"; {band.low:.4f} to {band.high:.4f} over its inputs"
    campaign_brief(
        arguments.brief,
        scenario,
        answer=[
            f"Caught least is {worst.strategy!r}: {caught.value:.4f} ({caught.low:.4f} to "
            f"{caught.high:.4f} in {arguments.trials:,} trials{known}).",
            f"An honest lab is accused with {about.false_alarm:.4f} by the same rule.",
            f"{about.samples_per_year:,} chips a year take {plural(about.inspectors, 'inspector')}.",
        ],
        strategy=worst.strategy,
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
        raise CallerError(f"there is no section {name!r}; known: {known}")
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
        note=campaign_note(fields_of(facts_of(scenario))),
        origin=Origin(command=_regimes.command_of(arguments, arguments.trials), seed=arguments.seed),
    )


def _answer(arguments: argparse.Namespace, scenario: Scenario, rows: list[CampaignRow]) -> CampaignAnswer:
    bands = _bands(arguments, scenario)
    return CampaignAnswer(
        scenario=facts_of(scenario),
        engine=arguments.engine,
        trials=arguments.trials,
        seed=arguments.seed,
        confidence=arguments.confidence,
        rows=[StrategyRow.of(scenario, row, bands.get(row.name), arguments.prior) for row in rows],
        uncertain={name: str(each) for name, each in scenario.uncertain.items()},
        draws=arguments.draws if scenario.uncertain else None,
        prior=arguments.prior,
    )


def _bands(arguments: argparse.Namespace, scenario: Scenario) -> Mapping[str, Band]:
    """Return what uncertain numbers of the scenario do to each closed form."""
    from tqdm import tqdm

    from inspector.campaign import detection_bands

    if not scenario.uncertain:
        return {}
    with tqdm(total=arguments.draws, unit="draw", disable=not sys.stderr.isatty(), leave=False) as bar:
        return detection_bands(
            scenario,
            _regimes.reopening(arguments, scenario),
            number=arguments.draws,
            seed=arguments.seed,
            progress=bar.update,
        )
