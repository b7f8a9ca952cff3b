"""``explore``: a page with sliders over the closed forms, precomputed campaigns and, if wanted, recorded runs."""

from __future__ import annotations

import argparse
import shlex
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.commands._common import add_json, count, finish, progress
from firmware_sim.errors import CallerError, file_error
from monitor.files import write_whole

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["register"]

_TRIALS = 500
_REPORT = "report.html"


def register(subparsers: _SubParsersAction[ArgumentParser]) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "explore",
        description="Write one HTML file that works without server or network. It has sliders for the formulas, "
        "simulated campaigns, and the time line of a run, or of all runs of a demo.",
        epilog="JSON keys: page, bytes, scenarios, trials, seed, runs",
    )
    option = parser.add_argument
    option("place", nargs="?", type=Path, metavar="RUN", help="a run folder, or the folder that demo wrote")
    option("--out", type=Path, required=True, metavar="FILE.html", help="where to write; replaced if it is there")
    option("--verdict", type=Path, metavar="FILE", help="what inspect --json printed about RUN, to be shown with it")
    option(
        "--campaign",
        action="append",
        metavar="SCENARIO",
        help="scenario to compute: a TOML file or a built-in name (repeat; default: every built-in one)",
    )
    option(
        "--trials",
        type=count,
        default=_TRIALS,
        metavar="N",
        help=f"campaigns for each combination of settings (default {_TRIALS})",
    )
    option("--seed", type=count, default=0, metavar="S", help="of the campaigns (default 0)")
    add_json(parser)
    parser.set_defaults(handler=_explore)


def _explore(arguments: argparse.Namespace) -> int:
    from analysis.explorer.campaign_tables import precomputed
    from analysis.explorer.page import explorer_page
    from analysis.explorer.runs import opened_runs
    from analysis.scenarios import ready_scenarios

    out: Path = arguments.out
    if out.suffix.lower() not in (".html", ".htm"):
        raise CallerError(f"{out}: the page's name must end in .html")
    if arguments.place is None and arguments.verdict is not None:
        raise CallerError("--verdict needs a run folder")
    runs = None if arguments.place is None else opened_runs(arguments.place, arguments.verdict)
    names = arguments.campaign or list(ready_scenarios())
    with progress(arguments, len(names), "scenario") as bar:
        campaigns = precomputed(
            names, trials=arguments.trials, seed=arguments.seed, progress=lambda name: bar.update() and None
        )
    linked = runs is not None and arguments.place.resolve() == out.resolve().parent and (out.parent / _REPORT).is_file()
    page = explorer_page(
        campaigns=campaigns, runs=runs, command=_command(arguments), report=_REPORT if linked else None
    ).encode("utf-8")
    try:
        write_whole(out, page)
    except OSError as error:
        raise file_error(f"{out} cannot be written", error) from None
    data = {
        "page": str(out),
        "bytes": len(page),
        "scenarios": names,
        "trials": arguments.trials,
        "seed": arguments.seed,
        "runs": [] if runs is None else [each["name"] for each in runs["runs"]],
    }
    return finish(arguments, data, [f"{out}: {len(page):,} bytes; open it in a browser"])


def _command(arguments: argparse.Namespace) -> str:
    words = ["chipwitness", "explore", *([str(arguments.place)] if arguments.place else [])]
    words += [word for name in arguments.campaign or () for word in ("--campaign", name)]
    words += ["--verdict", str(arguments.verdict)] if arguments.verdict else []
    words += ["--trials", str(arguments.trials), "--seed", str(arguments.seed), "--out", arguments.out.name]
    return shlex.join(words)
