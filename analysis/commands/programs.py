"""``program show`` and ``program review``: what a recorded step does, for the person who agrees to its digest."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, add_trust, print_json, say, show_verdict
from analysis.commands.runs import require_runs

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from inspector.inspection.reviewing import Page

__all__ = ["register"]

_PATHS_SHOWN = 20
_KEYS = (
    "JSON: a list of program, calls, operators, flop, elementwise (elements that other operators compute), inputs, "
    "constants, state_bytes, largest, peak_bytes, scalars, update_scalars, direct_paths"
)


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``program``."""
    group = subparsers.add_parser("program", help="what the recorded steps of a run do: show and review")
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    parser = actions.add_parser("show", help="one page for each program: what a person agrees to", epilog=_KEYS)
    parser.add_argument("path", type=Path, metavar="PROGRAM_FILE|RUN")
    parser.add_argument("--digest", metavar="D", help="one program of the run, by the beginning of its digest")
    add_json(parser)
    parser.set_defaults(handler=_show)

    parser = actions.add_parser(
        "review",
        help="compare a run's programs with what was agreed",
        description="Rejects programs that were not agreed, and paths by which batches or constants reach the new "
        "state without passing a loss, unless they were countersigned.",
        epilog="JSON keys: outcome, reasons, evidence (execution, flop, programs)",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    add_trust(parser)
    add_json(parser)
    parser.set_defaults(handler=_review)


def _show(arguments: argparse.Namespace) -> int:
    from inspector.inspection.reviewing import show

    pages = show(arguments.path, arguments.digest)
    if arguments.json:
        print_json([page.to_json() for page in pages])
        return 0
    for number, page in enumerate(pages):
        for line in [""] * bool(number) + _lines(page):
            say(line)
    return 0


def _review(arguments: argparse.Namespace) -> int:
    from inspector.inspection.reviewing import review
    from inspector.inspection.trust import Trust

    require_runs([arguments.run])
    return show_verdict(arguments, review(arguments.run, Trust.load(arguments.trust, [arguments.run])))


def _lines(page: Page) -> list[str]:
    facts = page.facts
    lines = [
        f"program        {page.digest}",
        f"FLOP           {facts.flop} in products; other operators compute {facts.elementwise} elements, so "
        f"{facts.flop + 2 * facts.elementwise} at most",
        f"memory         at most {facts.peak_bytes} bytes at once, of which the state has {facts.state_bytes}",
    ]
    if facts.largest is not None:
        big = facts.largest
        lines.append(f"largest tensor {big['dtype']}{big['shape']}, {big['bytes']} bytes, made by {big['operator']}")
    for name, layout in facts.inputs.items():
        lines.append(f"batch          {name!a}: {layout['dtype']}{layout['shape']}")
    varied = [each["bytes"] for each in facts.constants if not each["uniform"]]
    lines.append(
        f"constants      {len(facts.constants)} with {sum(each['bytes'] for each in facts.constants)} bytes; "
        f"{len(varied)} of more than one value, with {sum(varied)} bytes"
    )
    lines.append(
        f"scalars        {facts.scalars}, of which {facts.update_scalars} in updates of the optimizer, which an "
        "inspection compares with the declared hyper-parameters"
    )
    operators = ", ".join(f"{name} {count}" for name, count in facts.operators.items())
    lines.append(f"operators      {facts.calls} calls: {operators}")
    return lines + _path_lines(page)


def _path_lines(page: Page) -> list[str]:
    if not page.paths:
        return ["direct paths   none: batches and constants reach the new state by gradients of a loss only"]
    lines = []
    for path in page.paths[:_PATHS_SHOWN]:
        kind = "running stat." if path.statistic else "direct path"
        lines.append(f"{kind:14} {path.source!a} reaches {path.tensor!a} by {path.operator} (call {path.call})")
    if len(page.paths) > _PATHS_SHOWN:
        lines.append(f"… and {len(page.paths) - _PATHS_SHOWN} more paths")
    return lines
