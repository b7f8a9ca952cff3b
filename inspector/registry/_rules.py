"""What a verified statement may do to the directory, and doing it; the caller holds the writer's lock.

The order of the checks is fixed: known chip, same genesis record, next in sequence, right holder, right state, right
time. The first that fails is the error, which names the chip.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, insert, inspect, select, update

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import VerifyingKey
from inspector.registry._log import LogEntry
from inspector.registry._schema import changes, deposits, events, genesis, holdings, parties
from inspector.registry._values import ChipRecord, ChipRef, ChipState, ClaimKind, Role
from inspector.registry.errors import (
    InvalidStatement,
    StatementOutOfOrder,
    StatementReplayed,
    UnknownChip,
    UnknownParty,
)
from inspector.registry.positions import Files, challenge_of, check_position, close_span
from inspector.registry.publications import Publication, Revocation
from inspector.registry.signing import decode_payload
from inspector.registry.statements import Claim, Position, Transfer

__all__ = [
    "Holding",
    "Party",
    "check_claim",
    "check_moves",
    "check_positions",
    "check_revocation",
    "check_transfer",
    "chunks",
    "closed_spans",
    "deposited",
    "find_holdings",
    "find_party",
    "find_party_by_key",
    "holdings_query",
    "move",
    "revoked_ordinals",
    "states_after_claim",
]

_CHUNK = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """An enrolled party."""

    number: int
    name: str
    role: Role
    key: VerifyingKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """Where a chip is: its record, its holder, and the number and time of its last record."""

    ordinal: int
    record: ChipRecord
    holder: int
    holder_name: str
    state: ChipState
    sequence: int
    time: int


def chunks(items: Sequence[str] | Sequence[int], size: int = _CHUNK) -> Iterable[Sequence[str] | Sequence[int]]:
    """Cut ``items`` so that each cut fits into one SQL statement's parameters."""
    return (items[start : start + size] for start in range(0, len(items), size))


def find_party(connection: Connection, name: str, *roles: Role) -> Party:
    """The party enrolled as ``name`` in one of ``roles`` (any if none is given), else UnknownParty."""
    row = connection.execute(select(parties).where(parties.c.name == name)).one_or_none()
    if row is None:
        raise UnknownParty(f"{name} is not enrolled")
    party = Party(number=row.party, name=row.name, role=Role(row.role), key=VerifyingKey(bytes.fromhex(row.key)))
    if roles and party.role not in roles:
        wanted = " or ".join(role.value for role in roles)
        raise UnknownParty(f"{name} is enrolled as {party.role.value}, not as {wanted}")
    return party


def find_party_by_key(connection: Connection, key_id: str) -> tuple[str, VerifyingKey] | None:
    """Name and key of the party whose key has this id."""
    row = connection.execute(select(parties.c.name, parties.c.key).where(parties.c.keyid == key_id)).one_or_none()
    return None if row is None else (row.name, VerifyingKey(bytes.fromhex(row.key)))


holdings_query = (
    select(
        genesis.c.ordinal,
        genesis.c.chip,
        genesis.c.model,
        genesis.c.identity,
        holdings.c.holder,
        parties.c.name,
        holdings.c.state,
        holdings.c.sequence,
        holdings.c.time,
    )
    .join(holdings, holdings.c.ordinal == genesis.c.ordinal)
    .join(parties, parties.c.party == holdings.c.holder)
)


def find_holdings(connection: Connection, chips: Sequence[str]) -> dict[str, Holding]:
    """The holdings of those of ``chips`` that exist."""
    found: dict[str, Holding] = {}
    for some in chunks(chips):
        for row in connection.execute(holdings_query.where(genesis.c.chip.in_(some))):
            found[row.chip] = Holding(
                ordinal=row.ordinal,
                record=ChipRecord(row.chip, row.model, row.identity),
                holder=row.holder,
                holder_name=row.name,
                state=ChipState(row.state),
                sequence=row.sequence,
                time=row.time,
            )
    return found


def check_moves(
    connection: Connection,
    chips: Sequence[ChipRef],
    *,
    holder: Party,
    states: Sequence[ChipState],
    time: int,
    amends: Party | None = None,
) -> list[Holding]:
    """Return the holdings of ``chips`` if each may move now, else raise an error that names the first that may not.

    Args:
        amends: who holds chips that came from ``holder`` without a position, which they are given now; None for no one.
    """
    checked = []
    spans = {} if amends is None else closed_spans(connection, [ref.chip for ref in chips])
    for ref, holding in _next_in_sequence(connection, chips):
        last = (spans.get(ref.chip) or [{}])[-1]
        came = (last.get("holder"), last.get("why"), last.get("size")) == (holder.name, Transfer.kind, None)
        if holding.holder != holder.number and not (came and amends is not None and holding.holder == amends.number):
            raise InvalidStatement(f"chip {ref.chip} is held by {holding.holder_name}, not by {holder.name}")
        if holding.state not in states:
            raise InvalidStatement(f"chip {ref.chip}: recorded as {holding.state.name.lower()}, {_way_out(holding)}")
        _check_time(holding, time)
        checked.append(holding)
    return checked


def check_revocation(connection: Connection, statement: Revocation) -> list[Holding]:
    """Return the holdings of the chips that are revoked, else raise an error that names the first that may not be."""
    checked = []
    revoked = revoked_ordinals(connection)
    for ref, holding in _next_in_sequence(connection, statement.chips):
        if holding.ordinal in revoked:
            raise InvalidStatement(f"chip {ref.chip} is revoked already")
        _check_time(holding, statement.time)
        checked.append(holding)
    return checked


def revoked_ordinals(connection: Connection) -> set[int]:
    """The chips that were ever revoked; a revocation is a record of the chip like any other."""
    query = select(changes.c.ordinal).join(events, events.c.event == changes.c.event)
    return set(connection.execute(query.where(events.c.kind == Revocation.kind)).scalars())


def _next_in_sequence(connection: Connection, chips: Sequence[ChipRef]) -> Iterable[tuple[ChipRef, Holding]]:
    """Each chip with its holding, checked one after the other: known, the same genesis record, next in sequence."""
    found = find_holdings(connection, [ref.chip for ref in chips])
    for ref in chips:
        holding = found.get(ref.chip)
        if holding is None:
            raise UnknownChip(f"chip {ref.chip} has no genesis record")
        if ref.digest != holding.record.digest():
            raise InvalidStatement(f"chip {ref.chip}: the statement is about another genesis record")
        following = holding.sequence + 1
        if ref.sequence < following:
            raise StatementReplayed(
                f"chip {ref.chip}: this statement is for record {ref.sequence}, which the log already has; the next "
                f"record is {following}"
            )
        if ref.sequence > following:
            raise StatementOutOfOrder(
                f"chip {ref.chip}: this statement is for record {ref.sequence}, but record {following} has to come "
                "first"
            )
        yield ref, holding


def _check_time(holding: Holding, time: int) -> None:
    if time < holding.time:
        raise StatementOutOfOrder(
            f"chip {holding.record.chip}: the new record is of time {time}, before its last record, which is of time "
            f"{holding.time}"
        )


def states_after_claim(claim: ClaimKind) -> tuple[tuple[ChipState, ...], ChipState]:
    """The states in which a claim may be made, and the state that it leads to."""
    match claim:
        case ClaimKind.LOST:
            return (ChipState.FABRICATED, ChipState.OWNED), ChipState.LOST
        case ClaimKind.FOUND:
            return (ChipState.LOST,), ChipState.OWNED
        case ClaimKind.DESTROYED:
            return (ChipState.FABRICATED, ChipState.OWNED), ChipState.DESTROYED


def move(
    connection: Connection, moving: Sequence[Holding], *, holder: int | None, state: ChipState, time: int, event: int
) -> None:
    """Write the next record of each chip: it is now with ``holder`` (None: where it was) in ``state``."""
    if not moving:
        return
    rows = [
        {
            "ordinal": chip.ordinal,
            "sequence": chip.sequence + 1,
            "event": event,
            "time": time,
            "holder_before": chip.holder,
            "state_before": int(chip.state),
            "holder": chip.holder if holder is None else holder,
            "state": int(state),
        }
        for chip in moving
    ]
    connection.execute(insert(changes), rows)
    connection.execute(
        update(holdings)
        .where(holdings.c.ordinal == bindparam("of_ordinal"))
        .values({name: bindparam(f"new_{name}") for name in ("holder", "state", "sequence", "time", "event")}),
        [
            {"of_ordinal": row["ordinal"]}
            | {f"new_{name}": row[name] for name in ("holder", "state", "sequence", "time", "event")}
            for row in rows
        ],
    )


def check_transfer(connection: Connection, statement: Transfer) -> tuple[list[Holding], Party]:
    """Check a transfer; returns what moves and to whom."""
    sender = find_party(connection, statement.sender, Role.MAKER, Role.OWNER)
    receiver = find_party(connection, statement.receiver, Role.MAKER, Role.OWNER)
    amends = receiver if statement.positions else None
    moving = check_moves(
        connection,
        statement.chips,
        holder=sender,
        states=(ChipState.FABRICATED, ChipState.OWNED),
        time=statement.time,
        amends=amends,
    )
    return moving, receiver


def check_claim(connection: Connection, statement: Claim) -> tuple[list[Holding], ChipState]:
    """Check a claim; returns what changes and into which state."""
    holder = find_party(connection, statement.holder, Role.MAKER, Role.OWNER)
    if statement.witness:
        find_party(connection, statement.witness, Role.INSPECTOR)
    before, after = states_after_claim(statement.claim)
    if after is ChipState.LOST and statement.positions:
        before += (ChipState.LOST,)
    return check_moves(connection, statement.chips, holder=holder, states=before, time=statement.time), after


def closed_spans(connection: Connection, chips: Sequence[str] | None = None) -> dict[str, list[dict[str, object]]]:
    """By chip the spans that have ended (``positions``), from the log as it is; of all chips, if none is named."""
    kinds = [Transfer.kind, Claim.kind, Revocation.kind]
    query = (
        select(changes.c.event, genesis.c.chip, parties.c.name, changes.c.state_before)
        .join(genesis, genesis.c.ordinal == changes.c.ordinal)
        .join(parties, parties.c.party == changes.c.holder_before)
        .join(events, events.c.event == changes.c.event)
        .where(events.c.kind.in_(kinds))
        .order_by(changes.c.ordinal, changes.c.sequence)
    )
    some = [None] if chips is None else list(chunks(chips))
    rows = [
        row
        for names in some
        for row in connection.execute(query if names is None else query.where(genesis.c.chip.in_(names)))
    ]
    opened: dict[int, tuple[Any, dict[str, Position]]] = {}
    spans: dict[str, list[dict[str, object]]] = {}
    for row in rows:
        if row.event not in opened:
            entry = connection.execute(select(events.c.entry).where(events.c.event == row.event)).scalar_one()
            statement: Any = decode_payload(LogEntry.from_bytes(entry).signed)
            names = [ref.chip for ref in statement.chips]
            opened[row.event] = statement, dict(zip(names, statement.positions, strict=False))
        statement, positions = opened[row.event]
        found = spans.setdefault(row.chip, [])
        close_span(found, statement, positions.get(row.chip), row.name, ChipState(row.state_before))
    return spans


def check_positions(
    connection: Connection,
    statement: Transfer | Claim | Revocation,
    moving: Sequence[Holding],
    evidence: Mapping[str, Files],
    *,
    origin: str,
    since: int,
) -> None:
    """Check the positions in a statement against what is deposited for them, and keep that.

    Args:
        since: how old the published view may be that chips which somebody has in hand were challenged by.

    Raises:
        InvalidStatement: a chip that had an owner passes on without a position, or its log does not show the position.
    """
    found = getattr(statement, "claim", None) is ClaimKind.FOUND
    spans = closed_spans(connection, [ref.chip for ref in statement.chips]) if statement.positions or found else {}
    if not statement.positions:
        _check_absent(connection, statement, moving, spans if found else {})
        return
    query = select(events.c.entry).where(events.c.kind == Publication.kind, events.c.received >= since)
    views = connection.execute(query).scalars().all()
    deposits.create(connection, checkfirst=True)
    for ref, position, holding in zip(statement.chips, statement.positions, moving, strict=True):
        amends = isinstance(statement, Transfer) and statement.sender != holding.holder_name
        fresh = not amends and (isinstance(statement, Transfer) or found)
        files = evidence.get(ref.chip, {})
        earlier = [str(span["deposit"]) for span in spans.get(ref.chip, []) if span["deposit"]]
        try:
            check_position(
                holding.record,
                position,
                files,
                deposited(connection, earlier[-1]) if earlier else None,
                origin=origin,
                challenges=[challenge_of(view, ref) for view in views] if fresh else None,
            )
        except EvidenceError as error:
            raise InvalidStatement(str(error)) from None
        key = str(position.deposit)
        if not deposited(connection, key):
            connection.execute(
                insert(deposits), [{"deposit": key, "name": name, "content": files[name]} for name in sorted(files)]
            )


def _check_absent(
    connection: Connection,
    statement: Transfer | Claim | Revocation,
    moving: Sequence[Holding],
    lost: Mapping[str, list[dict[str, object]]],
) -> None:
    """InvalidStatement where a statement without positions must have some; ``lost``: spans of chips that are found."""
    gone = [chip for chip, each in lost.items() if each and each[-1]["why"] == ClaimKind.LOST.value]
    if gone:
        text = f"chip {gone[0]}: its holder signed where its log was when it was lost, and must say so now"
        raise InvalidStatement(f"{text}: let it answer 'registry challenge', and give that with --evidence")
    revoked = revoked_ordinals(connection) if isinstance(statement, Transfer) else set()
    owned = [each for each in moving if each.record.identity and each.state is ChipState.OWNED]
    named = [each.record.chip for each in owned if each.ordinal not in revoked]
    if isinstance(statement, Transfer) and named:
        text = f"chip {named[0]}: its records must be distinguished from those of its next owner"
        raise InvalidStatement(f"{text}: let it answer 'registry challenge', and give that with --evidence")


def deposited(connection: Connection, deposit: str) -> dict[str, bytes]:
    """The files of a deposit; none where there is no such deposit."""
    if not inspect(connection).has_table(deposits.name):
        return {}
    query = select(deposits.c.name, deposits.c.content).where(deposits.c.deposit == deposit)
    return {row.name: row.content for row in connection.execute(query)}


def _way_out(holding: Holding) -> str:
    match holding.state:
        case ChipState.LOST:
            return f"{holding.holder_name} must have it found before a witness first"
        case ChipState.DESTROYED:
            return "which is final"
        case ChipState.FABRICATED | ChipState.OWNED:
            return "so there is nothing to be found"
