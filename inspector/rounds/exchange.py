"""What every party of a round does with messages: finds them, and tells what came in time."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from firmware_sim.errors import CallerError
from inspector.rounds.opening import Asked
from inspector.rounds.world import INSPECTORATE, Message, World
from monitor.transcript import parse_time

__all__ = ["announced_in", "asked_in", "deadline", "from_lab", "is_late", "needed", "openings", "past"]


def announced_in(world: World, party: str) -> Message:
    """The announcement of the newest round, as a party has it; CallerError if it has none."""
    found = world.read(party, "announcement", INSPECTORATE, world.public(INSPECTORATE))
    if found is None:
        raise CallerError("no round was announced")
    return found


def needed(world: World, party: str, kind: str) -> Message:
    """What the inspectorate has sent a party in the newest round; CallerError if it has not."""
    found = world.read(party, kind, INSPECTORATE, world.public(INSPECTORATE))
    if found is None:
        raise CallerError(f"the inspectorate has sent no {kind} in round {world.round}")
    return found


def asked_in(world: World, party: str) -> dict[str, Asked]:
    """By the name of a run's folder, what labs were asked to open."""
    ordered = needed(world, party, "order")
    return {name: Asked.from_json(each) for name, each in ordered.predicate["open"].items()}


def from_lab(world: World, announced: Message, kind: str, lab: str, *, to: str = INSPECTORATE) -> Message | None:
    """What a lab sent of this round and in time."""
    found = world.read(to, kind, lab, world.trust().labs[lab])
    if found is None or found.about != announced.digest or is_late(found, announced, kind):
        return None
    return found


def is_late(message: Message, announced: Message, kind: str) -> bool:
    """Tell whether a message came after its deadline."""
    return message.received > deadline(announced, kind)


def past(world: World, kind: str, now: datetime) -> datetime:
    """The moment after a deadline of the newest round, or now if that is later: whoever waits for it acts then."""
    return max(now, deadline(announced_in(world, INSPECTORATE), kind) + timedelta(seconds=1))


def deadline(announced: Message, kind: str) -> datetime:
    """Until when a kind of message counts."""
    return parse_time(announced.predicate["deadlines"][kind])


def openings(world: World, party: str) -> Path:
    """Where labs open runs to a party: to the cluster what was drawn, to the inspectorate no states and samples."""
    path = world.folder / party / "openings" / f"{world.round:04d}"
    path.mkdir(exist_ok=True)
    return path
