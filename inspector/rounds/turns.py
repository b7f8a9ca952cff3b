"""Which step of a round a party owes at a time, by what lies in its own folders; parties in one process take turns.

A party that was stopped goes on from its files: a step is due until its message is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from firmware_sim.errors import EvidenceError
from inspector.inspection.guards import Settings
from inspector.inspection.replays import Worker
from inspector.inspection.trust import Trust
from inspector.replay.pool import run_worker
from inspector.rounds import steps
from inspector.rounds.exchange import Early, needed
from inspector.rounds.receipts import deadline, missing, take
from inspector.rounds.steps import Decided
from inspector.rounds.world import CLUSTER, INSPECTORATE, Labs, Message, World

__all__ = ["DEADLINES", "act", "due", "is_open", "play_round", "world_of"]

DEADLINES = ("heads", "answers", "openings", "results")
"""The kinds of message that have one, in their order."""
_LABS: Mapping[str, tuple[str, str]] = {
    "hand": ("announcement", "heads"),
    "answer": ("draw", "answers"),
    "open": ("order", "openings"),
}
"""By a lab's step, what it answers and what it sends."""


def due(world: World, party: str, now: datetime) -> str | None:
    """The step that a party owes at a time, as the command line names it; None if it has to wait, or owes none.

    Inspectorate and cluster look into their inboxes for that, and note what came.
    """
    announced = world.announcement(party)
    if announced is None:
        return None
    if party == INSPECTORATE:
        return _inspectorate_due(world, announced, now)
    return _cluster_due(world, announced, now) if party == CLUSTER else _lab_due(world, party, announced, now)


def _lab_due(world: World, lab: str, announced: Message, now: datetime) -> str | None:
    key, other = world.side(lab).key.verifying, world.public(INSPECTORATE)
    for step, (asked, sent) in _LABS.items():
        if now <= deadline(announced, sent) and world.sent(lab, sent, key) is None:
            if world.read(lab, asked, INSPECTORATE, other) is None:
                return None
            return step
    return None


def _cluster_due(world: World, announced: Message, now: datetime) -> str | None:
    key = world.public(CLUSTER)
    if world.sent(CLUSTER, "results", key) or not world.read(
        CLUSTER, "order", INSPECTORATE, world.public(INSPECTORATE)
    ):
        return None
    take(world, CLUSTER, now)
    labs = {name.partition(".")[0] for name in needed(world, CLUSTER, "order").predicate["open"]}
    waits = now <= deadline(announced, "openings") and missing(world, CLUSTER, "openings", labs)
    return None if waits else "replay"


def _inspectorate_due(world: World, announced: Message, now: datetime) -> str | None:
    if (world.home(INSPECTORATE) / "verdicts" / f"{world.round:04d}.json").exists():
        return None
    take(world, INSPECTORATE, now)
    key, labs = world.public(INSPECTORATE), announced.predicate["labs"]
    for step, sent, awaited, senders in (
        ("reveal", "draw", "heads", labs),
        ("order", "order", "answers", labs),
        ("decide", None, "results", [CLUSTER]),
    ):
        if sent is None or world.sent(INSPECTORATE, sent, key) is None:
            waits = now <= deadline(announced, awaited) and missing(world, INSPECTORATE, awaited, senders)
            return None if waits else step
    return None


def is_open(world: World) -> bool:
    """Whether the newest round was announced, and is not decided yet."""
    path = world.home(INSPECTORATE) / "verdicts" / f"{world.round:04d}.json"
    sent = world.sent(INSPECTORATE, "announcement", world.public(INSPECTORATE)) if world.round else None
    return sent is not None and not path.exists()


def act(world: World, party: str, step: str, now: datetime, *, worker: Worker = run_worker) -> Any:
    """Let a party take a step; returns what the step does.

    Raises:
        Early: others still have time for what it needs.
        CallerError, EvidenceError, DeviceError: as the step says.
    """
    if step in _LABS:
        take_step = {"hand": steps.hand, "answer": steps.answer, "open": steps.disclose}[step]
        return take_step(world, party, now=now)
    if step == "replay":
        return steps.replay(world, now=now, worker=worker)
    return {"reveal": steps.reveal, "order": steps.order, "decide": steps.decide}[step](world, now=now)


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
    """Play a round in one process; a lab that has no folder here, or cannot read its own, is waited for, and is silent.

    When no party can act, it is the moment after the next deadline.

    Args:
        minutes, refusals, rules: as ``steps.announce`` takes them.
    """
    labs = [lab for lab in sorted(world.trust().labs) if world.runs(lab)]
    steps.announce(world, settings, minutes=minutes, refusals=refusals, now=now, rules=rules)
    silent: set[tuple[str, str]] = set()
    deadlines = iter(DEADLINES)
    while True:
        acted = False
        for party in (*labs, CLUSTER, INSPECTORATE):
            step = due(world, party, now)
            if step is None or (party, step) in silent:
                continue
            try:
                done = act(world, party, step, now, worker=worker)
            except Early:
                continue
            except EvidenceError:
                if party not in labs:
                    raise
                silent.add((party, step))
            else:
                acted = True
            if isinstance(done, Decided):
                return done
        if not acted:
            now = steps.past(world, next(deadlines), now)
