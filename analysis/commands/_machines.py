"""``world split`` and ``world run``: a process for each party of a world on this machine."""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from pathlib import Path

from analysis.commands._common import count, finish
from firmware_sim.errors import CallerError

__all__ = ["add_split", "run_machines", "split_world"]

_LOOK = 0.1


def add_split(parser: argparse.ArgumentParser) -> None:
    """Add where the folders go, and at which addresses their parties will be."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder for the parties' folders")
    text = "port of the inspectorate; the others get the ports after it, and metrics those 1000 above (default 8440)"
    parser.add_argument("--first-port", type=count, default=8440, metavar="N", help=text)


def split_world(arguments: argparse.Namespace) -> int:
    """``world split``: write NAME/ and NAME.toml for each party."""
    from analysis.machines import lay_out
    from inspector.rounds.parts import parties_of
    from inspector.rounds.world import World

    world, out = World(arguments.world), arguments.out
    parties = parties_of(world)
    if not 0 < arguments.first_port <= 65_535 - 1000 - len(parties):
        raise CallerError(f"--first-port must lie in 1 … {65_535 - 1000 - len(parties)}")
    lay_out(world, out, {party: arguments.first_port + place for place, party in enumerate(parties)})
    data = {"folder": str(out), "parties": parties}
    return finish(arguments, data, [f"{each:14} {out / f'{each}.toml'}" for each in parties])


def run_machines(arguments: argparse.Namespace, words: list[str]) -> int:
    """Start a process for each party of a split world; exit code of the inspectorate's, which prints the verdict.

    Args:
        words: options of the inspectorate's round.
    """
    from analysis.machines import party_process, require_running, served_as
    from inspector.rounds.world import CLUSTER, INSPECTORATE

    files = {path.stem: path.absolute() for path in sorted(arguments.folder.glob("*.toml"))}
    if not {INSPECTORATE, CLUSTER} <= set(files):
        raise CallerError(f"{arguments.folder} is not a split world; `world split WORLD --out DIR` makes one")
    with ExitStack() as stack:
        others = {
            party: stack.enter_context(party_process(served_as(party), path.with_suffix(".log"), "--config", str(path)))
            for party, path in files.items()
            if party != INSPECTORATE
        }
        for each in others.values():
            stack.callback(each.terminate)  # all of them, before the first is waited for
        own = files[INSPECTORATE]
        with party_process(INSPECTORATE, own.with_suffix(".log"), "--config", str(own), *words) as inspectorate:
            while (code := inspectorate.poll()) is None:
                require_running(others)
                time.sleep(_LOOK)
            return code
