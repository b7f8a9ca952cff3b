"""``plan``: the cheapest inspection schedule over sites and periods that holds against a list of evasions."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands import _plan_costs
from analysis.commands._answers import fields_of, json_fields, keys_text
from analysis.commands._brief import add_brief, plan_brief
from analysis.commands._common import add_json, finish, print_json
from analysis.commands._detection_options import add_scheme, command_line, numbers, worked
from analysis.commands._evasions import EVASIONS, parse_evasion
from analysis.commands._influences import UncertainAnswer, draw_sensitivity
from analysis.commands._plan_sites import add_sites, sites_of
from analysis.commands._plan_text import plan_lines
from analysis.commands._uncertainty import UNCERTAIN, add_draws, ranged, within
from analysis.parser import show_every_day
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

    from analysis.commands._plan_answer import Deterrence, PlanAnswer, Replaying, SegmentReplay
    from analysis.commands._plan_costs import Search
    from inspector.probability.distributions import Distribution
    from inspector.probability.planning import Problem, Sensitivity, VisitSchedule

__all__ = ["register"]

_DEFAULT_EVASIONS = ("declared", "stretch=4", "rush=4")


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``plan``."""
    from analysis.commands._plan_answer import NoPlan, PlanAnswer

    none, also = "Exit code 2: there is no schedule. JSON keys without a schedule", "With uncertain inputs also"
    plan = subparsers.add_parser(
        "plan",
        description="Finds the cheapest schedule of inspections, over sites and periods, that catches a run with the "
        "wanted probability. The schedule catches the run whichever listed evasion the lab uses, and at any site."
        + UNCERTAIN
        + EVASIONS
        + "Default: declared, stretch=4, rush=4, and refuse where --refusals is above 0.",
        epilog="\n".join((keys_text(PlanAnswer), keys_text(NoPlan, none), keys_text(UncertainAnswer, also))),
    )
    option = plan.add_argument
    option("--flop", type=within("positive"), required=True, metavar="~H", help="FLOP of the run to be caught")
    add_sites(plan)
    add_scheme(plan, period=False, uncertain=True)
    option(
        "--periods",
        type=numbers,
        default=[7.0, 14.0, 30.0, 60.0, 90.0, 180.0, 365.0],
        metavar="TM,...",
        help="candidate days between visits (default 7,14,30,60,90,180,365)",
    )
    option("--delay", type=float, metavar="D", help="longest period allowed: how late a run may be noticed")
    option(
        "--evasion",
        action="append",
        metavar="NAME[=X]",
        help="evasion that the schedule must withstand (repeat; see above)",
    )
    _add_honest(plan)
    option(
        "--visit-work",
        type=float,
        default=10.0,
        metavar="W",
        help="fixed work of a visit, counted as the work of inspecting W chips (default 10)",
    )
    _plan_costs.add_costs(plan)
    _add_deterrence(plan)
    option("--sensitivity", action="store_true", help="also solve with each parameter halved and doubled")
    add_draws(plan, default=40, what="each planned anew")
    option("--out", type=Path, metavar="FIGURE", help="draw the sensitivity (.png, .svg or .pdf)")
    add_brief(plan)
    add_json(plan)
    show_every_day(plan, "sites site today days rate confidence refusals evasion inspector-cost brief")
    plan.set_defaults(handler=_plan)


def _add_deterrence(plan: ArgumentParser) -> None:
    """Add what a violation is worth to a lab."""
    option = plan.add_argument
    option("--gain", type=float, metavar="G", help="gain of a violation that stays unnoticed (with --penalty)")
    option("--penalty", type=float, metavar="L", help="cost of a caught violation, in the same unit (with --gain)")
    option(
        "--risk-aversion",
        type=float,
        default=0.0,
        metavar="R",
        help=(
            "the lab's constant absolute risk aversion, per unit of --gain and --penalty; below 0 the lab likes risk "
            "(default 0)"
        ),
    )


def _add_honest(plan: ArgumentParser) -> None:
    """Add the options about honest labs that cannot show a chip."""
    option = plan.add_argument
    option(
        "--refusals",
        type=within("share"),
        default=0.0,
        metavar="~R",
        help="chance that an honest lab cannot show a drawn chip",
    )
    option(
        "--shown-later",
        type=float,
        default=0.0,
        metavar="X",
        help=("share of the chips missing at first that an honest lab can show at a second look (default 0)"),
    )
    option(
        "--second-look",
        type=float,
        default=0.0,
        metavar="D",
        help=("days until an inspector comes back for chips that could not be shown at first (default 0)"),
    )
    option(
        "--false-alarms", type=float, default=0.01, metavar="P", help="cap on the chance of false alarm (default 0.01)"
    )


def _plan(arguments: argparse.Namespace) -> int:
    from inspector.probability.distributions import Fixed

    if not 0 <= arguments.shown_later <= 1:
        raise CallerError(f"--shown-later must be between 0 and 1, not {arguments.shown_later:g}")
    if not 0 <= arguments.second_look < math.inf:
        raise CallerError(f"--second-look must be at least 0 days, not {arguments.second_look:g}")
    inputs = _inputs(arguments)
    at = {name: float(each.ppf(0.5)) for name, each in inputs.items()}
    problem = _problem(arguments, at)
    drawn = any(not isinstance(each, Fixed) for each in inputs.values())
    if drawn and arguments.segments is not None:
        raise CallerError("--segments works with exact inputs only; give the medians")
    if drawn and arguments.sensitivity:
        raise CallerError(
            "--sensitivity works with exact inputs only; leave it out, since the answer for uncertain inputs already "
            "shows their sensitivity"
        )
    problem, plan, other, search = _solved(arguments, problem, at)
    if drawn:
        return _banded(arguments, inputs, problem, plan)
    rows = _sensitivity(problem, plan) if arguments.sensitivity or arguments.out or arguments.brief else None
    if arguments.out:
        _draw(arguments, problem, rows or [])
    answer = _answer(arguments, problem, plan, rows=rows, search=search, other=other)
    if arguments.brief:
        plan_brief(arguments.brief, answer, None, command_line(arguments))
    return finish(arguments, answer, plan_lines(answer))


def _solved(
    arguments: argparse.Namespace, problem: Problem, at: Mapping[str, float]
) -> tuple[Problem, VisitSchedule, VisitSchedule | None, Search | None]:
    """The problem as it was solved, its plan, the other way to allow refusals, and with --segments the search.

    Raises:
        OutOfReachError: no schedule holds; it names the inputs that alone would make one hold.
    """
    from analysis.commands._plan_answer import NoPlan
    from inspector.probability.detection import OutOfReachError
    from inspector.probability.planning import holding_inputs

    try:
        if arguments.segments is None:
            return *_recommended(problem), None
        search = _plan_costs.cheapest(arguments, lambda replaying: _problem(arguments, at, replaying))
        return search.problem, search.plan, None, search
    except OutOfReachError as error:
        inputs_alone = holding_inputs(problem)
        if arguments.json:
            print_json(NoPlan(reason=str(error), would_hold=inputs_alone))
            raise
        raise OutOfReachError(f"{error}; {_would_hold(inputs_alone)}") from None


def _recommended(problem: Problem) -> tuple[Problem, VisitSchedule, VisitSchedule | None]:
    """Return the cheaper of an allowance for each site and one over all, its problem, and the other if it holds."""
    from inspector.probability.detection import OutOfReachError
    from inspector.probability.planning import cheapest_plan, pooled, pooled_plan

    if problem.honest_refusal_rate == 0 or len(problem.sites) == 1:
        return problem, cheapest_plan(problem), None
    try:
        one = pooled_plan(problem)
    except OutOfReachError:
        return problem, cheapest_plan(problem), None
    try:
        own = cheapest_plan(problem)
    except OutOfReachError:
        return pooled(problem), one, None
    return (problem, own, one) if own.work <= one.work else (pooled(problem), one, own)


def _would_hold(found: Mapping[str, float]) -> str:
    """Return which input alone would make a schedule hold."""
    names = {
        "flop": "--flop",
        "confidence": "--confidence",
        "rate": "--rate",
        "honest_refusal_rate": "--refusals after the second look",
        "false_alarms": "--false-alarms",
    }
    if not found:
        return "no other value of one input alone would make one hold"
    return f"one would hold with {' or '.join(f'{names[name]} {value:.4g}' for name, value in found.items())} alone"


def _banded(
    arguments: argparse.Namespace, inputs: dict[str, Distribution], problem: Problem, plan: VisitSchedule
) -> int:
    """Print a plan for the medians with what the uncertain inputs make of it."""
    from analysis.commands import _plan_bands
    from inspector.probability.planning import pooled

    one = len(problem.sites) == 1 and problem.honest_refusal_rate > 0  # One allowance over all sites was the cheaper.

    def at(values: Mapping[str, float]) -> Problem:
        return pooled(_problem(arguments, values)) if one else _problem(arguments, values)

    more = _plan_bands.bands(at, inputs, plan, number=arguments.draws, seed=arguments.seed)
    if arguments.out:
        draw_sensitivity(
            arguments.out,
            more,
            middle=plan.work,
            x="work a year, relative to the plan for the medians",
            title="What the plan depends on",
            note=_setting(problem),
            command=command_line(arguments),
            seed=arguments.seed,
        )
    answer = _answer(arguments, problem, plan)
    if arguments.brief:
        plan_brief(arguments.brief, answer, more, command_line(arguments))
    lines = ["At the medians of all inputs:", *plan_lines(answer), *_plan_bands.lines(more)]
    return finish(arguments, json_fields(answer) | json_fields(more), lines)


def _inputs(arguments: argparse.Namespace) -> dict[str, Distribution]:
    """Return every number of the problem that may be uncertain."""
    names = ("flop", "days", "rate", "confidence", "flop_per_day", "utilisation", "refusals")
    found = {name: ranged(getattr(arguments, name)) for name in names}
    return found | {f"chips of {name}": ranged(chips) for name, chips in arguments.site or ()}


def _problem(arguments: argparse.Namespace, at: Mapping[str, float], replaying: Replaying | None = None) -> Problem:
    """Return the problem with its numbers as in ``at``; with replays, a false transcript is one more evasion."""
    from analysis.report.tables import H100_FLOP_PER_DAY
    from inspector.probability.planning import Evasion, Problem

    periods = [each for each in arguments.periods if arguments.delay is None or each <= arguments.delay]
    if not periods:
        raise CallerError(f"every period of --periods is longer than --delay {arguments.delay:g}")
    false = [] if replaying is None else [Evasion(name="false transcript", readout=replaying.caught)]
    speed = H100_FLOP_PER_DAY if arguments.today else at["flop_per_day"]
    default = (*_DEFAULT_EVASIONS, "refuse") if at["refusals"] > 0 else _DEFAULT_EVASIONS
    return Problem(
        flop=at["flop"],
        sites=tuple(sites_of(arguments, at)),
        periods=tuple(periods),
        evasions=(*(parse_evasion(each) for each in arguments.evasion or default), *false),
        days=at["days"],
        rate=at["rate"],
        confidence=at["confidence"],
        flop_per_day=worked({"utilisation": at["utilisation"], "flop_per_day": speed})["flop_per_day"],
        honest_refusal_rate=at["refusals"] * (1.0 - arguments.shown_later),
        false_alarms=arguments.false_alarms,
    )


def _sensitivity(problem: Problem, plan: VisitSchedule) -> list[Sensitivity]:
    from tqdm import tqdm

    from inspector.probability.planning import cheapest_plan, sensitivity

    def work(parameters: Mapping[str, float]) -> float:
        bar.update()
        if parameters == base:
            return plan.work
        sites = [
            dataclasses.replace(
                site,
                chips=site.chips * parameters["chips C"],
                visit_work=site.visit_work * parameters["work of a visit"],
            )
            for site in problem.sites
        ]
        changed = dataclasses.replace(
            problem,
            sites=tuple(sites),
            flop=parameters["FLOP of the run H"],
            days=parameters["days of the run T"],
            rate=parameters["snapshot rate f"],
            confidence=1.0 - parameters["accepted miss 1-p"],
            flop_per_day=parameters["speed of a chip a"],
            honest_refusal_rate=parameters.get("chips that cannot be shown", 0.0),
        )
        return cheapest_plan(changed).work

    base = {
        "FLOP of the run H": problem.flop,
        "chips C": 1.0,
        "speed of a chip a": problem.flop_per_day,
        "days of the run T": problem.days,
        "snapshot rate f": problem.rate,
        "accepted miss 1-p": 1.0 - problem.confidence,
        "work of a visit": 1.0,
    }
    if problem.honest_refusal_rate > 0:
        base["chips that cannot be shown"] = problem.honest_refusal_rate
    with tqdm(total=1 + 2 * len(base), unit="plan", disable=not sys.stderr.isatty(), leave=False) as bar:
        return sensitivity(work, base)


def _setting(problem: Problem) -> str:
    from analysis.report.style import setting

    return setting(
        flop=problem.flop,
        chips=sum(site.chips for site in problem.sites),
        days=problem.days,
        rate=problem.rate,
        confidence=problem.confidence,
        flop_per_day=problem.flop_per_day,
    )


def _draw(arguments: argparse.Namespace, problem: Problem, rows: list[Sensitivity]) -> None:
    from analysis.report.figures import Origin, sensitivity_figure

    sensitivity_figure(
        arguments.out,
        rows=[(each.parameter, each.lower, each.higher) for each in rows],
        x="work a year, relative to the plan",
        title="What the plan depends on (each parameter halved and doubled)",
        note=_setting(problem),
        origin=Origin(command=command_line(arguments)),
    )


def _answer(
    arguments: argparse.Namespace,
    problem: Problem,
    plan: VisitSchedule,
    *,
    rows: list[Sensitivity] | None = None,
    search: Search | None = None,
    other: VisitSchedule | None = None,
) -> PlanAnswer:
    from analysis.commands._plan_answer import OtherSchedule, PlanAnswer, RunSize, Schedule, SiteResponse
    from inspector.probability.hidden_sites import WATTS_PER_CHIP

    replaying = None if search is None else search.replaying
    costs, inputs = _plan_costs.costs(arguments, problem, plan, replaying), _plan_costs.inputs_of(arguments)
    chips = problem.flop / (problem.days * problem.flop_per_day)
    dearer = None if other is None else OtherSchedule(**fields_of(Schedule.of(other)), allowances=len(other.visits))
    return PlanAnswer(
        **fields_of(Schedule.of(plan)),
        other=dearer,
        visits_per_year=plan.visits_per_year,
        dearer_at_most=plan.dearer,
        noticed_within_days=plan.days_between + arguments.second_look,
        inspectors=inputs.inspectors(_plan_costs.work_of(arguments, plan))[1],
        inspector_load=float(inputs.load.ppf(0.5)),
        money=inputs.money or None,
        cost_band=_plan_costs.cost_band(arguments, plan, costs),
        run=RunSize(chips=chips, chip_hours=chips * problem.days * 24.0, megawatts=chips * WATTS_PER_CHIP / 1e6),
        lab=_plan_costs.lab_asks(arguments, problem, plan, replaying),
        cost=None if costs is None else costs.total,
        costs=costs,
        replaying=None if search is None else _replaying(search),
        excess=plan.excess,
        guaranteed_flop=2.0 * problem.flop,
        responses=[SiteResponse.of(each, [site.name for site in problem.sites]) for each in plan.responses],
        deterrence=_deterrence(arguments, plan.detection),
        not_covered=_not_covered(problem),
        impossible=plan.impossible,
        sensitivity=rows,
        stocks_as_of=_newest() if arguments.today else None,
        parameters=problem,
    )


def _replaying(search: Search) -> SegmentReplay:
    from analysis.commands._plan_answer import SegmentReplay, Tried

    return SegmentReplay(
        **fields_of(search.replaying),
        caught=search.replaying.caught,
        flop_per_year=_plan_costs.flop_per_year(search.problem, search.plan, search.replaying),
        tried=[Tried(replayed=number, total=total) for number, total in search.tried],
    )


def _deterrence(arguments: argparse.Namespace, detection: float) -> Deterrence | None:
    """Return whether a violation pays under the plan, and from where on it does not; None where no stakes are given."""
    from analysis.commands._plan_answer import Deterrence
    from inspector.probability.deterrence import deterring_detection, deterring_penalty, expected_utility

    if (arguments.gain is None) != (arguments.penalty is None):
        raise CallerError("--gain and --penalty have to be given together")
    if arguments.gain is None:
        return None
    stakes = {"gain": arguments.gain, "aversion": arguments.risk_aversion}
    both = stakes | {"penalty": arguments.penalty}
    return Deterrence(
        **both,
        utility=float(expected_utility(detection=detection, **both)),
        deterring_detection=float(deterring_detection(**both)),
        deterring_penalty=float(deterring_penalty(detection=detection, **stakes)),
    )


def _not_covered(problem: Problem) -> list[str]:
    refusing = any(each.refuses for each in problem.evasions)
    return ["refuse"] if problem.honest_refusal_rate > 0 and not refusing else []


def _newest() -> str:
    from analysis.report.tables import stocks

    return max(stock.as_of for stock in stocks())
