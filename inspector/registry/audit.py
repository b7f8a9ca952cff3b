"""Independent audit: rebuild everything from the log and compare it with what the database serves.

The auditor brings the registrar's key and, if there is one, a head kept from an earlier visit; nothing in the database
is an anchor. Every signature, sequence number, batch and census draw is checked again by rules written separately from
those of the write path, then every derived table is compared row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from sqlalchemy import Connection, Select, select

from firmware_sim.errors import CallerError, ChipwitnessError, EvidenceError
from firmware_sim.evidence import MerkleTree, SignedHead, VerifyingKey
from inspector.registry._log import LogEntry, read_frontier
from inspector.registry._replay import Replay
from inspector.registry._schema import (
    batches,
    census_draws,
    censuses,
    changes,
    events,
    genesis,
    heads,
    holdings,
    parties,
)
from inspector.registry._values import ChipRecord
from inspector.registry.directory import Registry

__all__ = ["AuditReport", "audit", "genesis_records"]

_MAX_FINDINGS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What the log holds and every disagreement found (at most 50); ``ok`` if there is none."""

    events: int
    chips: int
    root: bytes
    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.findings


def audit(registry: Registry, *, registrar: VerifyingKey, known_head: bytes | None = None) -> AuditReport:
    """Check the whole directory against ``registrar`` and, if given, against a signed head seen earlier.

    Memory and time are linear in chips and events; findings are reported, not raised.

    Raises:
        RegistryUnavailable: the database could not be read.
    """
    found = _Findings()
    tree = MerkleTree()
    with registry.reader() as connection:
        replay = Replay(
            origin=registry.origin,
            registrar=registrar,
            records=lambda first, count: genesis_records(connection, first, count),
        )
        _check_log(connection, replay, tree, found)
        _check_tables(connection, replay, tree, found)
    if known_head is not None:
        _check_known_head(known_head, registry.origin, registrar, tree, found)
    return AuditReport(events=len(tree), chips=len(replay.chips), root=tree.root(), findings=tuple(found.messages))


@dataclass(slots=True)
class _Findings:
    messages: list[str] = field(default_factory=list)

    def add(self, message: object) -> None:
        if len(self.messages) < _MAX_FINDINGS:
            self.messages.append(str(message))


def _check_log(connection: Connection, replay: Replay, tree: MerkleTree, found: _Findings) -> None:
    rows = connection.execute(select(events).order_by(events.c.event)).all()
    signed_heads = {size: head for size, head in connection.execute(select(heads.c.size, heads.c.head))}  # noqa: C416
    if not rows:
        found.add("the log is empty: not even the registrar is enrolled")
    if set(signed_heads) != set(range(1, len(rows) + 1)):
        found.add(f"the log has {len(rows)} events, but its heads do not have exactly the sizes 1 to {len(rows)}")
    for index, row in enumerate(rows):
        before = (len(tree), tree.root())
        if not isinstance(row.entry, bytes):
            found.add(f"event {index}: the entry is not a byte string")
            break
        tree.append(row.entry)
        try:
            entry = LogEntry.from_bytes(row.entry)
            if (entry.event, row.event, row.kind, row.received) != (index, index, entry.signed.kind, entry.received):
                raise EvidenceError(f"the database columns of event {index} do not match its log entry")
            replay.take(entry, after_root=before)
        except ChipwitnessError as error:
            found.add(f"event {index}: {error}")
        try:
            head = SignedHead.open(signed_heads.get(index + 1, b""), replay.registrar, replay.origin)
            if (head.size, head.root) != (index + 1, tree.root()):
                raise EvidenceError(f"it commits to a different log ({head.size} events, root {head.root.hex()})")
        except ChipwitnessError as error:
            found.add(f"signed head of size {index + 1}: {error}")


_Compare = Callable[[str, Select[Any], Iterable[tuple[Any, ...]]], None]
"""Compares what a query finds with what the log implies."""


def _check_tables(connection: Connection, replay: Replay, tree: MerkleTree, found: _Findings) -> None:
    def compare(what: str, query: Select[Any], expected: Iterable[tuple[Any, ...]]) -> None:
        with connection.execute(query, execution_options={"yield_per": 10_000}) as result:
            for actual, wanted in zip_longest(map(tuple, result), expected):
                if actual != wanted:
                    found.add(f"{what}: the database has {_text(actual)}, the log implies {_text(wanted)}")
                    return

    try:
        frontier = read_frontier(connection)
    except EvidenceError as error:
        found.add(f"tail: {error}")
    else:
        if (frontier.size, frontier.root()) != (len(tree), tree.root()):
            found.add(f"tail: {frontier.size} events, root {frontier.root().hex()}; the log implies another")
    compare(
        "parties",
        select(
            parties.c.party, parties.c.name, parties.c.role, parties.c.keyid, parties.c.key, parties.c.event
        ).order_by(parties.c.party),
        (
            (number, name, role.value, key.key_id, key.raw.hex(), event)
            for number, (name, role, key, event) in enumerate(replay.parties)
        ),
    )
    compare(
        "batches",
        select(batches.c.event, batches.c.maker, batches.c.first, batches.c.count, batches.c.time).order_by(
            batches.c.event
        ),
        replay.batches,
    )
    compare(
        "genesis records",
        select(genesis.c.ordinal, genesis.c.chip, genesis.c.model, genesis.c.identity).order_by(genesis.c.ordinal),
        ((ordinal, chip.chip, chip.model, chip.identity) for ordinal, chip in enumerate(replay.chips)),
    )
    compare(
        "owner table",
        select(
            holdings.c.ordinal,
            holdings.c.holder,
            holdings.c.state,
            holdings.c.sequence,
            holdings.c.time,
            holdings.c.event,
        ).order_by(holdings.c.ordinal),
        _expected_holdings(replay),
    )
    _check_histories(compare, replay)


def _check_histories(compare: _Compare, replay: Replay) -> None:
    """Changes of holders, and censuses."""
    compare(
        "changes",
        select(changes).order_by(changes.c.ordinal, changes.c.sequence),
        (
            (
                change.ordinal,
                change.sequence,
                change.event,
                change.time,
                change.holder_before,
                int(change.state_before),
                change.holder,
                int(change.state),
            )
            for change in sorted(replay.changes, key=lambda change: (change.ordinal, change.sequence))
        ),
    )
    compare(
        "censuses",
        select(censuses.c.census, censuses.c.drawn_event, censuses.c.result_event).order_by(censuses.c.census),
        ((draw.census, event, replay.results.get(draw.census)) for event, draw, _ in replay.draws),
    )
    compare(
        "census draws",
        select(census_draws.c.census, census_draws.c.rank, census_draws.c.ordinal).order_by(
            census_draws.c.census, census_draws.c.rank
        ),
        ((draw.census, rank, ordinal) for _, draw, drawn in replay.draws for rank, ordinal in enumerate(drawn)),
    )


def _expected_holdings(replay: Replay) -> Iterator[tuple[Any, ...]]:
    columns = zip(replay.holder, replay.state, replay.sequence, replay.time, replay.event, strict=True)
    for ordinal, (holder, state, sequence, time, event) in enumerate(columns):
        yield ordinal, holder, int(state), sequence, time, event


def _check_known_head(known: bytes, origin: str, registrar: VerifyingKey, tree: MerkleTree, found: _Findings) -> None:
    try:
        head = SignedHead.open(known, registrar, origin)
    except EvidenceError as error:
        found.add(f"earlier head: {error}")
        return
    if head.size > len(tree):
        found.add(f"the log was cut: an earlier head covers {head.size} events, {len(tree)} are left")
    elif tree.root(head.size) != head.root:
        found.add(f"the log was rewritten: its first {head.size} events are not those of the earlier head")


def genesis_records(connection: Connection, first: int, count: int) -> Sequence[ChipRecord]:
    """The genesis records with ``count`` ordinals from ``first`` on; EvidenceError if one is malformed."""
    query = (
        select(genesis.c.chip, genesis.c.model, genesis.c.identity)
        .where(genesis.c.ordinal >= first, genesis.c.ordinal < first + count)
        .order_by(genesis.c.ordinal)
    )
    try:
        return [ChipRecord(*row) for row in connection.execute(query)]
    except (CallerError, TypeError) as error:
        raise EvidenceError(f"a genesis record is malformed: {error}") from None


def _text(row: tuple[Any, ...] | None) -> str:
    return "no row" if row is None else repr(row)[:200]
