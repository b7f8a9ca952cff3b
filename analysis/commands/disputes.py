"""``dispute``: referee two provers that ran the same task."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, add_trust, print_json, say
from analysis.commands.runs import require_runs

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register"]


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("dispute")
    parser.add_argument("first", type=Path, metavar="RUN_A", help="one lab's finished run")
    parser.add_argument("second", type=Path, metavar="RUN_B", help="the other's, of the same task")
    add_trust(parser)
    parser.add_argument("--device", default="native", metavar="NAME", help="device of the referee and the provers")
    add_json(parser)
    parser.epilog = (
        "JSON keys: outcome, reasons, evidence, step, operator, guilty, rounds, bytes, operators_executed, search "
        "(where the referee compared: step or operator, place, of how many, whether the labs agree)"
    )
    parser.set_defaults(handler=_dispute)


def _dispute(arguments: argparse.Namespace) -> int:
    from inspector.devices import enter

    enter(arguments.device)
    from inspector.dispute.dispute import Disputant, settle
    from inspector.inspection.transcripts import open_run
    from inspector.inspection.trust import Trust
    from monitor.lab.prover import LabProver

    folders = [arguments.first, arguments.second]
    require_runs(folders)
    trust = Trust.load(arguments.trust, folders)
    first, second = (Disputant(run=open_run(folder, trust), prover=LabProver(folder)) for folder in folders)
    verdict = settle(first, second, trust)
    if arguments.json:
        print_json({**verdict.to_json(), **verdict.evidence})
    else:
        say(verdict.outcome.value)
        for reason in verdict.reasons:
            say(f"  {reason.text}")
        for name, value in verdict.evidence.items():
            if name != "search":
                say(f"  {name:20} {value}")
    return verdict.outcome.exit_code
