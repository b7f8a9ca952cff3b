"""The append-only log: RFC 9162 leaves in ``events``, a signed head for every size in ``heads``."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, insert, select, update

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import EMPTY_ROOT, SignedHead, SigningKey, canonical, leaf_hash, node_hash
from inspector.registry._schema import events, heads, tail
from inspector.registry.signing import SignedStatement

__all__ = ["Frontier", "LogEntry", "append", "read_frontier"]

_HASH_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """One event as it is hashed into the log: its index, when the registrar received it, the signed statement."""

    event: int
    received: int
    signed: SignedStatement

    def to_bytes(self) -> bytes:
        return canonical.encode(
            {
                "envelopes": [envelope.decode() for envelope in self.signed.envelopes],
                "event": self.event,
                "kind": self.signed.kind,
                "received": self.received,
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> LogEntry:
        """Return the entry whose encoding is ``data``; raises EvidenceError for anything else."""
        value = canonical.decode(data)
        if not isinstance(value, dict) or set(value) != {"envelopes", "event", "kind", "received"}:
            raise EvidenceError("not a registry log entry")
        envelopes = value["envelopes"]
        if not isinstance(envelopes, list) or not all(isinstance(text, str) for text in envelopes):
            raise EvidenceError("registry log entry holds malformed envelopes")
        if type(value["event"]) is not int or type(value["received"]) is not int or not isinstance(value["kind"], str):
            raise EvidenceError("registry log entry holds malformed fields")
        signed = SignedStatement(kind=value["kind"], envelopes=tuple(text.encode() for text in envelopes))
        return cls(event=value["event"], received=value["received"], signed=signed)


@dataclass(frozen=True, slots=True)
class Frontier:
    """The roots of the complete subtrees that tile ``size`` leaves, largest first: one for each one bit of ``size``."""

    size: int = 0
    hashes: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        if len(self.hashes) != self.size.bit_count():
            raise EvidenceError(
                f"a log of {self.size} events has {self.size.bit_count()} subtrees, but {len(self.hashes)} hashes are "
                "given"
            )

    def extended(self, leaf: bytes) -> Frontier:
        """The frontier after one more leaf."""
        hashes, node, size = list(self.hashes), leaf_hash(leaf), self.size
        while size & 1:
            node = node_hash(hashes.pop(), node)
            size >>= 1
        return Frontier(self.size + 1, (*hashes, node))

    def root(self) -> bytes:
        if not self.hashes:
            return EMPTY_ROOT
        root = self.hashes[-1]
        for subtree in reversed(self.hashes[:-1]):
            root = node_hash(subtree, root)
        return root


def read_frontier(connection: Connection) -> Frontier:
    row = connection.execute(select(tail.c.size, tail.c.frontier)).one_or_none()
    if row is None:
        raise EvidenceError("the log's size is missing")
    return Frontier(row.size, _unpack(row.frontier))


def append(
    connection: Connection, *, received: int, signed: SignedStatement, origin: str, registrar: SigningKey
) -> tuple[int, SignedHead]:
    """Append a statement that has been checked; the caller holds the writer's lock. Returns its index and the head."""
    before = read_frontier(connection)
    entry = LogEntry(event=before.size, received=received, signed=signed).to_bytes()
    after = before.extended(entry)
    head = SignedHead(origin, after.size, after.root())
    connection.execute(insert(events).values(event=before.size, kind=signed.kind, received=received, entry=entry))
    connection.execute(insert(heads).values(size=head.size, head=head.sign(registrar)))
    connection.execute(update(tail).values(size=after.size, frontier=b"".join(after.hashes)))
    return before.size, head


def _unpack(packed: bytes) -> tuple[bytes, ...]:
    if len(packed) % _HASH_BYTES:
        raise EvidenceError("the log's frontier is truncated")
    return tuple(packed[start : start + _HASH_BYTES] for start in range(0, len(packed), _HASH_BYTES))
