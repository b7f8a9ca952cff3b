"""After a round: lab and cluster both answer for a step about which they differ, and sign; anybody can decide then.

What they sign opens one operator's inputs of the lab's training, so that it is the parties who choose to whom it goes.
"""

from __future__ import annotations

from pathlib import Path

from firmware_sim.errors import CallerError
from inspector.bundle.checker import contested_in
from inspector.bundle.contents import read_bundle
from inspector.bundle.contests import Contest, Contested, hold
from inspector.rounds.exchange import openings
from inspector.rounds.world import CLUSTER, INSPECTORATE, World
from monitor.replay.prover import RunProver
from monitor.replay.steps import execution_of
from monitor.transcript import RunFolder

__all__ = ["contest"]


def contest(world: World, *, cluster: RunProver | None = None) -> Contest:
    """Let lab and cluster answer for the first step about which they differ in the newest verdict.

    Args:
        cluster: how it takes the lab's steps; by default from what was opened to it, as they were recorded.

    Raises:
        CallerError: there is no verdict yet, no replay in it departs from what a lab signed, or the lab's run is gone.
    """
    bundle = world.folder / INSPECTORATE / "verdicts" / f"{world.round:04d}.json"
    if not bundle.exists():
        raise CallerError(f"round {world.round} has no verdict yet")
    found = contested_in(read_bundle(bundle), world.trust())
    if not found:
        raise CallerError(f"all replays of round {world.round} agree with what the labs signed")
    run, step = found[0]
    name, folder = _folder_of(world, run, step)
    side = world.side(run.lab)
    opened = RunFolder(openings(world, CLUSTER) / name, world.trust().key_of(run.lab), opened=())
    return hold(
        run,
        step,
        opened.program(execution_of(run.leaves[step][0]).program).encoded,
        lab=side.prover(folder),
        lab_key=side.key,
        cluster=cluster or RunProver(opened),
        cluster_key=world.key(CLUSTER),
    )


def _folder_of(world: World, run: Contested, step: int) -> tuple[str, Path]:
    """Where the lab holds a run that has taken this step, and by which name it is opened to the cluster."""
    for name, place in world.runs(run.lab).items():
        folder = Path(place)
        leaves = RunFolder(folder, world.trust().key_of(run.lab)).load_steps()[0]
        if step < len(leaves) and leaves[step].encoded() == run.leaves[step][1]:
            return f"{run.lab}.{name}", folder
    raise CallerError(f"{run.lab} has no folder in this world with the contested step {step}")
