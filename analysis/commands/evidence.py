"""``evidence``: what others than chips see of a violation: alarms weighed together, hidden sites, jobs in parts."""

from __future__ import annotations

import argparse
import math
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands import _unmetered_work
from analysis.commands._common import add_json, count, finish, number, plural
from analysis.commands._detection_options import numbers
from analysis.commands._evidence_text import interval, site_lines, weigh_lines
from analysis.commands._hidden_sites import add_finding, add_hidden, finding_of, options_of
from analysis.hidden_sites import KEYS, described, sentence, target_json
from analysis.parser import show_every_day
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from inspector.campaign import Scenario
    from inspector.campaign.evidence import Sightings
    from inspector.probability.evidence import DecisionRule, Sources

__all__ = ["register"]

_READY = "evidence"

_WEIGH_KEYS = (
    """
JSON keys: scenario, strategy, hidden (its hidden sites: lab, site and the description), sources (name, found: chance to
find a hidden site, without false alarms, null for a source that looks for none; detection, evaded, false_alarm: chances
of an alarm; alarm_ratio and silence_ratio: factors on the odds of a violation, by this source alone, null if unbounded,
alarm_ratio_evaded, group, origin), dependence (share of common causes by group), cap, false_alarm (of the rule),
strategies (strategy, detection: chance of an accusation without evasions, evaded: with all of them), evasions (of the
chosen strategy: number, detection, and evades: the sources whose evasion is the most harmful), simulated (detection,
false_alarm: value, low, high and exact), trials, seed, confidence; with --alarm or --silent: observed (alarm, silent,
ratio and ratio_evaded: factors on the odds, null where unbounded, prior, posterior, posterior_evaded: null if neither
an honest nor a violating lab causes these alarms; accused).
"""
    + KEYS
)
_SITE_KEYS = (
    """
JSON keys: scenario, watts, days, age, sites, evaded, rows (chips; megawatts: power of the chips while the run lasts;
found: chance by source, without false alarms; any: chance by the rule; hidden: the description; all but chips are null
if the chips cannot do the run), rule (for any), false_alarm (0, by construction), origins (of each source).
"""
    + KEYS
)
_SPLIT_KEYS = (
    """
JSON keys: flop, node_chips, nodes (needed), chips (of all nodes), megawatts, days, hidden (the nodes as hidden sites),
found (chance that a source which looks for hidden sites finds a node), visits and draws (over the job), hit (chance
that a draw takes evidence of one given node), alone (chance of detection if each node is judged alone: 0 below the
threshold), linked (if nodes are compared), rule (for linked), false_alarm (0, by construction), simulated (value, low,
high), trials, seed, confidence.
"""
    + KEYS
)


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``evidence`` and its kinds."""
    text = "evidence beyond chips: alarms weighed together, hidden sites, jobs in parts"
    kinds = subparsers.add_parser("evidence", description=text).add_subparsers(
        dest="kind", required=True, metavar="KIND"
    )
    _add_weigh(kinds)
    _add_site(kinds)
    _add_split(kinds)
    _unmetered_work.register(kinds)


def _add_weigh(kinds: _SubParsersAction[ArgumentParser]) -> None:
    text = "what alarms and silence of several sources say together"
    weigh = kinds.add_parser(
        "weigh",
        help=text,
        description="Weighs alarms of power meters, taps, telemetry, satellites, tips, visits and books as likelihood "
        "ratios. The scenario states how they depend on each other. Finds an accusing rule within a cap on "
        "false alarms, and what evasions do to it, in closed form and by simulation. `campaign --show "
        "evidence` prints a file to start from.",
        epilog=_WEIGH_KEYS,
    )
    option = weigh.add_argument
    option("scenario", nargs="?", default=_READY, metavar="SCENARIO", help=f"file or ready scenario (default {_READY})")
    option("--regime", metavar="NAME", help="regime to use, if the scenario has several")
    option("--strategy", metavar="NAME", help="the violation (default: the scenario's first)")
    option("--alarm", action="append", default=[], metavar="SOURCE", help="this source gave an alarm (repeat)")
    option("--silent", action="append", default=[], metavar="SOURCE", help="no alarm from this source (repeat; or all)")
    option("--prior", type=float, default=0.1, metavar="Q", help="chance of a violation beforehand (default 0.1)")
    option("--false-alarms", type=float, metavar="P", help="cap of the rule (default: the scenario's)")
    option("--trials", type=count, default=20_000, metavar="N", help="of the simulation (default 20000)")
    option("--seed", type=count, default=0, metavar="S", help="of the simulation (default 0)")
    option("--confidence", type=float, default=0.95, metavar="P", help="of its intervals (default 0.95)")
    add_json(weigh)
    weigh.set_defaults(handler=_weigh)


def _add_site(kinds: _SubParsersAction[ArgumentParser]) -> None:
    text = "the chance to find an undeclared site, by its size, power and age"
    site = kinds.add_parser("site", help=text, description=text, epilog=_SITE_KEYS)
    option = site.add_argument
    option("scenario", nargs="?", default=_READY, metavar="SCENARIO", help=f"file or ready scenario (default {_READY})")
    add_finding(site, None)
    option("--chips", type=numbers, default=[1e2, 1e3, 1e4, 1e5, 1.4e5], metavar="C,...", help="chips at all sites")
    add_hidden(site, flop=None, days=120.0)
    option("--evade", action="store_true", help="the lab conceals as much power as the scenario allows")
    option("--out", type=Path, metavar="FIGURE", help="draw it (.png, .svg or .pdf)")
    add_json(site)
    show_every_day(site, "per-year at-megawatts chips flop days watts age sites evade out")
    site.set_defaults(handler=_site)


def _add_split(kinds: _SubParsersAction[ArgumentParser]) -> None:
    text = "a job cut into nodes below a threshold: how many, and who sees it"
    split = kinds.add_parser(
        "split",
        help=text,
        description="A job runs on nodes that are each too small to be judged alone. An inspector who compares the "
        "evidence of several nodes may recognise the job. By default a node has 16 H100. The efficiency "
        "over slow networks is assumed: 50 nodes then do 1e25 FLOP in a year and a half, a public estimate.",
        epilog=_SPLIT_KEYS,
    )
    option = split.add_argument
    add_hidden(split, flop=1e25, days=547.5, sites=False)
    option("--node-chips", type=count, default=16, metavar="N", help="chips of a node (default 16)")
    option("--efficiency", type=number, default=0.67, metavar="E", help="efficiency over slow networks (default 0.67)")
    add_finding(split, 0.3)
    option("--chips", type=count, default=100_000, metavar="C", help="chips to draw from, the nodes' too (default 1e5)")
    option("--samples", type=count, default=1_000, metavar="S", help="chips drawn at a visit (default 1000)")
    option("--period", type=number, default=30.0, metavar="TM", help="days between visits (default 30)")
    option("--rate", type=number, default=0.1, metavar="F", help="snapshots per chip and day (default 0.1)")
    option("--recognised", type=number, default=0.6, metavar="R", help="chance to recognise one job (default 0.6)")
    option("--trials", type=count, default=20_000, metavar="N", help="of the simulation (default 20000)")
    option("--seed", type=count, default=0, metavar="S", help="of the simulation (default 0)")
    option("--confidence", type=number, default=0.95, metavar="P", help="confidence of the interval (default 0.95)")
    add_json(split)
    show_every_day(split, "flop days node-chips efficiency per-year chips samples period rate recognised")
    split.set_defaults(handler=_split)


def _opened(name: str, regime: str | None = None) -> Scenario:
    from analysis.scenarios import open_scenario

    found = open_scenario(name, regime=regime)
    if not found.observations.each:
        raise CallerError(
            f"{name}: the scenario has no [[evidence]] here; campaign --show {_READY} prints one that has"
        )
    return found


def _weigh(arguments: argparse.Namespace) -> int:
    from dataclasses import replace

    scenario = _opened(arguments.scenario, arguments.regime)
    if arguments.false_alarms is not None:
        scenario = replace(scenario, observations=replace(scenario.observations, cap=arguments.false_alarms)).weighed()
    named = {strategy.name: scenario.plan(strategy) for strategy in scenario.strategies}
    chosen = arguments.strategy or scenario.strategies[0].name
    if chosen not in named:
        raise CallerError(f"no strategy {chosen!r}; known: {', '.join(named)}")
    rule = scenario.weighs
    assert rule is not None
    target = named[chosen].target
    every = {name: scenario.observations.of(plan.target) for name, plan in named.items()}
    sources, alone = every[chosen], scenario.observations.found(target)
    data: dict[str, Any] = {
        "scenario": arguments.scenario,
        "strategy": chosen,
        "hidden": target_json(target),
        "sources": [_source(each) | {"found": alone.get(each.name)} for each in sources.each],
        "dependence": dict(sources.shared),
        "cap": scenario.observations.cap,
        "false_alarm": rule.false_alarm,
        "strategies": [
            {"strategy": name, "detection": rule.detection(of), "evaded": rule.detection(of, ("all",))}
            for name, of in every.items()
        ],
        "evasions": [
            dict(zip(("detection", "evades"), rule.worst(sources, number), strict=True))
            for number in range(len(sources.each) + 1)
        ],
        "simulated": _simulated(arguments, sources, rule),
        "trials": arguments.trials,
        "seed": arguments.seed,
        "confidence": arguments.confidence,
        "observed": _observed(arguments, sources, rule),
    }
    return finish(arguments, data, weigh_lines(data))


def _source(each: Any) -> dict[str, Any]:
    return {
        "name": each.name,
        "detection": each.detection,
        "evaded": each.evaded,
        "false_alarm": each.false_alarm,
        "alarm_ratio": _finite(each.ratio(True)),
        "alarm_ratio_evaded": _finite(each.ratio(True, evaded=True)),
        "silence_ratio": _finite(each.ratio(False)),
        "group": each.group,
        "origin": each.origin,
    }


def _simulated(arguments: argparse.Namespace, sources: Sources, rule: DecisionRule) -> dict[str, Any]:
    """Return how often drawn alarms accuse, with intervals, and what the closed form says."""
    import numpy as np

    from inspector.campaign import clopper_pearson
    from inspector.campaign.checks import fraction, whole

    whole("trials", arguments.trials, 1)
    whole("seed", arguments.seed)
    fraction("confidence", arguments.confidence)
    rng = np.random.default_rng(arguments.seed)
    found = {}
    for name, evading, exact in (("detection", (), rule.detection(sources)), ("false_alarm", None, rule.false_alarm)):
        accused = int(rule.accused(sources.draw(arguments.trials, rng, evading=evading)).sum())
        low, high = clopper_pearson(accused, arguments.trials, arguments.confidence)
        found[name] = {"value": accused / arguments.trials, "low": low, "high": high, "exact": exact}
    return found


def _observed(arguments: argparse.Namespace, sources: Sources, rule: DecisionRule) -> dict[str, Any] | None:
    """Return what the alarms that were seen say; sources that were not named are left out."""
    import numpy as np

    from inspector.campaign.checks import probability

    probability("prior", arguments.prior)
    if not arguments.alarm and not arguments.silent:
        return None
    alarm = sources.among(arguments.alarm)
    silent = frozenset(sources.names) - alarm if "all" in arguments.silent else sources.among(arguments.silent)
    if both := sorted(alarm & silent):
        raise CallerError(f"{both[0]!r} gave an alarm and gave none")
    patterns = sources.patterns
    fits = np.ones(len(patterns), np.bool_)
    for place, name in enumerate(sources.names):
        if name in alarm or name in silent:
            fits &= patterns[:, place] == (name in alarm)
    honest = float(sources.honest()[fits].sum())
    found: dict[str, Any] = {"alarm": sorted(alarm), "silent": sorted(silent), "prior": arguments.prior}
    for suffix, evading in (("", ()), ("_evaded", ("all",))):
        guilty = float(sources.violation(evading)[fits].sum())
        weight = arguments.prior * guilty + (1 - arguments.prior) * honest
        found[f"ratio{suffix}"] = _finite(guilty / honest) if honest > 0 else None
        found[f"posterior{suffix}"] = arguments.prior * guilty / weight if weight > 0 else None
    complete = fits.sum() == 1 and (found["posterior"], found["posterior_evaded"]) != (None, None)
    found["accused"] = rule.accuses[int(np.flatnonzero(fits)[0])] if complete else None
    return found


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _site(arguments: argparse.Namespace) -> int:
    from inspector.campaign.evidence import Sightings

    if arguments.per_year is None:
        found = _opened(arguments.scenario).observations.each
    else:
        found = (Sightings(name="one source", finding=finding_of(arguments)),)
    looking = [each for each in found if isinstance(each, Sightings)]
    if not looking:
        raise CallerError(f"{arguments.scenario}: nothing there looks for undeclared sites (found_per_year)")
    if not 1 <= arguments.sites <= 1_000_000:
        raise CallerError(f"--sites must be between 1 and 1,000,000, not {arguments.sites}")
    data: dict[str, Any] = {"scenario": None if arguments.per_year is not None else arguments.scenario}
    data |= {name: getattr(arguments, name) for name in ("watts", "days", "age", "sites")}
    data |= {"evaded": arguments.evade, "rows": [_row(arguments, looking, chips) for chips in arguments.chips]}
    data |= {"rule": "by one source at least, taken as independent", "false_alarm": 0.0}
    data["origins"] = {each.name: each.origin for each in looking}
    if arguments.out is not None:
        _draw_site(arguments, looking)
    return finish(arguments, data, site_lines(data, [each.name for each in looking]))


def _row(arguments: argparse.Namespace, looking: Sequence[Sightings], chips: float) -> dict[str, Any]:
    """Return how likely sites with so many chips are found by each source; nulls where they cannot do the run."""
    from inspector.campaign.evidence import Target
    from inspector.probability.detection import ChipsTooFewError
    from inspector.probability.hidden_sites import HiddenSites

    about, flop = options_of(arguments), arguments.flop
    try:
        there = HiddenSites(held=chips, working=chips, **about)
        if flop is not None:
            there = HiddenSites.doing(flop, held=chips, **about)
    except ChipsTooFewError:
        return {"chips": chips, "megawatts": None, "found": None, "any": None, "hidden": None}
    target = Target(sites={("", ""): there})
    found = {each.name: each.found(target, evading=arguments.evade) for each in looking}
    any_ = 1.0 - math.prod(1.0 - chance for chance in found.values())
    return {"chips": chips, "megawatts": there.megawatts, "found": found, "any": any_, "hidden": described(there)}


def _draw_site(arguments: argparse.Namespace, looking: Sequence[Sightings]) -> None:
    import numpy as np

    from analysis.commands._detection_options import command_line
    from analysis.report.figures import Origin, found_figure

    ends = min(arguments.chips), max(arguments.chips)
    if not 0 < ends[0] < ends[1]:
        raise CallerError("--out needs --chips from a number above 0 to a larger one")
    chips = np.geomspace(*ends, 121)
    rows = [_row(arguments, looking, each)["found"] or {} for each in chips]
    own = arguments.per_year is not None
    rates = f"{arguments.per_year:g} a year" if own else f"scenario {Path(arguments.scenario).name}"
    work = (
        "all at work" if arguments.flop is None else f"{arguments.flop:.3g} FLOP at {arguments.utilisation:g} of peak"
    )
    found_figure(
        arguments.out,
        chips=chips,
        found={each.name: np.array([row.get(each.name, np.nan) for row in rows]) for each in looking},
        note=f"{plural(arguments.sites, 'site')}, {work}, T = {arguments.days:g} d after {arguments.age:g} d of "
        f"standing, {arguments.watts:g} W a chip{', evading' if arguments.evade else ''}; rates: {rates}",
        origin=Origin(command=command_line(arguments)),
    )


def _split(arguments: argparse.Namespace) -> int:
    import numpy as np

    from inspector.campaign import clopper_pearson
    from inspector.campaign.checks import fraction, positive, probability, whole
    from inspector.probability.detection import snapshot_probability
    from inspector.probability.hidden_sites import HiddenSites, draw_linked, linked, parts_needed

    whole("trials", arguments.trials, 1)
    whole("samples", arguments.samples)
    whole("chips", arguments.chips, 1)
    fraction("confidence", arguments.confidence)
    positive("period", arguments.period)
    positive("efficiency", arguments.efficiency)
    probability("efficiency", arguments.efficiency)
    about = options_of(arguments) | {"utilisation": arguments.utilisation * arguments.efficiency}
    work = {name: about[name] for name in ("days", "utilisation", "flop_per_day")}
    nodes = parts_needed(flop=arguments.flop, chips=arguments.node_chips, **work)
    chips = nodes * arguments.node_chips
    if chips > arguments.chips:
        raise CallerError(f"{nodes:,} nodes of {arguments.node_chips} chips are more than --chips {arguments.chips:,}")
    there = HiddenSites.doing(arguments.flop, held=chips, sites=nodes, **about)
    window = min(arguments.period, arguments.days)
    seen = float(snapshot_probability(rate=arguments.rate, days=window))
    hit = arguments.node_chips / arguments.chips * seen
    visits = max(1, int(arguments.days / arguments.period))
    draws = arguments.samples * visits
    rng = np.random.default_rng(arguments.seed)
    job: dict[str, Any] = {"nodes": nodes, "hit": hit, "draws": draws, "recognised": arguments.recognised}
    exact = float(linked(**job))
    known = int(draw_linked(**job, trials=arguments.trials, rng=rng).sum())
    low, high = clopper_pearson(known, arguments.trials, arguments.confidence)
    data = {
        "flop": arguments.flop,
        "node_chips": arguments.node_chips,
        "nodes": nodes,
        "chips": chips,
        "megawatts": there.megawatts,
        "days": arguments.days,
        "hidden": described(there),
        "found": finding_of(arguments).found(there),
        "visits": visits,
        "draws": draws,
        "hit": hit,
        "alone": 0.0,
        "linked": exact,
        "rule": "evidence of two nodes is drawn, and known for one job's",
        "false_alarm": 0.0,
        "simulated": {"value": known / arguments.trials, "low": low, "high": high},
        "trials": arguments.trials,
        "seed": arguments.seed,
        "confidence": arguments.confidence,
    }
    return finish(
        arguments,
        data,
        [
            f"{plural(nodes, 'node')} of {arguments.node_chips} chips ({data['chips']:,} chips, "
            f"{data['megawatts']:.3g} MW) do {arguments.flop:.3g} FLOP in {arguments.days:g} days.",
            f"{sentence(data['hidden'])}.",
            f"{plural(visits, 'visit')} of whole periods draw {draws:,} chips over the job from {arguments.chips:,}: "
            f"each takes evidence of a given node with probability {hit:.3g}.",
            "Judged alone, each node stays below the threshold: 0.0000",
            f"Compared over nodes ({data['rule']}): {exact:.4f} (simulated {interval(data['simulated'])} in "
            f"{arguments.trials:,} trials, seed {arguments.seed})",
            f"Some node found from outside, at {arguments.per_year:g} a year of {arguments.at_megawatts:g} MW: "
            f"{data['found']:.4f}. That says nothing of the job where nodes so small need not be declared.",
            "By construction honest labs have no parts of such a job, so none is linked by mistake.",
        ],
    )
