"""Proof, checkable without the database, that a chip's genesis record and later records are in the registrar's log.

The genesis record is a leaf of its batch's tree, whose root the maker signed; that statement and every later one about
the chip is a leaf of the log under one signed head. What no such proof shows is that no later record exists: for that
ask for a proof under a newer head, or audit the log.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from sqlalchemy import select

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import MerkleTree, SignedHead, VerifyingKey, canonical, verify_consistency, verify_inclusion
from inspector.registry._log import LogEntry
from inspector.registry._schema import batches, changes, events, genesis
from inspector.registry._values import ChipRecord
from inspector.registry.census_statements import CensusResult
from inspector.registry.directory import Registry
from inspector.registry.errors import UnknownChip
from inspector.registry.publications import Revocation
from inspector.registry.signing import Statement, decode_payload
from inspector.registry.statements import Claim, Genesis, Transfer

__all__ = ["ChipProof", "ProvenEntry", "log_consistency", "prove_chip", "verify_chip", "verify_extension"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenEntry:
    """A log entry's bytes and the audit path from it to the head's root."""

    event: int
    entry: bytes
    path: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipProof:
    """A chip's genesis record, its place in its batch, and the log entries of all its records, genesis first."""

    record: ChipRecord
    position: int
    batch_path: tuple[bytes, ...]
    entries: tuple[ProvenEntry, ...]
    head: bytes

    def to_bytes(self) -> bytes:
        """The proof as a file; ``from_bytes`` is its inverse."""
        return canonical.encode(
            {
                "batch_path": [value.hex() for value in self.batch_path],
                "entries": [
                    [proven.event, proven.entry.decode(), [value.hex() for value in proven.path]]
                    for proven in self.entries
                ],
                "head": self.head.decode(),
                "position": self.position,
                "record": [self.record.chip, self.record.model, self.record.identity],
            }
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> ChipProof:
        """Return the proof whose encoding is ``data``; raises EvidenceError for anything else."""
        value = canonical.decode(data, most=limits.STATEMENT_BYTES)
        try:
            proof = cls(
                record=ChipRecord(*value["record"]),
                position=operator.index(value["position"]),
                batch_path=tuple(bytes.fromhex(text) for text in value["batch_path"]),
                entries=tuple(
                    ProvenEntry(
                        event=operator.index(event),
                        entry=entry.encode(),
                        path=tuple(bytes.fromhex(text) for text in path),
                    )
                    for event, entry, path in value["entries"]
                ),
                head=value["head"].encode(),
            )
        except (CallerError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise EvidenceError(f"not a proof of a chip's records: {error}") from None
        if proof.to_bytes() != data:
            raise EvidenceError("not a proof of a chip's records: fields missing, extra or altered")
        return proof


def prove_chip(registry: Registry, chip: str) -> ChipProof:
    """Build the proof of all of ``chip``'s records; hashes the whole batch, O(chips of the batch + events)."""
    with registry.reader() as connection:
        row = connection.execute(select(genesis).where(genesis.c.chip == chip)).one_or_none()
        if row is None:
            raise UnknownChip(f"chip {chip} has no genesis record")
        batch = connection.execute(
            select(batches).where(batches.c.first <= row.ordinal).order_by(batches.c.first.desc()).limit(1)
        ).one()
        siblings = connection.execute(
            select(genesis.c.chip, genesis.c.model, genesis.c.identity)
            .where(genesis.c.ordinal >= batch.first, genesis.c.ordinal < batch.first + batch.count)
            .order_by(genesis.c.ordinal)
        )
        batch_tree = MerkleTree(ChipRecord(*sibling).leaf() for sibling in siblings)
        log = connection.execute(select(events.c.entry).order_by(events.c.event)).scalars().all()
        later = connection.execute(
            select(changes.c.event).where(changes.c.ordinal == row.ordinal).order_by(changes.c.sequence)
        ).scalars()
        numbers = [batch.event, *later]
        head = registry.head_of(connection, len(log))
    tree = MerkleTree(log)
    return ChipProof(
        record=ChipRecord(row.chip, row.model, row.identity),
        position=row.ordinal - batch.first,
        batch_path=tuple(batch_tree.inclusion_proof(row.ordinal - batch.first)),
        entries=tuple(
            ProvenEntry(event=event, entry=log[event], path=tuple(tree.inclusion_proof(event))) for event in numbers
        ),
        head=head,
    )


def verify_chip(proof: ChipProof, *, origin: str, registrar: VerifyingKey) -> tuple[Statement, ...]:
    """Check a proof against the registrar's key and return the chip's statements, genesis first.

    Raises:
        EvidenceError: the head, a path, the batch, or the order of the chip's sequence numbers is wrong.
    """
    head = SignedHead.open(proof.head, registrar, origin)
    if not proof.entries:
        raise EvidenceError(f"chip {proof.record.chip}: the proof holds no log entry")
    statements: list[Statement] = []
    for expected, proven in enumerate(proof.entries):
        verify_inclusion(leaf=proven.entry, index=proven.event, size=head.size, proof=proven.path, root=head.root)
        entry = LogEntry.from_bytes(proven.entry)
        if entry.event != proven.event:
            raise EvidenceError(f"log entry {proven.event} says that it is entry {entry.event}")
        statement = decode_payload(entry.signed)
        if _sequence(statement, proof.record.chip) != expected:
            raise EvidenceError(f"chip {proof.record.chip}: event {proven.event} is not record {expected} of this chip")
        statements.append(statement)
    batch = statements[0]
    if not isinstance(batch, Genesis):
        raise EvidenceError(f"chip {proof.record.chip}: the first record is not a genesis")
    verify_inclusion(
        leaf=proof.record.leaf(), index=proof.position, size=batch.count, proof=proof.batch_path, root=batch.root
    )
    return tuple(statements)


def log_consistency(registry: Registry, old: int) -> tuple[list[bytes], bytes]:
    """Proof that the log extends its first ``old`` events, and the newest signed head."""
    with registry.reader() as connection:
        log = connection.execute(select(events.c.entry).order_by(events.c.event)).scalars().all()
        head = registry.head_of(connection, len(log))
    return MerkleTree(log).consistency_proof(old), head


def verify_extension(old: bytes, new: bytes, proof: list[bytes], *, origin: str, registrar: VerifyingKey) -> None:
    """Check that the log under the signed head ``new`` extends the one under ``old``; raises EvidenceError if not."""
    before, after = SignedHead.open(old, registrar, origin), SignedHead.open(new, registrar, origin)
    verify_consistency(old=before.size, new=after.size, proof=proof, old_root=before.root, new_root=after.root)


def _sequence(statement: Statement, chip: str) -> int | None:
    """The number that ``statement`` gives to its record of ``chip``; None if it has none."""
    match statement:
        case Genesis():
            return 0
        case Transfer() | Claim() | Revocation():
            return next((ref.sequence for ref in statement.chips if ref.chip == chip), None)
        case CensusResult():
            return next((missing.sequence for missing in statement.missing if missing.chip == chip), None)
        case _:
            return None
