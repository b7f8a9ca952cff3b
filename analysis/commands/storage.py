"""``run`` and ``fsck``: what a run folder holds, how it is handed over, and whether its files agree."""

from __future__ import annotations

import argparse
import hashlib
from argparse import ArgumentParser
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, add_trust, finish
from analysis.commands.runs import require_runs, trust_path
from firmware_sim.errors import Damaged

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register"]


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommands."""
    parser = subparsers.add_parser("run")
    asked = parser.add_subparsers(dest="asked", required=True, metavar="WHAT")
    stats = asked.add_parser(
        "stats",
        help="bytes by kind of file, for each step and for each checkpoint",
        epilog="JSON keys: run, finished, steps, bytes, files, released (checkpoints that were deleted as declared), "
        "growth (bytes for each step, without checkpoints), first (bytes for each step of the first tenth), last (of "
        "the last tenth), kinds (a list with kind, files, bytes, per_step, and each: bytes for each file)",
    )
    stats.add_argument("run", type=Path, metavar="RUN", help="run folder")
    stats.add_argument("--trust", type=Path, action="append", metavar="FILE", help="default: RUN.trust.json")
    add_json(stats)
    stats.set_defaults(handler=_stats)
    export = asked.add_parser(
        "export",
        help="pack a run into one archive; the lab signs the list of its files",
        epilog="JSON keys: archive, sha256. The archive is a plain tar; `run import` unpacks it.",
    )
    export.add_argument("run", type=Path, metavar="RUN", help="run folder, with its lab's folder RUN.lab next to it")
    export.add_argument("--out", type=Path, metavar="ARCHIVE", help="default: RUN.tar")
    add_json(export)
    export.set_defaults(handler=_export)
    taken = asked.add_parser(
        "import",
        help="unpack an archive, if every file matches the list that its lab signed",
        epilog="JSON keys: run, lab, files, bytes. The signed list is kept as RUN.export.json: a "
        "fault in a file that matches this list is the lab's fault, not the copy's.",
    )
    taken.add_argument("archive", type=Path, metavar="ARCHIVE", help="archive that `run export` wrote")
    taken.add_argument("--out", type=Path, required=True, metavar="RUN", help="the new run folder")
    taken.add_argument("--sha256", metavar="HEX", help="the archive's digest, which its lab gave by another channel")
    add_trust(taken)
    add_json(taken)
    taken.set_defaults(handler=_import)

    parser = subparsers.add_parser(
        "fsck",
        epilog="JSON keys: problems (a list of lines), ignored (files that are no part of the run), lab, finished, "
        "steps, files, bytes, batches and states and commits (how many of each were recomputed; a commit is a record "
        "in a chip's log). Exit code 1: there is a problem",
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


def _export(arguments: argparse.Namespace) -> int:
    from monitor.lab.desk import is_at_work
    from monitor.lab.evidence import copy_run
    from monitor.lab.simulated_lab import SimulatedLab, lab_path
    from monitor.transcript import RunFolder
    from monitor.transcript.export import export_run

    require_runs([arguments.run])
    run, lab = arguments.run.resolve(), lab_path(arguments.run)
    key = SimulatedLab.lab_key(SimulatedLab.read_config(lab))
    out = arguments.out or Path(f"{arguments.run.resolve()}.tar")
    with TemporaryDirectory() as place:
        still = Path(place) / run.name if is_at_work(lab) else run
        if still != run:
            copy_run(run, still)
        digest = export_run(RunFolder(still, key.verifying), key, out)
    return finish(arguments, {"archive": str(out), "sha256": digest}, [f"{out} has SHA-256 {digest}"])


def _import(arguments: argparse.Namespace) -> int:
    from inspector.inspection.trust import Trust
    from monitor.transcript.export import import_run

    if arguments.sha256 is not None:
        with arguments.archive.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != arguments.sha256.lower():
            raise Damaged(f"{arguments.archive} has SHA-256 {found}")
    export = import_run(arguments.archive, Trust.load(arguments.trust).labs, arguments.out)
    size = sum(entry.length for entry in export.files.values())
    data = {"run": str(arguments.out), "lab": export.lab, "files": len(export.files), "bytes": size}
    text = f"{len(export.files)} files of {size} bytes are what {export.lab} signed for; they are in {arguments.out}"
    return finish(arguments, data, [text])


def _fsck(arguments: argparse.Namespace) -> int:
    from inspector.inspection.trust import Trust
    from inspector.storage.fsck import fsck

    require_runs([arguments.run])
    trust = Trust.load(arguments.trust or [trust_path(arguments.run)], [arguments.run])
    report = fsck(arguments.run, {lab: key.raw for lab, key in trust.labs.items()})
    lines = report.problems[:] or [
        f"{report.files} files of {report.bytes} bytes and {report.steps} steps agree with each other and with what "
        f"{report.lab} signed; recomputed: {report.batches} batches, {report.states} states, {report.commits} commits "
        "in chips' logs"
    ]
    lines += [f"ignored, unread: {', '.join(report.ignored)}"] if report.ignored else []
    finish(arguments, asdict(report), lines)
    return 1 if report.problems else 0
