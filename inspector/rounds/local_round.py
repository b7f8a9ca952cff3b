"""A whole round in one process, each party by itself in turn."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from firmware_sim.errors import EvidenceError
from inspector.inspection.guards import Settings
from inspector.inspection.replays import Worker
from inspector.inspection.trust import Trust
from inspector.replay.pool import run_worker
from inspector.rounds import steps
from inspector.rounds.steps import Decided
from inspector.rounds.world import Labs, World

__all__ = ["play_round", "world_of"]


def world_of(folder: Path, joining: list[tuple[Path, Trust]], labs: Labs) -> World:
    """The world in a folder, made where there is none, once runs have joined it with their labs' trust files."""
    world = (World if folder.exists() else World.create)(folder, labs)
    for run, trust in joining:
        world.join(trust, {run.resolve().name: run})
    return world


def play_round(
    world: World,
    settings: Settings,
    *,
    minutes: float = 60,
    refusals: int = 0,
    rules: Path | None = None,
    now: datetime,
    worker: Worker = run_worker,
) -> Decided:
    """Play a round; a lab that has no folder here, or cannot read its own, is waited for and stays silent.

    Args:
        minutes, refusals, rules: as ``steps.announce`` takes them.
    """
    every = sorted(world.trust().labs)
    labs = [lab for lab in every if world.runs(lab)]
    steps.announce(world, settings, minutes=minutes, refusals=refusals, now=now, rules=rules)

    def act(kind: str, step: Callable[[str], object], now: datetime) -> datetime:
        """Let all labs act; the moment at which no answer is awaited any more."""
        silent = [lab for lab in every if lab not in labs]
        for lab in labs:
            try:
                step(lab)
            except EvidenceError:
                silent.append(lab)
        return steps.past(world, kind, now) if silent else now

    late = act("heads", lambda lab: steps.hand(world, lab, now=now), now)
    steps.reveal(world, now=late)
    answered = late
    late = act("answers", lambda lab: steps.answer(world, lab, now=answered), late)
    steps.order(world, now=late)
    ordered = late
    late = act("openings", lambda lab: steps.disclose(world, lab, now=ordered), late)
    steps.replay(world, now=late, worker=worker)
    return steps.decide(world, now=late)
