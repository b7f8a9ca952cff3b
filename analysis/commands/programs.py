"""``program show`` and ``program review``: what a recorded step does, for the person who agrees to its digest."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analysis.commands._common import add_json, add_trust, plural, print_json, say, show_verdict
from analysis.commands._program_pages import declared_lines, page_lines
from analysis.commands.runs import require_runs

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from inspector.inspection.review import Page

__all__ = ["register"]

_KEYS = (
    "JSON, an object for each program: program, kind, calls, operators, flop, elementwise (elements that other "
    "operators compute), inputs, constants, state_bytes, largest, peak_bytes, scalars, update_scalars, reads, "
    "writes, differentiates, large_constants (number, dtype, elements, sha256, min, max, mean, distinct), "
    "direct_paths"
)


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add ``program``."""
    group = subparsers.add_parser("program")
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    parser = actions.add_parser("show", help="one page for each program: what a person agrees to", epilog=_KEYS)
    parser.add_argument("path", type=Path, metavar="PROGRAM_FILE|RUN")
    parser.add_argument("--digest", metavar="D", help="one program of the run, by the beginning of its digest")
    add_json(parser)
    parser.set_defaults(handler=_show)

    parser = actions.add_parser(
        "review",
        help="compare a run's programs with what was agreed",
        description="Compares programs, scalars and direct paths with what was countersigned. On a direct path a "
        "batch or a constant reaches the new state without passing a loss. Until each such path is countersigned, "
        "the verdict is INCONCLUSIVE.",
        epilog="JSON keys: outcome, reasons, evidence (execution, flop, declaration, programs)",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    add_trust(parser)
    add_json(parser)
    parser.set_defaults(handler=_review)


def _show(arguments: argparse.Namespace) -> int:
    from inspector.inspection.review import show

    pages = show(arguments.path, arguments.digest)
    if arguments.json:
        print_json([page.to_json() for page in pages])
        return 0
    for number, page in enumerate(pages):
        for line in [""] * bool(number) + _lines(page):
            say(line)
    return 0


def _review(arguments: argparse.Namespace) -> int:
    from inspector.inspection.review import review
    from inspector.inspection.trust import Trust

    require_runs([arguments.run])
    verdict = review(arguments.run, Trust.load(arguments.trust, [arguments.run]))
    code = show_verdict(arguments, verdict)
    if not arguments.json and "declaration" in verdict.evidence:
        for line in _review_lines(verdict.evidence):
            say(line)
    return code


def _review_lines(evidence: Mapping[str, Any]) -> Iterator[str]:
    from monitor.declaration.statement import Declaration

    yield from declared_lines(Declaration.from_json(evidence["declaration"]))
    ran = evidence["execution"]["programs"]
    for page in evidence["programs"]:
        steps = plural(ran[page["program"]], "step")
        yield f"program        {page['program']}: {page['kind']} in {steps}, {page['flop']} FLOP"
        yield from page_lines(page)
    for name, why in evidence["execution"]["not_bound"].items():
        yield f"not bound      {name!a:.60}: {why}"
    if not evidence["execution"]["not_bound"]:
        yield "not bound      nothing that was found"


def _lines(page: Page) -> list[str]:
    facts = page.facts
    lines = [
        f"program        {page.digest}: {page.kind}",
        f"FLOP           {facts.flop} in products; other operators compute {facts.elementwise} elements, so "
        f"{facts.flop + 2 * facts.elementwise} at most",
        f"memory         at most {facts.peak_bytes} bytes at once, of which the state has {facts.state_bytes}",
    ]
    if facts.largest is not None:
        big = facts.largest
        lines.append(f"largest tensor {big['dtype']}{big['shape']}, {big['bytes']} bytes, made by {big['operator']}")
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
    return [*lines, *page_lines(page.to_json())]
