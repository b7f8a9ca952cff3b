"""After a round: lab and cluster play a game about a step on which they differ, and anybody can decide it again.

What they sign opens one operator's inputs of the lab's training, so that it is the parties who choose to whom it goes.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from firmware_sim.errors import CallerError
from inspector.bundle.checker import contested_in
from inspector.bundle.contents import read_bundle
from inspector.bundle.contests import Side, hold
from inspector.bundle.runs import HeldRun
from inspector.rounds.exchange import openings
from inspector.rounds.world import CLUSTER, INSPECTORATE, World
from monitor.replay.prover import RunProver
from monitor.transcript import RunFolder

__all__ = ["contest"]


def contest(world: World, *, now: datetime, cluster: RunProver | None = None) -> bytes:
    """Let lab and cluster answer for the first step about which they differ in the newest verdict; returns the game.

    Args:
        cluster: how it takes the lab's steps; by default from what was opened to it, as they were recorded.

    Raises:
        CallerError: there is no verdict yet, no replay in it departs from what a lab signed, or the lab's run is gone.
    """
    bundle = world.folder / INSPECTORATE / "verdicts" / f"{world.round:04d}.json"
    if not bundle.exists():
        raise CallerError(f"round {world.round} has no verdict yet")
    trust = world.trust()
    found = contested_in(read_bundle(bundle), trust)
    if not found:
        raise CallerError(f"all replays of round {world.round} agree with what the labs signed")
    run = found[0][0]
    name, folder = _folder_of(world, run)
    side, key = world.side(run.lab), trust.key_of(run.lab)
    opened = RunFolder(openings(world, CLUSTER) / name, key, opened=())
    return hold(
        run,
        [(signer, replay) for _, signer, replay in found],
        trust,
        lab=Side(run=RunFolder(folder, key), prover=side.prover(folder), key=side.key),
        cluster=Side(run=opened, prover=cluster or RunProver(opened), key=world.key(CLUSTER)),
        referee=world.key(INSPECTORATE),
        now=now,
    )


def _folder_of(world: World, run: HeldRun) -> tuple[str, Path]:
    """Where the lab holds a run, and by which name it is opened to the cluster."""
    for name, place in world.runs(run.lab).items():
        folder = Path(place)
        if RunFolder(folder, world.trust().key_of(run.lab)).manifest.run == run.run_id:
            return f"{run.lab}.{name}", folder
    raise CallerError(f"{run.lab} has no folder in this world with the run {run.run_id[:16]}…")
