"""``alarms``: what an accusation means, by the refusals that a regime tolerates: ROC, posterior, expected cost."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._answers import keys_text
from analysis.commands._common import add_json, count, finish, plural
from analysis.commands._detection_options import add_run, add_scheme, command_line, scheme_of, worked
from analysis.commands._evasions import EVASIONS, parse_evasion
from analysis.parser import show_every_day
from firmware_sim.errors import CallerError
from inspector.probability.detection import samples_needed
from inspector.probability.planning import Problem, VisitedSite
from inspector.probability.tolerances import Tolerances, tolerances

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

__all__ = ["register"]


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``alarms``."""
    parser = subparsers.add_parser(
        "alarms",
        description="Even an honest lab cannot always show every drawn chip. The more missing chips a visit "
        "tolerates, the fewer honest labs are accused, and the fewer violations are caught. For each number of "
        "tolerated chips the table gives the share of accused honest labs, the share of caught violations, what an "
        "accusation or a pass "
        "then means, and the expected cost." + EVASIONS + "Default here: declared and refuse.",
        epilog=keys_text(Tolerances),
    )
    add_run(parser)
    add_scheme(parser)
    option = parser.add_argument
    option("--samples", type=count, metavar="S", help="chips drawn at a visit (default: what Eq. 1 asks for)")
    option("--refusals", type=float, required=True, metavar="R", help="chance that an honest lab cannot show a chip")
    option("--prior", type=float, required=True, metavar="Q", help="chance of a violation before any inspection")
    option("--cost-miss", type=float, default=1.0, metavar="M", help="cost of a violation that is missed (default 1)")
    option(
        "--cost-alarm",
        type=float,
        default=1.0,
        metavar="M",
        help="cost of an honest lab accused, follow-up included (default 1)",
    )
    option(
        "--evasion",
        action="append",
        metavar="NAME[=X]",
        help="evasion to judge the tolerance by (repeat; see above; default: declared and refuse)",
    )
    option("--out", type=Path, metavar="FIGURE", help="draw ROC and expected cost by prior (.png, .svg or .pdf)")
    add_json(parser)
    show_every_day(parser, "days period rate samples cost-miss cost-alarm out")
    parser.set_defaults(handler=_alarms)


def _alarms(arguments: argparse.Namespace) -> int:
    found = _found(arguments)
    if arguments.out is not None:
        _draw(arguments, found)
    return finish(arguments, found, _lines(found))


def _found(arguments: argparse.Namespace) -> Tolerances:
    """Return the rules of the site that the options describe."""
    scheme = worked(scheme_of(arguments))
    period = scheme.pop("period")
    if arguments.samples is None:
        needed = samples_needed(flop=arguments.flop, chips=arguments.chips, period=period, **scheme)
        arguments.samples = math.ceil(needed)
    if not 1 <= arguments.samples <= arguments.chips:
        raise CallerError(f"--samples must be between 1 and the {arguments.chips:,.0f} chips, not {arguments.samples}")
    problem = Problem(
        flop=arguments.flop,
        sites=(VisitedSite(name="all chips", chips=arguments.chips),),
        periods=(period,),
        evasions=tuple(parse_evasion(each) for each in arguments.evasion or ("declared", "refuse")),
        honest_refusal_rate=arguments.refusals,
        false_alarms=0.0,
        **scheme,
    )
    names = ("samples", "prior", "cost_miss", "cost_alarm")
    return tolerances(problem, **{name: getattr(arguments, name) for name in names})


def _lines(found: Tolerances) -> list[str]:
    from analysis.report.tables import aligned

    head = ["tolerated", "caught", "honest accused", "excess", "ratio", "if accused", "if passed", "cost", ""]
    body = [
        [
            str(row.tolerated),
            f"{row.detection:.4f}",
            f"{row.false_alarm:.2e}",
            f"{row.excess:.4f}",
            "-" if row.likelihood_ratio is None else f"{row.likelihood_ratio:.3g}",
            *("-" if chance is None else f"{chance:.4f}" for chance in (row.posterior, row.pass_posterior)),
            f"{row.expected_cost:.4g}",
            "least cost" if row.tolerated == found.best else "",
        ]
        for row in found.rows
    ]
    return [
        f"{found.samples:,} chips every {found.period:g} days, of which an honest lab cannot show {found.refusals:g}",
        f"prior chance of a violation {found.prior:g}; a miss costs {found.cost_miss:g}, a false alarm "
        f"{found.cost_alarm:g}",
        "",
        *aligned([head, *body]),
        "",
        f"ratio: factor on the odds of a violation after an accusation. Least cost: {plural(found.best, 'chip')} "
        "that could not be shown tolerated at a visit.",
        f"Never to inspect costs {found.never:.4g}; the least cost is {found.rows[found.best].expected_cost:.4g}, "
        f"{abs(found.saved):.2%} {'more' if found.saved < 0 else 'less'}"
        + (": these costs and this prior do not pay for an inspection." if found.saved < 0.01 else "."),
    ]


def _draw(arguments: argparse.Namespace, found: Tolerances) -> None:
    from analysis.report.figures import Origin, roc_figure
    from analysis.report.style import setting

    names = ("flop", "chips", "days", "period", "rate")
    note = setting(**{name: getattr(arguments, name) for name in names})
    roc_figure(
        arguments.out,
        false_alarm=[row.false_alarm for row in found.rows],
        detection=[row.detection for row in found.rows],
        tolerated=[row.tolerated for row in found.rows],
        best=found.best,
        note=f"{note}; {arguments.samples:,} samples, {arguments.refusals:g} cannot be shown, prior "
        f"{arguments.prior:g}, a miss costs {arguments.cost_miss:g}, a false alarm {arguments.cost_alarm:g}",
        origin=Origin(command=command_line(arguments)),
    )
