"""``run stats`` and ``fsck``: what a run folder holds, and whether its files agree with each other."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, finish
from analysis.commands.runs import require_runs, trust_path

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register"]


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommands."""
    parser = subparsers.add_parser("run", help="what a run folder holds: run stats RUN")
    asked = parser.add_subparsers(dest="asked", required=True, metavar="WHAT")
    stats = asked.add_parser(
        "stats",
        help="bytes by kind of file, for each step and for each checkpoint",
        epilog="JSON: an object with run, finished, steps, bytes, files, released (checkpoints that "
        "were deleted as declared), growth (bytes for each step, checkpoints left "
        "out), first and last (bytes for each step of the first and last tenth), and kinds: a list of kind, files, "
        "bytes, per_step, each (bytes for each file)",
    )
    stats.add_argument("run", type=Path, metavar="RUN", help="run folder")
    stats.add_argument("--trust", type=Path, action="append", metavar="FILE", help="default: RUN.trust.json")
    add_json(stats)
    stats.set_defaults(handler=_stats)

    parser = subparsers.add_parser(
        "fsck",
        help="recompute every digest, root and signature of a run folder with code of its own",
        epilog="JSON: an object with problems (a list of lines), lab, finished, steps, files, bytes, and how many "
        "batches, states and commits of chips were recomputed; exit code 1 where there is a problem",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--trust", type=Path, action="append", metavar="FILE", help="default: RUN.trust.json")
    add_json(parser)
    parser.set_defaults(handler=_fsck)


def _stats(arguments: argparse.Namespace) -> int:
    from inspector.inspection.transcripts import open_run
    from inspector.inspection.trust import Trust
    from inspector.storage.stats import run_stats

    require_runs([arguments.run])
    trust = Trust.load(arguments.trust or [trust_path(arguments.run)], [arguments.run])
    stats = run_stats(open_run(arguments.run, trust))
    lines = [f"{'kind':12} {'files':>9} {'bytes':>14} {'bytes/step':>12} {'bytes/file':>12}"]
    lines += [
        f"{row.kind:12} {row.files:9} {row.bytes:14} {row.per_step:12.1f} {row.each:12.1f}" for row in stats.kinds
    ]
    state = "finished" if stats.finished else "unfinished"
    lines += [
        f"{'all':12} {stats.files:9} {stats.bytes:14}",
        *([f"{stats.released} older checkpoints were released, as declared"] if stats.released else []),
        f"{stats.steps} steps, {state}; {stats.growth:.1f} bytes a step without checkpoints "
        f"({stats.first:.1f} in the first tenth, {stats.last:.1f} in the last)",
    ]
    return finish(arguments, asdict(stats), lines)


def _fsck(arguments: argparse.Namespace) -> int:
    from inspector.inspection.trust import Trust
    from inspector.storage.fsck import fsck

    require_runs([arguments.run])
    trust = Trust.load(arguments.trust or [trust_path(arguments.run)], [arguments.run])
    report = fsck(arguments.run, {lab: key.raw for lab, key in trust.labs.items()})
    lines = report.problems or [
        f"{report.files} files of {report.bytes} bytes and {report.steps} steps agree with each other and with what "
        f"{report.lab} signed; recomputed: {report.batches} batches, {report.states} states, {report.commits} commits "
        "in chips' logs"
    ]
    finish(arguments, asdict(report), lines)
    return 1 if report.problems else 0
