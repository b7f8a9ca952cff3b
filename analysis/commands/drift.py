"""``drift``: what a run would be on other devices without control."""

from __future__ import annotations

import argparse
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, finish
from analysis.commands._inspection_options import DEFAULT_REPLAY_DEVICES, executor
from analysis.commands.runs import require_runs, trust_path

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register"]


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "drift",
        epilog="JSON, an object for each device: device, native_seconds, native_first_different_step, "
        "native_step_digests_equal, native_drift_max, native_weights_different (share of the weights that differ "
        "in plain FP32), policy (number formats of the run: compute and grid), "
        "logged_decisions (number of roundings whose direction, up or down, is in the run's rounding log), "
        "turned_decisions (those that this device would have decided otherwise), turned_by_step, "
        "diverges_from_step_without_log (first step with a turned decision, or null)",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--device",
        action="append",
        metavar="NAME",
        help="device to compare with this machine's own arithmetic, repeatable (default: sse41 and mkl-compatible)",
    )
    parser.add_argument("--trust", type=Path, action="append", metavar="FILE", help="default: RUN.trust.json")
    add_json(parser)
    parser.set_defaults(handler=_drift)


def _drift(arguments: argparse.Namespace) -> int:
    from inspector.inspection.drift import drift, drift_text
    from inspector.inspection.trust import Trust

    require_runs([arguments.run])
    trust = Trust.load(arguments.trust or [trust_path(arguments.run)], [arguments.run])
    with executor(arguments) as devices:
        rows = list(drift(arguments.run, trust, arguments.device or DEFAULT_REPLAY_DEVICES, worker=devices.run))
    return finish(arguments, rows, map(drift_text, rows))
