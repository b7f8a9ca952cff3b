"""``evidence``: what others than chips see of a violation: alarms weighed together, hidden sites, jobs in parts."""

from __future__ import annotations

import argparse
import math
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands import _unmetered_work
from analysis.commands._answers import keys_text
from analysis.commands._common import add_json, count, finish, number, plural
from analysis.commands._detection_options import numbers
from analysis.commands._evidence_answers import (
    Evasion,
    ExactRate,
    Rate,
    Simulated,
    SiteRow,
    SitesAnswer,
    SourceRow,
    SplitAnswer,
    Way,
    WeighAnswer,
)
from analysis.commands._evidence_text import site_lines, split_lines, weigh_lines
from analysis.commands._hidden_sites import add_finding, add_hidden, finding_of, options_of
from analysis.hidden_sites import KEYS, described, target_json
from analysis.parser import show_every_day
from firmware_sim.errors import CallerError
from inspector.probability.tolerances import finite

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from inspector.campaign import Scenario
    from inspector.campaign.evidence import Sightings
    from inspector.probability.evidence import AlarmSource, DecisionRule, Observed, Sources

__all__ = ["register"]

_READY = "evidence"


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
        description="Weighs, as likelihood ratios, alarms from power meters, network taps, telemetry, satellites, "
        "tips, visits and accounts. The scenario states how they depend on each other. Finds a rule for accusing a "
        "lab that keeps false alarms below a cap, and computes how evasions weaken it, in closed form and by "
        "simulation. `campaign --show evidence` prints a file to start from.",
        epilog=keys_text(WeighAnswer) + KEYS,
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
    site = kinds.add_parser("site", help=text, epilog=keys_text(SitesAnswer) + KEYS)
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
    text = "a job split into parts below a threshold: how many parts, and who would notice"
    split = kinds.add_parser(
        "split",
        help=text,
        description="A job runs on nodes that are each too small to be judged alone. An inspector who compares the "
        "evidence of several nodes may recognise the job. By default a node has 16 H100. The efficiency "
        "over slow networks is assumed: 50 nodes then do 1e25 FLOP in a year and a half, a public estimate.",
        epilog=keys_text(SplitAnswer) + KEYS,
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
            f"{name}: the scenario has no [[evidence]] here; `campaign --show {_READY}` prints one that has"
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
    found = WeighAnswer(
        scenario=arguments.scenario,
        strategy=chosen,
        hidden=target_json(target),
        sources=[_source(each, alone.get(each.name)) for each in sources.each],
        dependence=dict(sources.shared),
        cap=scenario.observations.cap,
        false_alarm=rule.false_alarm,
        strategies=[
            Way(strategy=name, detection=rule.detection(of), evaded=rule.detection(of, ("all",)))
            for name, of in every.items()
        ],
        evasions=[
            Evasion(detection=detection, evades=evades)
            for detection, evades in (rule.worst(sources, number) for number in range(len(sources.each) + 1))
        ],
        simulated=_simulated(arguments, sources, rule),
        trials=arguments.trials,
        seed=arguments.seed,
        confidence=arguments.confidence,
        observed=_observed(arguments, sources, rule),
    )
    return finish(arguments, found, weigh_lines(found))


def _source(each: AlarmSource, found: float | None) -> SourceRow:
    return SourceRow(
        name=each.name,
        detection=each.detection,
        evaded=each.evaded,
        false_alarm=each.false_alarm,
        alarm_ratio=finite(each.ratio(True)),
        alarm_ratio_evaded=finite(each.ratio(True, evaded=True)),
        silence_ratio=finite(each.ratio(False)),
        group=each.group,
        origin=each.origin,
        found=found,
    )


def _simulated(arguments: argparse.Namespace, sources: Sources, rule: DecisionRule) -> Simulated:
    """Return how often drawn alarms accuse, with intervals, and what the closed form says."""
    import numpy as np

    from inspector.campaign import clopper_pearson
    from inspector.campaign.checks import fraction, whole

    whole("trials", arguments.trials, 1)
    whole("seed", arguments.seed)
    fraction("confidence", arguments.confidence)
    rng = np.random.default_rng(arguments.seed)

    def rate(evading: tuple[str, ...] | None, exact: float) -> ExactRate:
        accused = int(rule.accused(sources.draw(arguments.trials, rng, evading=evading)).sum())
        low, high = clopper_pearson(accused, arguments.trials, arguments.confidence)
        return ExactRate(value=accused / arguments.trials, low=low, high=high, exact=exact)

    return Simulated(detection=rate((), rule.detection(sources)), false_alarm=rate(None, rule.false_alarm))


def _observed(arguments: argparse.Namespace, sources: Sources, rule: DecisionRule) -> Observed | None:
    """Return what the alarms that were seen say; None where none were named."""
    from inspector.campaign.checks import probability

    probability("prior", arguments.prior)
    if not arguments.alarm and not arguments.silent:
        return None
    alarm = sources.among(arguments.alarm)
    silent = frozenset(sources.names) - alarm if "all" in arguments.silent else sources.among(arguments.silent)
    if both := sorted(alarm & silent):
        raise CallerError(f"{both[0]!r} cannot both have given an alarm and have given none")
    return rule.observed(sources, alarm, silent, arguments.prior)


def _site(arguments: argparse.Namespace) -> int:
    from inspector.campaign.evidence import Sightings

    if arguments.per_year is None:
        found = _opened(arguments.scenario).observations.each
    else:
        found = (Sightings(name="one source", finding=finding_of(arguments)),)
    looking = [each for each in found if isinstance(each, Sightings)]
    if not looking:
        raise CallerError(f"{arguments.scenario}: no evidence in it searches for undeclared sites (found_per_year)")
    if not 1 <= arguments.sites <= 1_000_000:
        raise CallerError(f"--sites must be between 1 and 1,000,000, not {arguments.sites}")
    answer = SitesAnswer(
        scenario=None if arguments.per_year is not None else arguments.scenario,
        **{name: getattr(arguments, name) for name in ("watts", "days", "age", "sites")},
        evaded=arguments.evade,
        rows=[_row(arguments, looking, chips) for chips in arguments.chips],
        origins={each.name: each.origin for each in looking},
    )
    if arguments.out is not None:
        _draw_site(arguments, looking)
    return finish(arguments, answer, site_lines(answer))


def _row(arguments: argparse.Namespace, looking: Sequence[Sightings], chips: float) -> SiteRow:
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
        return SiteRow(chips=chips)
    target = Target(sites={("", ""): there})
    found = {each.name: each.found(target, evading=arguments.evade) for each in looking}
    any_ = 1.0 - math.prod(1.0 - chance for chance in found.values())
    return SiteRow(chips=chips, megawatts=there.megawatts, found=found, any=any_, hidden=described(there))


def _draw_site(arguments: argparse.Namespace, looking: Sequence[Sightings]) -> None:
    import numpy as np

    from analysis.commands._detection_options import command_line
    from analysis.report.figures import Origin, found_figure

    ends = min(arguments.chips), max(arguments.chips)
    if not 0 < ends[0] < ends[1]:
        raise CallerError("--out needs --chips with a range from a number above 0 to a larger one")
    chips = np.geomspace(*ends, 121)
    rows = [_row(arguments, looking, each).found or {} for each in chips]
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
    from inspector.probability.detection import snapshot_probability
    from inspector.probability.hidden_sites import HiddenSites, draw_linked, linked, parts_needed

    _check_split(arguments)
    about = options_of(arguments) | {"utilisation": arguments.utilisation * arguments.efficiency}
    work = {name: about[name] for name in ("days", "utilisation", "flop_per_day")}
    nodes = parts_needed(flop=arguments.flop, chips=arguments.node_chips, **work)
    chips = nodes * arguments.node_chips
    if chips > arguments.chips:
        raise CallerError(
            f"{nodes:,} nodes of {arguments.node_chips} chips have more chips than --chips {arguments.chips:,}"
        )
    there = HiddenSites.doing(arguments.flop, held=chips, sites=nodes, **about)
    window = min(arguments.period, arguments.days)
    seen = float(snapshot_probability(rate=arguments.rate, days=window))
    hit = arguments.node_chips / arguments.chips * seen
    visits = max(1, int(arguments.days / arguments.period))
    draws = arguments.samples * visits
    rng = np.random.default_rng(arguments.seed)
    known = draw_linked(
        nodes=nodes, hit=hit, draws=draws, recognised=arguments.recognised, trials=arguments.trials, rng=rng
    )
    low, high = clopper_pearson(int(known.sum()), arguments.trials, arguments.confidence)
    answer = SplitAnswer(
        flop=arguments.flop,
        node_chips=arguments.node_chips,
        nodes=nodes,
        chips=chips,
        megawatts=there.megawatts,
        days=arguments.days,
        hidden=described(there),
        found=finding_of(arguments).found(there),
        visits=visits,
        draws=draws,
        hit=hit,
        linked=float(linked(nodes=nodes, hit=hit, draws=draws, recognised=arguments.recognised)),
        simulated=Rate(value=float(known.mean()), low=low, high=high),
        trials=arguments.trials,
        seed=arguments.seed,
        confidence=arguments.confidence,
    )
    return finish(arguments, answer, split_lines(answer, arguments))


def _check_split(arguments: argparse.Namespace) -> None:
    from inspector.campaign.checks import fraction, positive, probability, whole

    whole("trials", arguments.trials, 1)
    whole("samples", arguments.samples)
    whole("chips", arguments.chips, 1)
    fraction("confidence", arguments.confidence)
    positive("period", arguments.period)
    positive("efficiency", arguments.efficiency)
    probability("efficiency", arguments.efficiency)
