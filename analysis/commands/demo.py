"""``demo``."""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, count, print_json, progress, visible
from firmware_sim.errors import DeviceError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register"]


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser("demo")
    parser.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR", help="where to write (default: demo)")
    parser.add_argument("--seed", type=count, metavar="S", help="seed of everything random (default 2026)")
    text = "also run a round and a dispute between processes over HTTP (needs `pip install 'chipwitness[server]'`)"
    parser.add_argument("--processes", action="store_true", help=text)
    add_json(parser)
    parser.epilog = "JSON: the content of summary.json. Exit code 0: every verdict is the right one"
    parser.set_defaults(handler=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from inspector.devices import enter

    enter("native")
    from analysis.demo import LABS, SEED, as_expected, run_demo

    with progress(arguments, len(LABS) + 4, "lab") as bar:

        def say(line: str) -> None:
            if not arguments.json:
                bar.write(visible(line))
                sys.stdout.flush()

        demo = run_demo(
            arguments.out,
            say=say,
            advance=lambda: bar.update() and None,
            seed=SEED if arguments.seed is None else arguments.seed,
            processes=arguments.processes,
        )
    if arguments.json:
        print_json(demo.summary)
    else:
        print(visible(f"summary  {arguments.out / 'summary.json'}"))
        for name in ("report.html", "report.pdf"):
            if (arguments.out / name).is_file():
                print(visible(f"report   {arguments.out / name}"))
    if not as_expected(demo.summary):
        raise DeviceError("a verdict of the demo is not the expected one; see summary.json")
    return 0
