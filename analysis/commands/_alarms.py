"""``alarms``: what an accusation means, by the refusals that a regime tolerates: ROC, posterior, expected cost."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands._common import add_json, count, finish, plural
from analysis.commands._detection_options import add_run, add_scheme, command_line, scheme_of, worked
from analysis.commands._evasions import EVASIONS, parse_evasion
from analysis.parser import show_every_day
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import ArgumentParser, _SubParsersAction

__all__ = ["register"]

_KEYS = """
JSON keys: rows, one for each number of tolerated chips that could not be shown: tolerated, detection (of the worst
evasion), worst (its name), false_alarm (over the longest run), excess, likelihood_ratio and pass_ratio (factors on the
odds of a violation, after an accusation and after a pass; null if an honest lab is never accused), posterior and
pass_posterior (chance of a violation after them; null if the verdict never occurs), expected_cost; best (number of
tolerated chips with the least expected cost), never (expected cost without inspections), saved (share of that cost that
the best rule saves), samples, period, prior, cost_miss, cost_alarm, refusals.
"""

_MOST_ROWS = 200


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``alarms``."""
    parser = subparsers.add_parser(
        "alarms",
        description="An honest lab cannot show every drawn chip. The more a visit tolerates, the fewer honest labs are "
        "accused, and the fewer violations are caught. For each number of tolerated chips the table says "
        "how often both happen, what an accusation or a pass then means, and what the rule costs on average."
        + EVASIONS,
        epilog=_KEYS,
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
    option("--evasion", action="append", metavar="NAME[=X]", help="as in plan (default: declared and refuse)")
    option("--out", type=Path, metavar="FIGURE", help="draw ROC and expected cost by prior (.png, .svg or .pdf)")
    add_json(parser)
    show_every_day(parser, "days period rate samples cost-miss cost-alarm out")
    parser.set_defaults(handler=_alarms)


def _alarms(arguments: argparse.Namespace) -> int:
    rows = _rows(arguments)
    best = min(rows, key=lambda row: row["expected_cost"])["tolerated"]
    if arguments.out is not None:
        _draw(arguments, rows, best)
    names = ("period", "prior", "cost_miss", "cost_alarm", "refusals")
    never = arguments.prior * arguments.cost_miss
    least = rows[best]["expected_cost"]
    saved = 1 - least / never if never > 0 else 0.0
    data = {"rows": rows, "best": best, "never": never, "saved": saved, "samples": arguments.samples}
    data |= {name: getattr(arguments, name) for name in names}
    return finish(arguments, data, _lines(data))


def _rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each number of tolerated refusals, until an honest lab is practically never accused."""
    from inspector.probability import alarms
    from inspector.probability import detection as closed
    from inspector.probability.planning import Problem, VisitedSite, Visits, best_response

    scheme = worked(scheme_of(arguments))
    period = scheme.pop("period")
    if arguments.samples is None:
        needed = closed.samples_needed(flop=arguments.flop, chips=arguments.chips, period=period, **scheme)
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
    rows: list[dict[str, Any]] = []
    for tolerated in range(min(arguments.samples, _MOST_ROWS) + 1):
        visits = [Visits(site="all chips", period=period, samples=arguments.samples, refusals_allowed=tolerated)]
        found = [best_response(problem, visits, each) for each in problem.evasions]
        worst = min(found, key=lambda each: each.detection)
        alarm = max(each.false_alarm for each in found)
        both: dict[str, Any] = {"detection": worst.detection, "false_alarm": alarm}
        cost = {"prior": arguments.prior, "miss": arguments.cost_miss, "alarm": arguments.cost_alarm}
        rows.append(
            {
                "tolerated": tolerated,
                **both,
                "worst": worst.evasion,
                "excess": worst.detection - alarm,
                "likelihood_ratio": _finite(alarms.likelihood_ratio(**both)),
                "pass_ratio": _finite(alarms.likelihood_ratio(**both, accused=False)),
                "posterior": _finite(alarms.posterior(prior=arguments.prior, **both)),
                "pass_posterior": _finite(alarms.posterior(prior=arguments.prior, **both, accused=False)),
                "expected_cost": float(alarms.expected_cost(**both, **cost)),
            }
        )
        if alarm < 1e-6:
            break
    return rows


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _lines(data: dict[str, Any]) -> list[str]:
    from analysis.report.tables import aligned

    head = ["tolerated", "caught", "honest accused", "excess", "ratio", "if accused", "if passed", "cost", ""]
    body = [
        [
            str(row["tolerated"]),
            f"{row['detection']:.4f}",
            f"{row['false_alarm']:.2e}",
            f"{row['excess']:.4f}",
            "-" if row["likelihood_ratio"] is None else f"{row['likelihood_ratio']:.3g}",
            *("-" if row[key] is None else f"{row[key]:.4f}" for key in ("posterior", "pass_posterior")),
            f"{row['expected_cost']:.4g}",
            "least cost" if row["tolerated"] == data["best"] else "",
        ]
        for row in data["rows"]
    ]
    least = data["rows"][data["best"]]["expected_cost"]
    return [
        f"{data['samples']:,} chips every {data['period']:g} days, of which an honest lab cannot show "
        f"{data['refusals']:g}",
        f"prior chance of a violation {data['prior']:g}; a miss costs {data['cost_miss']:g}, a false alarm "
        f"{data['cost_alarm']:g}",
        "",
        *aligned([head, *body]),
        "",
        f"ratio: factor on the odds of a violation after an accusation. Least cost: {plural(data['best'], 'chip')} "
        "that could not be shown tolerated at a visit.",
        f"Never to inspect costs {data['never']:.4g}; the least cost is {least:.4g}, {abs(data['saved']):.2%} "
        f"{'more' if data['saved'] < 0 else 'less'}"
        + (": these costs and this prior do not pay for an inspection." if data["saved"] < 0.01 else "."),
    ]


def _draw(arguments: argparse.Namespace, rows: list[dict[str, Any]], best: int) -> None:
    from analysis.report.figures import Origin, roc_figure
    from analysis.report.style import setting

    names = ("flop", "chips", "days", "period", "rate")
    note = setting(**{name: getattr(arguments, name) for name in names})
    roc_figure(
        arguments.out,
        false_alarm=[row["false_alarm"] for row in rows],
        detection=[row["detection"] for row in rows],
        tolerated=[row["tolerated"] for row in rows],
        best=best,
        note=f"{note}; {arguments.samples:,} samples, {arguments.refusals:g} cannot be shown, prior "
        f"{arguments.prior:g}, a miss costs {arguments.cost_miss:g}, a false alarm {arguments.cost_alarm:g}",
        origin=Origin(command=command_line(arguments)),
    )
