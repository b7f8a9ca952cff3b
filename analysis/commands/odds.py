"""``odds``: what replaying some segments of a run shows, before anything is trained or inspected."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._answers import keys_text
from analysis.commands._common import add_json, count, finish, plural
from firmware_sim.errors import CallerError
from inspector.probability.intervals import IntervalPlan, plan_intervals

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from inspector.probability.odds import Audit, Violation

__all__ = ["CONFIDENCE", "add_sampling", "register", "violation"]

CONFIDENCE = 0.9
AGAINST = "data:0.05"
_MOST_LISTED = 20
_NO_ALARM = "No honest lab is accused: its segments replay to the same bits."


@dataclass(frozen=True, slots=True, kw_only=True)
class Escape:
    """What it takes to catch one violation.

    Attributes:
        segments_touched: null if the violation is always found.
        escapes: chance.
        needed_steps: on one device.
        needed_share: of the run's steps.
        seconds: with --step-seconds, else null.
    """

    violation: str
    text: str
    segments_touched: int | None
    escapes: float
    needed_draws: int
    needed_steps: int
    needed_share: float
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NextDraw:
    """With --draw: the segments to audit next, as the secret draws them."""

    secret: str
    positions: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OddsAnswer:
    """Odds of one audit.

    Attributes:
        first_replayed: whether the first segment is always replayed.
        drawn_from: segments from which they were drawn.
        replayed_steps: number of steps that one device replays, on average.
        coverage: of the run's steps.
        shown_segments: smallest number of false segments that this audit finds with this confidence; null if there is
            none.
        next: further segments to draw, for each violation.
        false_alarm: 0, by construction.
        widest_gap: with --audited LIST: first and last position of the longest unaudited stretch; else null.
        drawn_next: with --draw, else null.
    """

    steps: int
    segments: int
    first_replayed: bool
    drawn: int
    drawn_from: int
    replayed_steps: int
    coverage: float
    confidence: float
    shown_segments: int | None
    violations: Sequence[Escape]
    next: Mapping[str, int]
    false_alarm: float
    widest_gap: Sequence[int] | None
    drawn_next: NextDraw | None

    def lines(self) -> Iterator[str]:
        """For people."""
        seen, percent = self.drawn + self.first_replayed, f"{100 * self.confidence:g} %"
        first = " (the first, and the others drawn by chance)" if self.first_replayed else ""
        yield (
            f"{seen:,} of {plural(self.segments, 'segment')} replayed{first}, with {self.replayed_steps:,} of "
            f"{self.steps:,} steps ({100 * self.coverage:.3g} %), on one device."
        )
        if self.shown_segments is None:
            yield f"Even if all of them match, any number can be false at {percent} confidence."
        else:
            yield (
                f"If all of them match, fewer than {self.shown_segments:,} of the {self.drawn_from:,} segments "
                f"that could have been drawn are false, with {percent} confidence."
            )
        yield _NO_ALARM
        yield "Chance to escape, for a lab that knows everything but the secret of the draw:"
        for row in self.violations:
            cost = f"draw {plural(row.needed_draws, 'segment')} ({row.needed_steps:,} steps)"
            cost += "" if row.seconds is None else f", {row.seconds:,.3g} s"
            more = self.next[row.violation]
            yield f"  {row.escapes:<8.3g} {row.text}"
            yield (
                f"           to catch it with {percent} probability: {cost}"
                f"{f', {more:,} more than now' if more else ''}"
            )
        if not self.first_replayed:
            yield (
                "Audits at positions that the lab could foresee, such as every hundredth, say nothing about the others."
            )
        if self.widest_gap is not None:
            yield f"The widest gap is {self.widest_gap[0]:,} … {self.widest_gap[1]:,}."
        if self.drawn_next is not None:
            positions = self.drawn_next.positions
            shown, more = ", ".join(map(str, positions[:_MOST_LISTED])) or "nothing", len(positions) - _MOST_LISTED
            yield f"Audit next: {shown}{f' and {more} more' if more > 0 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalsAnswer:
    """Checkpoint intervals side by side.

    Attributes:
        false_alarm: 0, by construction.
        cheapest: an interval; null without costs.
    """

    steps: int
    against: str
    confidence: float
    false_alarm: float
    cheapest: int | None
    intervals: Sequence[IntervalPlan]


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
        epilog=f"{keys_text(OddsAnswer)}\n{keys_text(IntervalsAnswer, 'With --intervals')}",
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
    rows = [
        Escape(**row, seconds=None if cost is None else row["needed_steps"] * cost)
        for row in audit.table((*asked, *usual), arguments.confidence)
        for cost in [arguments.step_seconds]
    ]
    shown = audit.shown(arguments.confidence)
    replayed = audit.price(audit.drawn)
    drawn_next = None
    if arguments.draw is not None:
        wanted = max(0, audit.needed(against, arguments.confidence) - audit.drawn)
        drawn_next = NextDraw(secret=arguments.draw, positions=_next(audit, audited, wanted, arguments.draw))
    answer = OddsAnswer(
        steps=audit.steps,
        segments=len(audit.lengths),
        first_replayed=bool(audit.certain),
        drawn=audit.drawn,
        drawn_from=audit.others,
        replayed_steps=replayed,
        coverage=replayed / audit.steps if audit.steps else 1.0,
        confidence=arguments.confidence,
        shown_segments=shown if shown <= audit.others else None,
        violations=rows,
        false_alarm=0.0,
        next={row.violation: max(0, row.needed_draws - audit.drawn) for row in rows},
        widest_gap=_widest_gap(audited, audit.others) if audited else None,
        drawn_next=drawn_next,
    )
    return finish(arguments, asdict(answer), answer.lines())


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
    answer = IntervalsAnswer(
        steps=arguments.steps,
        against=str(against),
        confidence=arguments.confidence,
        false_alarm=0.0,
        cheapest=cheapest,
        intervals=plans,
    )
    return finish(arguments, asdict(answer), lines)


def _intervals(text: str, steps: int) -> list[int]:
    if not text:
        return [1 << power for power in range(max(steps, 1).bit_length())]
    if not all(part.isascii() and part.isdigit() and len(part) < 12 for part in text.split(",")):
        raise CallerError(f"--intervals takes whole numbers such as 1,4,16, not {text!a:.60}")
    return [int(part) for part in text.split(",")]


def _audit(arguments: argparse.Namespace, against: Violation) -> tuple[Audit, list[int]]:
    """The audit that is asked about, and which segments were audited, where that is known."""
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
