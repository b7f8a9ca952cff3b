"""``ranks``: which process of a distributed job departed from the program."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, add_trust, print_json, say
from analysis.commands.runs import require_runs
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register"]


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "ranks",
        description="Repeats the run in one process and compares what each rank signed of each step; names the first "
        "step with a difference. Exit code 1 if there is one.",
        epilog="JSON, an object for each difference: step, rank, kind (the first thing that differs, such as batch, "
        "loss or shard; `text` says it in a sentence), text",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, with RUN.ranks next to it")
    add_trust(parser)
    add_json(parser)
    parser.set_defaults(handler=_ranks)


def _ranks(arguments: argparse.Namespace) -> int:
    from inspector.inspection.drift import executable_run
    from inspector.inspection.trust import Trust
    from monitor.distributed.attribution import departures
    from monitor.distributed.statements import ranks_path

    require_runs([arguments.run])
    if not ranks_path(arguments.run).is_dir():
        raise CallerError(f"there is no {ranks_path(arguments.run)}: a run of one process has no ranks to compare")
    trust = Trust.load(arguments.trust, [arguments.run])
    run, _ = executable_run(arguments.run, trust)
    found = departures(run, trust.labs[run.metadata.lab])
    if arguments.json:
        print_json([asdict(each) for each in found])
    else:
        for each in found:
            say(f"step {each.step}, rank {each.rank}: {each.text}")
        if not found:
            say("every rank did what the program says")
    return 1 if found else 0
