"""The notes that inspectorate and cluster take of messages: when each was found, and which came first.

    received/ROUND.json   when the party last looked, and its notes, in the order of arrival
    received/ROUND/       the noted messages, by digest: what happens to the inbox afterwards changes nothing

The date that a sender writes decides nothing. A message is late if the party has already acted on others of its kind,
or has looked after the deadline without finding it. Of each sender and kind, the first message that is not late counts.
A second one that says something else is kept as evidence against the sender; further ones are ignored. The inspectorate
signs receipts for what it noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import lru_cache

from firmware_sim import limits
from firmware_sim.errors import CallerError
from firmware_sim.evidence import canonical
from inspector.rounds.world import CLUSTER, INSPECTORATE, Message, World, open_message, sealed, time_text
from monitor.files import locked, write_whole
from monitor.transcript import parse_time

__all__ = ["check_time", "deadline", "is_late", "missing", "noted", "receipts_of", "take", "twice"]

_CLOSED_BY = {"heads": "draw", "answers": "order", "openings": "results"}
"""By kind of message, the kind that a party sends once it has acted on those."""
_YEAR = timedelta(days=365)
_TWO = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Note:
    """A message that was found: its digest, what of it is signed (both in hex), and whether it came too late."""

    kind: str
    sender: str
    message: str
    time: str
    signed: str
    late: bool

    def receipt(self) -> dict[str, str]:
        """What a receipt says of it."""
        return {"kind": self.kind, "sender": self.sender, "message": self.message, "time": self.time}


def take(world: World, party: str, now: datetime) -> None:
    """Look into the inbox of inspectorate or cluster, and note what labs and cluster have sent.

    Raises:
        CallerError: no round was announced, or the time is before the announcement or years after the round.
    """
    announced = world.announcement(party)
    if announced is None:
        raise CallerError("no round has been announced")
    check_time(announced, now)
    path = world.home(party) / "received" / f"{world.round:04d}.json"
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    keys = world.trust().labs
    senders = {lab: keys[lab] for lab in announced.predicate["labs"] if lab in keys}
    senders |= {CLUSTER: world.public(CLUSTER)} if party == INSPECTORATE else {}
    with locked(path):
        looked, notes = _load(world, party)
        earlier = len(notes)
        for sender, key in senders.items():
            kinds = {"results"} if sender == CLUSTER else set(_CLOSED_BY)
            known = {each.message for each in notes}
            for kind, found in world.posted(party, sender, key, kinds, known=known, announced=announced):
                before = [each.signed for each in notes if (each.kind, each.sender) == (kind, sender)]
                if len(before) < _TWO and found.signed.hex() not in before:
                    late = is_late(world, party, kind, announced, looked)
                    digests = {"message": found.digest.hex(), "signed": found.signed.hex()}
                    notes.append(_Note(kind=kind, sender=sender, time=time_text(now), late=late, **digests))
                    write_whole(folder / f"{found.digest.hex()}.json", found.envelope)
        if party == INSPECTORATE:  # before it is noted: after a crash in between they come again
            _give_receipts(world, announced, notes, {each.sender for each in notes[earlier:]})
        write_whole(path, canonical.encode({"looked": time_text(now), "notes": [asdict(each) for each in notes]}))


def check_time(announced: Message, now: datetime) -> None:
    """CallerError of a time before the announcement or a year after the round: no party acts in it then."""
    begun, ends = parse_time(announced.predicate["time"]), deadline(announced, "results")
    if not begun <= now <= ends + _YEAR:
        text = f"the round was announced at {time_text(begun)} and ends at {time_text(ends)}"
        raise CallerError(f"{text}: {time_text(now)} is before that or years after it; give another --now")


def is_late(world: World, party: str, kind: str, announced: Message, looked: datetime | None) -> bool:
    """Return whether a message that was not there at the last look is too late if it is found now.

    Args:
        looked: when that was.
    """
    closing = _CLOSED_BY.get(kind)
    if closing is not None and world.sent(party, closing, world.public(party)) is not None:
        return True
    return looked is not None and looked > deadline(announced, kind)


def deadline(announced: Message, kind: str) -> datetime:
    """Until when a kind of message counts."""
    return parse_time(announced.predicate["deadlines"][kind])


def noted(world: World, party: str, kind: str, sender: str) -> Message | None:
    """The first message of a sender and kind that a party has noted in the newest round, in time; None if none.

    Of a lab that is not registered none is.
    """
    key = world.public(CLUSTER) if sender == CLUSTER else world.trust().labs.get(sender)
    if key is None:
        return None
    for each in _load(world, party)[1]:
        if (each.kind, each.sender, each.late) == (kind, sender, False):
            path = world.home(party) / "received" / f"{world.round:04d}" / f"{each.message}.json"
            return open_message(path.name, path.read_bytes(), kind, key)
    return None


def missing(world: World, party: str, kind: str, senders: Iterable[str]) -> list[str]:
    """Of these senders those from whom a party has noted nothing of a kind in time."""
    came = {each.sender for each in _load(world, party)[1] if each.kind == kind and not each.late}
    return [each for each in senders if each not in came]


def twice(world: World) -> list[tuple[str, str, Sequence[str]]]:
    """Sender, kind and digests of what somebody has signed in two ways for the newest round."""
    said: dict[tuple[str, str], list[str]] = {}
    for each in _load(world, INSPECTORATE)[1]:
        said.setdefault((each.sender, each.kind), []).append(each.message)
    return [(*place, digests) for place, digests in sorted(said.items()) if len(digests) == _TWO]


def receipts_of(world: World, *kinds: str) -> list[dict[str, str]]:
    """What the inspectorate has noted in time of some kinds, as receipts say it."""
    return [each.receipt() for each in _load(world, INSPECTORATE)[1] if not each.late and each.kind in kinds]


def _give_receipts(world: World, announced: Message, notes: list[_Note], senders: set[str]) -> None:
    """Return to each of these senders a receipt for all that came from it in the round."""
    for sender in sorted(senders):
        body = {"receipts": [each.receipt() for each in notes if each.sender == sender]}
        envelope = sealed("receipts", announced.digest, body, world.key(INSPECTORATE))
        with suppress(OSError):  # its inbox is the sender's own
            world.post(sender, "receipts", INSPECTORATE, envelope)


def _load(world: World, party: str) -> tuple[datetime | None, list[_Note]]:
    """When a party last looked in the newest round, and what it has noted."""
    path = world.home(party) / "received" / f"{world.round:04d}.json"
    if not path.exists():
        return None, []
    looked, notes = _parsed(path.read_bytes())
    return looked, [*notes]


@lru_cache(4)
def _parsed(content: bytes) -> tuple[datetime, Sequence[_Note]]:
    """What was written last, which is asked for once for each lab."""
    data = canonical.decode(content, most=limits.MEMORY_BYTES)
    return parse_time(data["looked"]), tuple(_Note(**each) for each in data["notes"])
