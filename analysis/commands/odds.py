"""``odds``: what replaying some segments of a run shows, before anything is trained or inspected."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands._common import add_json, count, finish, plural
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from collections.abc import Sequence

    from inspector.probability.odds import Audit, Violation

__all__ = ["CONFIDENCE", "add_sampling", "register", "violation"]

CONFIDENCE = 0.9
AGAINST = "data:0.05"
_MOST_LISTED = 20
_NO_ALARM = "No honest lab is accused: its segments replay to the same bits."
_KEYS = """
JSON keys: steps, segments, first_replayed, drawn, drawn_from (segments from which they were drawn), replayed_steps
(number of steps that one device replays, on average), coverage, confidence, shown_segments (smallest number of false
segments that this audit finds with this confidence; null if there is none), violations (each: violation, text,
segments_touched (null if the violation is always found), escapes (chance), needed_draws, needed_steps, needed_share,
seconds (with --step-seconds)), next (further segments to draw, for each violation), false_alarm (0, by construction),
widest_gap (with --audited LIST: first and last position of the longest unaudited stretch), drawn_next (with --draw:
secret and positions). With --intervals: steps, against, confidence, false_alarm, cheapest (an interval; null without
costs), intervals (interval, states, segments, drawn, replayed_steps, share, cost).
"""


def violation(text: str) -> Violation:
    """Read an option's violation."""
    from inspector.probability.odds import Violation

    return Violation.parse(text)


def add_sampling(parser: ArgumentParser) -> None:
    """Add ``--confidence`` and ``--against``, which say how many segments are drawn."""
    parser.add_argument(
        "--confidence",
        type=float,
        default=CONFIDENCE,
        metavar="P",
        help=f"chance to catch the violation (default {CONFIDENCE})",
    )
    parser.add_argument(
        "--against",
        default=AGAINST,
        metavar="VIOLATION",
        help="smallest violation that matters, one of: swap (all weights replaced in one step), together:K (K edited "
        "steps in a row), scattered:K (K edited steps, each in another segment), data:SHARE (a share of the steps "
        f"uses other data; default {AGAINST})",
    )


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``odds``."""
    parser = subparsers.add_parser(
        "odds",
        description=(
            "How likely a lab is to escape, if it knows everything but the secret of the draw. Give a recorded RUN, "
            "or with --steps the number of steps of a planned run, or of any other system that commits to its steps "
            "in a hash chain."
        ),
        epilog=_KEYS,
    )
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="run folder; or give --steps")
    parser.add_argument("--trust", type=Path, action="append", metavar="FILE", help="of RUN; default: RUN.trust.json")
    parser.add_argument("--steps", type=count, metavar="N", help="steps of the run, in place of RUN")
    parser.add_argument(
        "--checkpoint-every", type=count, default=1, metavar="K", help="with --steps: steps to a segment (default 1)"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--segments",
        type=count,
        metavar="N",
        help="number of replayed segments; the first segment is always one of them",
    )
    size.add_argument(
        "--audited",
        metavar="N|LIST",
        help="with --steps: how many segments were audited, drawn by chance; or which, such as 7,9,100-120 (from 0)",
    )
    add_sampling(parser)
    parser.add_argument(
        "--step-seconds",
        type=float,
        metavar="S",
        help="seconds to replay a step; also print the time that the replays take",
    )
    parser.add_argument(
        "--draw",
        metavar="SECRET",
        help="with --audited: seed of the draw of the next audits, a text that the lab does not know",
    )
    _add_intervals(parser)
    add_json(parser)
    parser.set_defaults(handler=_odds)


def _add_intervals(parser: ArgumentParser) -> None:
    """Add what compares checkpoint intervals."""
    parser.add_argument(
        "--intervals",
        nargs="?",
        const="",
        metavar="K,K,…",
        help="with --steps: checkpoint intervals to compare, in steps (default: powers of two)",
    )
    parser.add_argument("--state-cost", type=float, metavar="M", help="with --intervals: cost of keeping one state")
    parser.add_argument(
        "--step-cost", type=float, metavar="M", help="with --intervals: cost of replaying one step, in the same unit"
    )


def _odds(arguments: argparse.Namespace) -> int:
    from inspector.probability.odds import usual_violations

    if arguments.intervals is not None:
        return _compare(arguments)
    _require_options(arguments)
    against = violation(arguments.against)
    audit, audited = _audit(arguments, against)
    usual = usual_violations(audit.steps)
    asked = () if against in usual else (against,)
    rows = audit.table((*asked, *usual), arguments.confidence)
    for row in rows:
        if arguments.step_seconds is not None:
            row["seconds"] = row["needed_steps"] * arguments.step_seconds
    shown = audit.shown(arguments.confidence)
    replayed = audit.price(audit.drawn)
    data: dict[str, Any] = {
        "steps": audit.steps,
        "segments": len(audit.lengths),
        "first_replayed": bool(audit.certain),
        "drawn": audit.drawn,
        "drawn_from": audit.others,
        "replayed_steps": replayed,
        "coverage": replayed / audit.steps if audit.steps else 1.0,
        "confidence": arguments.confidence,
        "shown_segments": shown if shown <= audit.others else None,
        "violations": rows,
        "false_alarm": 0.0,
        "next": {row["violation"]: max(0, row["needed_draws"] - audit.drawn) for row in rows},
    }
    if audited:
        data["widest_gap"] = _widest_gap(audited, audit.others)
    if arguments.draw is not None:
        wanted = max(0, audit.needed(against, arguments.confidence) - audit.drawn)
        data["drawn_next"] = {"secret": arguments.draw, "positions": _next(audit, audited, wanted, arguments.draw)}
    return finish(arguments, data, _lines(data))


def _require_options(arguments: argparse.Namespace) -> None:
    """CallerError where options of the odds of one audit do not go together."""
    if (arguments.run is None) == (arguments.steps is None):
        raise CallerError("give either RUN or --steps N")
    if arguments.state_cost is not None or arguments.step_cost is not None:
        raise CallerError("--state-cost and --step-cost need --intervals")
    if arguments.audited is not None and arguments.steps is None:
        raise CallerError("--audited needs --steps N")
    if arguments.draw is not None and arguments.audited is None:
        raise CallerError("--draw needs --audited LIST: it draws what to audit next")
    if arguments.step_seconds is not None and not 0 < arguments.step_seconds < 1e9:
        raise CallerError(f"--step-seconds must lie in (0, 1e9), not {arguments.step_seconds:g}")


def _compare(arguments: argparse.Namespace) -> int:
    """What each checkpoint interval costs, and which costs least."""
    from dataclasses import asdict

    from inspector.probability.intervals import plan_intervals

    if arguments.steps is None or arguments.audited is not None or arguments.segments is not None:
        raise CallerError("--intervals is about a future run: give --steps N, and leave out --audited and --segments")
    against = violation(arguments.against)
    plans = plan_intervals(
        arguments.steps,
        _intervals(arguments.intervals, arguments.steps),
        against,
        arguments.confidence,
        state_cost=arguments.state_cost,
        step_cost=arguments.step_cost,
    )
    costs = {plan.interval: plan.cost for plan in plans if plan.cost is not None}
    cheapest = min(costs, key=lambda interval: costs[interval]) if costs else None
    lines = [
        f"A run of {arguments.steps:,} steps, inspected so that {against.text()} show with "
        f"{100 * arguments.confidence:g} %:",
        f"{'interval':>9} {'states':>11} {'segments':>11} {'drawn':>9} {'replayed':>15} {'share':>7} {'cost':>12}",
    ]
    for plan in plans:
        cost = "" if plan.cost is None else f"{plan.cost:12,.6g}"
        lines.append(
            f"{plan.interval:9,} {plan.states:11,} {plan.segments:11,} {plan.drawn:9,} {plan.replayed_steps:15,} "
            f"{100 * plan.share:5.3g} % {cost:>12}{'  least' if plan.interval == cheapest else ''}".rstrip()
        )
    lines.append(_NO_ALARM)
    data = {"steps": arguments.steps, "against": str(against), "confidence": arguments.confidence, "false_alarm": 0.0}
    return finish(arguments, {**data, "cheapest": cheapest, "intervals": list(map(asdict, plans))}, lines)


def _intervals(text: str, steps: int) -> list[int]:
    if not text:
        return [1 << power for power in range(max(steps, 1).bit_length())]
    if not all(part.isascii() and part.isdigit() and len(part) < 12 for part in text.split(",")):
        raise CallerError(f"--intervals takes whole numbers such as 1,4,16, not {text!a:.60}")
    return [int(part) for part in text.split(",")]


def _audit(arguments: argparse.Namespace, against: Violation) -> tuple[Audit, list[int]]:
    """The audit that is asked about, and which segments were audited, where that is known."""
    from dataclasses import replace

    from inspector.probability.odds import Audit, chain

    if arguments.run is not None:
        audit = Audit(_lengths(arguments), frozenset({0}))
    else:
        audit = chain(arguments.steps, arguments.checkpoint_every, first=arguments.audited is None)
    if arguments.audited is not None:
        drawn, found = _positions(arguments.audited, audit.others)
        return replace(audit, drawn=drawn), found
    if arguments.segments is None:
        return replace(audit, drawn=audit.needed(against, arguments.confidence)), []
    if arguments.segments < 1:
        raise CallerError("at least one segment must be replayed")
    return replace(audit, drawn=arguments.segments - 1), []


def _lengths(arguments: argparse.Namespace) -> list[int]:
    """Steps of training of each segment that a run will have when it is finished, or has where its end is open."""
    from analysis.commands.runs import trust_path
    from inspector.inspection.sampling import evaluations_in
    from inspector.inspection.transcripts import open_run
    from inspector.inspection.trust import Trust
    from inspector.replay.segment import segments

    if not arguments.run.is_dir():
        raise CallerError(f"there is no run folder {arguments.run}")
    run = open_run(arguments.run, Trust.load(arguments.trust or [trust_path(arguments.run)], [arguments.run]))
    every = segments(run)
    evaluations = evaluations_in(every, run.load_steps()[0])
    lengths = [each.stop - each.start - evaluations.get(each.index, 0) for each in every]
    if not lengths:
        raise CallerError(f"{arguments.run} has no step yet; give --steps N")
    return lengths


def _positions(text: str, most: int) -> tuple[int, list[int]]:
    """How many segments were audited, and which, where that is said; CallerError on anything else."""
    try:
        if text.isascii() and text.isdigit():
            return int(text), []
        found: set[int] = set()
        for part in text.split(","):
            first, _, last = part.partition("-")
            start, stop = int(first), int(last or first)
            if not 0 <= start <= stop < most:
                raise CallerError(f"the segments are 0 … {most - 1:,}, so there is no segment {part!a:.40}")
            found |= set(range(start, stop + 1))
        return len(found), sorted(found)
    except ValueError:
        raise CallerError(f"--audited takes a number, or positions such as 7,9,100-120, not {text!a:.60}") from None


def _widest_gap(audited: Sequence[int], count: int) -> list[int] | None:
    ends = [-1, *audited, count]
    start, stop = max(pairwise(ends), key=lambda pair: pair[1] - pair[0])
    return [start + 1, stop - 1] if stop - start > 1 else None


def _next(audit: Audit, audited: Sequence[int], count: int, secret: str) -> list[int]:
    import hashlib

    from inspector.inspection.sampling import draw

    if audit.drawn and not audited:
        raise CallerError("--draw has to know what has already been audited: give --audited LIST")
    rest = (str(index) for index in range(audit.others) if index not in set(audited))
    return sorted(map(int, draw(rest, count, hashlib.sha256(secret.encode()).digest())))


def _lines(data: dict[str, Any]) -> list[str]:
    seen = data["drawn"] + data["first_replayed"]
    first = " (the first, and the others drawn by chance)" if data["first_replayed"] else ""
    lines = [
        f"{seen:,} of {plural(data['segments'], 'segment')} replayed{first}, with {data['replayed_steps']:,} of "
        f"{data['steps']:,} steps ({100 * data['coverage']:.3g} %), on one device.",
    ]
    if data["shown_segments"] is None:
        lines.append(
            f"Even if all of them match, any number can be false at {100 * data['confidence']:g} % confidence."
        )
    else:
        lines.append(
            f"If all of them match, fewer than {data['shown_segments']:,} of the {data['drawn_from']:,} segments "
            f"that could have been drawn are false, with {100 * data['confidence']:g} % confidence."
        )
    lines.append(_NO_ALARM)
    lines.append("Chance to escape, for a lab that knows everything but the secret of the draw:")
    for row in data["violations"]:
        cost = f"draw {plural(row['needed_draws'], 'segment')} ({row['needed_steps']:,} steps)"
        cost += f", {row['seconds']:,.3g} s" if "seconds" in row else ""
        more = data["next"][row["violation"]]
        more_text = f", {more:,} more than now" if more else ""
        lines.append(f"  {row['escapes']:<8.3g} {row['text']}")
        lines.append(f"           to catch it with {100 * data['confidence']:g} % probability: {cost}{more_text}")
    if not data["first_replayed"]:
        lines.append(
            "Audits at positions that the lab could foresee, such as every hundredth, say nothing about the others."
        )
    if data.get("widest_gap"):
        first_free, last_free = data["widest_gap"]
        lines.append(f"The widest gap is {first_free:,} … {last_free:,}.")
    if "drawn_next" in data:
        positions = data["drawn_next"]["positions"]
        shown = ", ".join(map(str, positions[:_MOST_LISTED])) or "nothing"
        more = len(positions) - _MOST_LISTED
        lines.append(f"Audit next: {shown}{f' and {more} more' if more > 0 else ''}")
    return lines
