"""The folders of a world's parties, each for its own machine."""

from __future__ import annotations

import shutil
from pathlib import Path

from firmware_sim.errors import CallerError
from inspector.rounds.world import CLUSTER, INSPECTORATE, Labs, World

__all__ = ["parties_of", "split"]

_STAYS = ("openings", "handed", "incoming", "held")
"""What belongs to one round, and is not taken along."""


def parties_of(world: World) -> list[str]:
    """Inspectorate, cluster, and the labs that have joined."""
    return [INSPECTORATE, CLUSTER, *sorted(world.trust().labs)]


def split(world: World, party: str, target: Path, labs: Labs | None = None) -> World:
    """Copy what is one party's into its own folder, with the registry and the inspectorate's public key.

    Raises:
        CallerError: the folder is there already, or a round is under way.
    """
    if target.exists():
        raise CallerError(f"{target}: exists already")
    if world.round and not (world.home(INSPECTORATE) / "verdicts" / f"{world.round:04d}.json").exists():
        raise CallerError(f"round {world.round} is not decided yet")
    home = target / world.home(party).relative_to(world.folder)
    shutil.copytree(world.home(party), home, ignore=shutil.ignore_patterns(*_STAYS))
    shutil.copytree(world.registry.parent, target / "registry")
    for folder in (home / "inbox" / INSPECTORATE, home / "openings", target / INSPECTORATE):
        folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(world.home(INSPECTORATE) / "key.pub", target / INSPECTORATE / "key.pub")
    return World(target, labs, own=party)
