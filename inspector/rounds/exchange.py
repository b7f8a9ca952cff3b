"""What every party of a round does with messages: finds them, and tells what came in time."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from firmware_sim.errors import CallerError
from inspector.rounds.openings import Asked
from inspector.rounds.receipts import check_time, deadline
from inspector.rounds.world import INSPECTORATE, Message, World
from monitor.files import remove

__all__ = ["Early", "announced_in", "asked_in", "needed", "openings", "past"]


class Early(CallerError):
    """Another party still has time for what a step needs."""


def announced_in(world: World, party: str, now: datetime | None = None) -> Message:
    """The announcement of the newest round, as a party has it.

    Args:
        now: when the party says it acts.

    Raises:
        CallerError: it has none, or no party can act in the round at that time.
    """
    found = world.announcement(party)
    if found is None:
        raise CallerError("no round has been announced")
    if now is not None:
        check_time(found, now)
    return found


def needed(world: World, party: str, kind: str) -> Message:
    """What the inspectorate has sent a party in the newest round; CallerError if it has not."""
    found = world.read(party, kind, INSPECTORATE, world.public(INSPECTORATE))
    if found is None:
        raise CallerError(f"the inspectorate has sent no {kind} in round {world.round}")
    return found


def asked_in(world: World, party: str, *, lab: str = "") -> dict[str, Asked]:
    """By the name of a run's folder, what labs were asked to open, or one of them."""
    wanted = needed(world, party, "order").predicate["open"]
    return {name: Asked.from_json(each) for name, each in wanted.items() if name.startswith(f"{lab}." if lab else "")}


def past(world: World, kind: str, now: datetime) -> datetime:
    """The moment after a deadline of the newest round, or now if that is later: a party that waits for it acts then."""
    return max(now, deadline(announced_in(world, INSPECTORATE), kind) + timedelta(seconds=1))


def openings(world: World, party: str) -> Path:
    """Where labs open runs to a party: to the cluster what was drawn, to the inspectorate no states and samples."""
    path = world.folder / party / "openings" / f"{world.round:04d}"
    if path.is_symlink() or not path.is_dir():
        remove(path)  # what others put in its place counts as no one's
    path.mkdir(parents=world.own is not None, exist_ok=True)
    return path
