"""What a party on its own machine takes from others: messages, which it files, and the runs that they open.

A message that opens runs is held (``held/SENDER/``) until these are here. So it arrives when all is there that it
speaks of, and its deadline covers the transfer.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import VerifyingKey
from inspector.rounds.receipts import deadline
from inspector.rounds.world import CLUSTER, INSPECTORATE, KINDS, Message, World, file_name, open_message
from monitor.files import remove, write_whole

__all__ = ["OPENS", "Held", "accept", "allowed", "held_in", "key_of", "release"]

OPENS = {(INSPECTORATE, "answers"), (CLUSTER, "openings")}
"""Whom which kind of message opens runs to."""
_MOST = 2
"""Messages of one kind that a sender can have in a round: a second one is evidence against it, a third is nothing."""
_MOST_RECEIPTS = 64
_MOST_ROUND = 9999


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A message that waits, in a file, for the runs that it opens."""

    sender: str
    kind: str
    message: Message
    path: Path


def key_of(world: World, sender: str) -> VerifyingKey:
    """The key of a party of the world; EvidenceError where it has no such party."""
    if sender in (INSPECTORATE, CLUSTER):
        return world.public(sender)
    if sender not in world.trust().labs:
        raise EvidenceError("no party of this world has that name")
    return world.trust().labs[sender]


def allowed(party: str, sender: str) -> tuple[str, ...]:
    """The kinds of message that a party takes from a sender."""
    if sender == INSPECTORATE:
        return ("announcement", "draw", "order", "receipts")
    if party == INSPECTORATE:
        return ("results",) if sender == CLUSTER else ("heads", "answers", "openings")
    return ("openings",) if party == CLUSTER and sender != CLUSTER else ()


def accept(world: World, party: str, sender: str, kind: str, envelope: bytes) -> None:
    """File a message in the party's inbox, or hold it; once or again, that is the same.

    Raises:
        EvidenceError: its sender has not signed it as that kind, has sent others instead, or may not send it.
        CallerError: it is about another round than the newest that is known here.
    """
    if kind not in allowed(party, sender):
        raise EvidenceError(f"{sender} may not send {party} a message of kind {kind}")
    message = open_message("", envelope, kind, key_of(world, sender))
    if message is None:
        raise EvidenceError(f"this is not a well-formed message of kind {kind} that {sender} has signed")
    number = _round_of(world, party, kind, message)
    digest = message.digest.hex()
    places = (world.inbox(party) / sender, _held(world, party) / sender)
    names = {each.name for place in places for each in place.glob(file_name(number, kind, "*"))}
    if file_name(number, kind, digest) in names:
        return
    if len(names) >= (_MOST_RECEIPTS if kind == KINDS[-1] else _MOST):
        raise EvidenceError(f"{sender} has already sent a different message of kind {kind} in round {number}")
    if (party, kind) in OPENS:
        places[1].mkdir(parents=True, exist_ok=True)
        write_whole(places[1] / file_name(number, kind, digest), envelope)
    else:
        world.post(party, kind, sender, envelope, number=number)


def held_in(world: World, party: str, *, but: Collection[str] = ()) -> list[Held]:
    """The messages of the newest round that wait, but for those of some senders; those of earlier ones are deleted."""
    found = []
    for path in sorted(_held(world, party).glob("*/*.json")):
        sender, kind = path.parent.name, path.name.split(".")[0].rpartition("-")[2]
        if sender in but:
            continue
        key = world.trust().labs.get(sender)  # None of a lab that has left the registry; only labs open files
        message = None if key is None else open_message(path.name, path.read_bytes(), kind, key)
        if message is None or not path.name.startswith(f"{world.round:04d}-"):
            remove(path)
        else:
            found.append(Held(sender=sender, kind=kind, message=message, path=path))
    return found


def release(world: World, party: str, held: Held) -> None:
    """File a message that waited; if its deadline is over, it never came."""
    announced = world.announcement(party)
    if announced is not None and datetime.now(UTC) <= deadline(announced, held.kind):
        world.post(party, held.kind, held.sender, held.message.envelope)
    remove(held.path)


def _round_of(world: World, party: str, kind: str, message: Message) -> int:
    """The number of a message's round."""
    announced = world.announcement(party)
    if kind != KINDS[0]:
        if announced is None or message.about != announced.digest:
            raise CallerError("the message is not about the newest round that is known here")
        return world.round
    number = int(message.predicate["round"])
    is_known = announced is not None and announced.digest == message.digest
    if not (world.round < number <= _MOST_ROUND or is_known):
        raise CallerError(f"round {world.round} has already been announced here")
    if party not in (CLUSTER, *message.predicate["labs"]):
        raise CallerError(f"{party} takes no part in round {number}")
    return number


def _held(world: World, party: str) -> Path:
    return world.home(party) / "held"
