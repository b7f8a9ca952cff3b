"""What goes out to inspectors: revoking chips, publishing a view, and reading the published view back from the log.

Publishing reads the tables, as the write path does. A reader of a view builds it from the log alone, every
signature checked under the registrar's key that the reader brings: nothing in the database is an anchor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import MerkleTree, SignedHead, VerifyingKey
from inspector.registry import _rules
from inspector.registry._log import LogEntry, read_frontier
from inspector.registry._replay import Replay
from inspector.registry._schema import batches, events, parties
from inspector.registry._values import ChipRecord, ChipState, Role
from inspector.registry.audit import genesis_records
from inspector.registry.directory import Receipt, Registry, positions_in
from inspector.registry.errors import RegistryMisuse
from inspector.registry.listing import Listing, chip_entry, party_entry, values_entry
from inspector.registry.positions import Files
from inspector.registry.publications import Publication, ReferenceValues, Revocation
from inspector.registry.signing import SignedStatement, decode_payload, sign

__all__ = ["PublishedView", "list_now", "publish", "read_view", "revoke"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedView:
    """The newest published view, rebuilt from the log.

    Attributes:
        signed: the publication as the registrar signed it.
        listing: everything that it lists.
        later: events that the log holds beyond the publication, which the view does not show.
        revoked_later: chips that one of those revokes.
    """

    publication: Publication
    signed: SignedStatement
    listing: Listing
    later: int
    revoked_later: frozenset[str]


def revoke(
    registry: Registry, chips: Sequence[str], *, reason: str, evidence: Mapping[str, Files] | None = None
) -> Receipt:
    """Revoke the certificates of ``chips``, all or none; what they had answered before may be deposited.

    Raises:
        StatementRefused: a chip is unknown, or revoked already.
        RegistryMisuse: the registry was opened for reading.
    """
    with registry.writer() as writer:
        connection = writer.connection
        refs = registry.refs(chips)
        positions = positions_in(chips, evidence)
        statement = Revocation(
            registry=registry.origin, chips=refs, reason=reason, time=writer.now, positions=positions
        )
        signed = sign(statement, writer.signer)
        registry.verified(writer, signed)
        moving = _rules.check_revocation(connection, statement)
        registry.deposit(writer, statement, moving, evidence)
        receipt = registry.append(writer, signed, chips=len(moving))
        for chip in moving:
            _rules.move(connection, [chip], holder=None, state=chip.state, time=statement.time, event=receipt.event)
    return receipt


def list_now(registry: Registry) -> Listing:
    """The list as the tables have it, unverified; O(chips)."""
    with registry.reader() as connection:
        return _listed(connection)


def publish(registry: Registry) -> tuple[Receipt, Publication]:
    """Sign and log what the directory lists now; O(chips).

    Raises:
        RegistryMisuse: the registry was opened for reading.
    """
    with registry.writer() as writer:
        frontier = read_frontier(writer.connection)
        listing = _listed(writer.connection)
        statement = Publication(
            registry=registry.origin,
            size=frontier.size,
            root=frontier.root(),
            entries=len(listing),
            map_root=listing.root,
            time=writer.now,
        )
        signed = sign(statement, writer.signer)
        registry.verified(writer, signed)
        return registry.append(writer, signed, chips=0), statement


def read_view(registry: Registry, *, registrar: VerifyingKey, known_head: bytes | None = None) -> PublishedView:
    """Rebuild the newest published view from the log, which is checked to its end; O(events + chips).

    Args:
        registrar: the key of the registrar, from elsewhere.
        known_head: a signed head seen earlier, which the log must extend.

    Raises:
        RegistryMisuse: no view was published yet.
        EvidenceError: the log breaks a rule, is not the registrar's, or does not extend ``known_head``.
    """
    with registry.reader() as connection:
        last = connection.execute(select(func.max(events.c.event)).where(events.c.kind == Publication.kind)).scalar()
        if last is None:
            raise RegistryMisuse("the registry has not published a view yet: run 'registry publish' first")
        log = connection.execute(select(events.c.entry).order_by(events.c.event)).scalars().all()
        replay = Replay(
            origin=registry.origin,
            registrar=registrar,
            records=lambda first, count: genesis_records(connection, first, count),
            check_views=False,
        )
        tree = MerkleTree()
        revoked: set[int] = set()
        for number, data in enumerate(log):
            entry = LogEntry.from_bytes(data)
            if entry.event != number:
                raise EvidenceError(f"event {number} is not stored at the place where it was logged")
            replay.check_views = number == last
            replay.take(entry, after_root=(len(tree), tree.root()))
            tree.append(data)
            if number == last:
                revoked = set(replay.revoked)
    if replay.published is None:
        raise EvidenceError(f"event {last} does not publish a view")
    if known_head is not None:
        head = SignedHead.open(known_head, registrar, registry.origin)
        if head.size > len(tree) or tree.root(head.size) != head.root:
            raise EvidenceError(f"the log does not extend the head of {head.size} events that was seen earlier")
    publication, listing = replay.published
    return PublishedView(
        publication=publication,
        signed=LogEntry.from_bytes(log[last]).signed,
        listing=listing,
        later=len(log) - last - 1,
        revoked_later=frozenset(replay.chips[ordinal].chip for ordinal in replay.revoked - revoked),
    )


def _listed(connection: Connection) -> Listing:
    revoked, spans = _rules.revoked_ordinals(connection), _rules.closed_spans(connection)
    made = connection.execute(
        select(batches.c.first, parties.c.name)
        .join(parties, parties.c.party == batches.c.maker)
        .order_by(batches.c.first)
    ).all()
    firsts = [row.first for row in made]
    chips = (
        chip_entry(
            ChipRecord(row.chip, row.model, row.identity),
            maker=made[bisect_right(firsts, row.ordinal) - 1].name,
            holder=row.name,
            state=ChipState(row.state),
            sequence=row.sequence,
            revoked=row.ordinal in revoked,
            spans=spans.get(row.chip, ()),
        )
        for row in connection.execute(_rules.holdings_query)
    )
    admitted = (
        party_entry(row.name, Role(row.role), VerifyingKey(bytes.fromhex(row.key)))
        for row in connection.execute(select(parties))
    )
    values: dict[str, ReferenceValues] = {}
    query = select(events.c.entry).where(events.c.kind == ReferenceValues.kind).order_by(events.c.event)
    for data in connection.execute(query).scalars():
        statement = decode_payload(LogEntry.from_bytes(data).signed)
        if isinstance(statement, ReferenceValues):
            values[statement.maker] = statement
    return Listing([*chips, *admitted, *map(values_entry, values.values())])
