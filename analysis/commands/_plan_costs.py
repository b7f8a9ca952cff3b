"""What a plan costs a year, and how many segments of a drawn chip's run are worth replaying."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from analysis.commands._answers import fields_of
from analysis.commands._uncertainty import fixed, ranged, within
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from analysis.commands._plan_answer import CostParts, LabBurden, PlanAnswer, Replaying, Spread
    from inspector.probability.inputs import Inputs
    from inspector.probability.planning import Problem, VisitSchedule

__all__ = [
    "Search",
    "add_costs",
    "cheapest",
    "cost_band",
    "cost_lines",
    "costs",
    "flop_per_year",
    "inputs_of",
    "lab_asks",
    "lab_lines",
    "price_of_travel",
    "work_of",
]

_MOST_SEGMENTS = 1_000_000
_DRAWS = 2_000
_REFINED = 2
"""Rounds in which numbers between the best one and its neighbours are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The cheapest number of segments, its plan, and the totals of all numbers that were tried."""

    replaying: Replaying
    problem: Problem
    plan: VisitSchedule
    tried: tuple[tuple[int, float | None], ...]


def add_costs(parser: ArgumentParser) -> None:
    """Add what visits, replays and secrecy cost, and the number of segments."""
    option = parser.add_argument
    option("--inspector-cost", type=within("positive"), metavar="~M", help="money for one inspector and year")
    option(
        "--input",
        type=_named_text,
        action="append",
        default=[],
        metavar="NAME=~X",
        help=(
            "an input that does not change the schedule (repeat for each). Names: money (currency and year of all "
            "prices, such as 'USD 2026'), load (chips that an inspector inspects in a year, default 1000), "
            "step_seconds (of the lab's runs, default 10), slowdown (time of a recorded step, relative to plain "
            "training), replay (time of a repeated step, relative to plain training), step_bytes, other_records (log "
            "records in a year that are no snapshots). Where no default is shown, it is a measured value"
        ),
    )
    option("--travel-cost", type=float, default=0.0, metavar="M", help="money for the journey of a visit (default 0)")
    option(
        "--segments",
        type=int,
        metavar="N",
        help=(
            "number of segments of a run; the plan then also says how many of them to replay for each drawn chip, "
            "against a lab that falsifies a share of them (needs --inspector-cost and --replay-price)"
        ),
    )
    option(
        "--false-segments",
        type=float,
        default=0.05,
        metavar="X",
        help="smallest share of the segments that a lie falsifies (default 0.05)",
    )
    option("--replay-price", type=float, default=0.0, metavar="M", help="money for a replayed FLOP (default 0)")
    option(
        "--confidentiality",
        type=float,
        default=0.0,
        metavar="X",
        help="extra cost, as a share, of replays on a cluster that both sides trust and that keeps nothing (default 0)",
    )
    option(
        "--chip-overhead",
        type=float,
        default=0.0,
        metavar="X",
        help="share of the chips' time that monitoring takes (default 0)",
    )
    option("--chip-year", type=float, default=0.0, metavar="M", help="money for a chip and year (default 0)")


def price_of_travel(arguments: argparse.Namespace) -> float:
    """Return what a journey costs in chips that could have been examined instead; 0 where no price is given."""
    from inspector.probability.detection import CHIPS_PER_INSPECTOR

    _check(arguments)
    if not arguments.travel_cost:
        return 0.0
    if not fixed(arguments.inspector_cost or 0):
        raise CallerError("--travel-cost needs --inspector-cost, so that journeys and work can be compared")
    return float(arguments.travel_cost / fixed(arguments.inspector_cost) * CHIPS_PER_INSPECTOR)


def inputs_of(arguments: argparse.Namespace) -> Inputs:
    """Return the inputs of ``--input``, with what was measured for the others."""
    from analysis.inputs import measured_inputs

    return measured_inputs().given(dict(arguments.input))


def _named_text(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (sign and name.strip() and value.strip()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name.strip(), value.strip()


def work_of(arguments: argparse.Namespace, plan: VisitSchedule) -> float:
    """Return the work of inspectors a year, in chips; journeys are paid, and no work."""
    return plan.work - plan.visits_per_year * price_of_travel(arguments)


def costs(
    arguments: argparse.Namespace, problem: Problem, plan: VisitSchedule, replaying: Replaying | None
) -> CostParts | None:
    """Return the parts of the yearly cost and their total; None where no price of an inspector is given."""
    from analysis.commands._plan_answer import CostParts

    if arguments.inspector_cost is None:
        return None
    replay = flop_per_year(problem, plan, replaying) * arguments.replay_price
    found = {
        "staff": inputs_of(arguments).inspectors(work_of(arguments, plan))[1] * fixed(arguments.inspector_cost),
        "travel": plan.visits_per_year * arguments.travel_cost,
        "replay": replay,
        "confidentiality": replay * arguments.confidentiality,
        "chips_time": sum(site.chips for site in problem.sites) * arguments.chip_overhead * arguments.chip_year,
    }
    return CostParts(**found, total=sum(found.values()))


def cost_band(arguments: argparse.Namespace, plan: VisitSchedule, found: CostParts | None) -> Spread | None:
    """Return 5, 50 and 95 % of the total over draws of an inspector's cost and load; None where no price is given."""
    import numpy as np

    from analysis.commands._plan_answer import Spread
    from inspector.probability.uncertainty import band, draws

    if found is None:
        return None
    inputs = {"load": inputs_of(arguments).load, "cost": ranged(arguments.inspector_cost)}
    at = draws(inputs, number=_DRAWS, seed=arguments.seed)
    made = band(found.total - found.staff + np.ceil(work_of(arguments, plan) / at["load"] - 1e-9) * at["cost"])
    return Spread(low=float(made.low), median=float(made.median), high=float(made.high))


def lab_asks(
    arguments: argparse.Namespace, problem: Problem, plan: VisitSchedule, replaying: Replaying | None
) -> LabBurden:
    """Return what monitoring asks of the lab, each with its 5, 50 and 95 %."""
    from analysis.commands._plan_answer import LabBurden, Spread

    flop = flop_per_year(problem, plan, replaying)
    asks = inputs_of(arguments).asks(rate=problem.rate, replayed_flop=flop, flop_per_day=problem.flop_per_day)
    return LabBurden(**{name: Spread(low=low, median=mid, high=high) for name, (low, mid, high) in asks.items()})


def lab_lines(answer: PlanAnswer) -> list[str]:
    """Return what monitoring asks of the lab as text."""
    from analysis.inputs import MEASURED

    def shown(found: Spread, form: str = ",.3g", unit: float = 1.0) -> str:
        low, middle, high = found.low / unit, found.median / unit, found.high / unit
        return f"{middle:{form}}" if low == high else f"{middle:{form}} ({low:{form}} to {high:{form}})"

    lab = answer.lab
    replayed = f"{shown(lab.replayed_chip_hours)} chip-hours of replay a year, " if answer.replaying else ""
    return [
        f"Of the lab it asks: steps {shown(lab.slowdown)} times as long, {replayed}{shown(lab.log_bytes, unit=1e3)} kB "
        f"of log for each chip and year, {shown(lab.transcript_bytes, unit=1e9)} GB of transcript for a year of "
        "training.",
        f"Steps' times and bytes: {MEASURED}; a step's length is assumed. --input replaces each.",
    ]


def flop_per_year(problem: Problem, plan: VisitSchedule, replaying: Replaying | None) -> float:
    """Return FLOP replayed a year: for each drawn chip its segments, of a run of at most H FLOP."""
    if replaying is None:
        return 0.0
    drawn = sum(each.per_year * each.samples for each in plan.visits)
    return drawn * problem.flop * replaying.replayed / replaying.segments


def cheapest(arguments: argparse.Namespace, problem_at: Callable[[Replaying], Problem]) -> Search:
    """Return the number of segments whose cheapest plan costs least in all.

    Raises:
        CallerError: no price, a number out of range.
        OutOfReachError: no number of segments reaches the confidence.
    """
    from analysis.commands._plan_answer import Replaying
    from inspector.probability.detection import OutOfReachError
    from inspector.probability.planning import cheapest_plan

    _check(arguments)
    segments = arguments.segments
    if not arguments.inspector_cost or not arguments.replay_price:
        raise CallerError(
            "--segments needs --inspector-cost and --replay-price, so that replays and work can be compared"
        )
    tried: dict[int, tuple[float, Replaying, Problem, VisitSchedule] | None] = {}
    reason = ""

    def attempt(number: int) -> None:
        nonlocal reason
        if number in tried:
            return
        replaying = Replaying(segments=segments, replayed=number, false_share=arguments.false_segments)
        problem = problem_at(replaying)
        try:
            plan = cheapest_plan(problem)
        except OutOfReachError as error:
            reason, tried[number] = str(error), None
            return
        found = costs(arguments, problem, plan, replaying)
        assert found is not None
        tried[number] = (found.total, replaying, problem, plan)

    for step in range(12):
        attempt(min(segments, max(1, round(segments ** (step / 11)))))
    for _ in range(_REFINED):
        best = _best(tried)
        if best is None:
            raise OutOfReachError(reason)
        below = [number for number in tried if number < best]
        above = [number for number in tried if number > best]
        for other in ([max(below)] if below else []) + ([min(above)] if above else []):
            attempt(round(math.sqrt(best * other)))
    best = _best(tried)
    chosen = None if best is None else tried[best]
    if chosen is None:
        raise OutOfReachError(reason)
    _, replaying, problem, plan = chosen
    totals = tuple((number, None if found is None else found[0]) for number, found in sorted(tried.items()))
    return Search(replaying=replaying, problem=problem, plan=plan, tried=totals)


def _best(tried: dict[int, tuple[float, Any, Any, Any] | None]) -> int | None:
    there = {number: found[0] for number, found in tried.items() if found is not None}
    return min(there, key=lambda number: there[number]) if there else None


def _check(arguments: argparse.Namespace) -> None:
    given = arguments.inspector_cost
    if given is not None and not 0 <= fixed(given) < math.inf:
        raise CallerError(f"--inspector-cost must be at least 0, not {fixed(given):g}")
    for name in ("travel_cost", "replay_price", "confidentiality", "chip_year"):
        value = getattr(arguments, name)
        if value is not None and not 0 <= value < math.inf:
            raise CallerError(f"--{name.replace('_', '-')} must be at least 0, not {value:g}")
    for name in ("false_segments", "chip_overhead"):
        if not 0 <= getattr(arguments, name) <= 1:
            raise CallerError(f"--{name.replace('_', '-')} must be between 0 and 1, not {getattr(arguments, name):g}")
    if arguments.segments is not None and not 1 <= arguments.segments <= _MOST_SEGMENTS:
        raise CallerError(f"--segments must be between 1 and {_MOST_SEGMENTS:,}, not {arguments.segments}")


def cost_lines(answer: PlanAnswer) -> list[str]:
    """Return costs and replays as text."""
    lines = []
    found, replaying = answer.costs, answer.replaying
    if found is not None and answer.cost_band is not None:
        names = {"chips_time": "chips' lost time"}
        values = fields_of(found).items()
        parts = [f"{names.get(name, name)} {value:,.0f}" for name, value in values if value and name != "total"]
        low, high = answer.cost_band.low, answer.cost_band.high
        band = "" if low == high else f" ({low:,.0f} to {high:,.0f})"
        unit = answer.money or "in the unit of the prices"
        lines.append(f"Cost {found.total:,.0f}{band} a year, {unit}: {', '.join(parts) or 'nothing'}.")
    if replaying is not None:
        lines.append(
            f"Replay {replaying.replayed:,} of {replaying.segments:,} segments for each drawn chip: a transcript "
            f"that is false in {replaying.false_share:g} of them shows with {replaying.caught:.4f}, "
            "and an honest one by construction never; "
            f"{replaying.flop_per_year:.3g} FLOP a year at most."
        )
        totals = ", ".join(f"{each.replayed:,}: {_total(each.total)}" for each in replaying.tried)
        lines.append(f"Total by segments replayed: {totals}.")
    return lines


def _total(value: float | None) -> str:
    return "not enough" if value is None else f"{value:,.0f}"
