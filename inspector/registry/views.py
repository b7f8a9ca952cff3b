"""What the directory says: one chip with its history, and the totals by holder and state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, func, select

from inspector.registry._rules import closed_spans, find_holdings
from inspector.registry._schema import batches, changes, events, genesis, holdings, parties
from inspector.registry._values import ChipState
from inspector.registry.directory import Registry
from inspector.registry.errors import UnknownChip
from inspector.registry.publications import Revocation

__all__ = ["ChipView", "HistoryLine", "Summary", "show_chip", "summarise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryLine:
    """One of a chip's records: its number, the log event, the time signed for, and where the chip was afterwards."""

    sequence: int
    event: int
    kind: str
    time: int
    holder: str
    state: ChipState


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipView:
    """A chip as the directory knows it; ``holder`` answers for it whatever its state, behind ``spans`` that ended."""

    chip: str
    model: str
    identity: str
    holder: str
    state: ChipState
    sequence: int
    digest: str
    revoked: bool
    history: tuple[HistoryLine, ...]
    spans: tuple[dict[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Totals: log events, chips, and the number of chips by (holder, state)."""

    events: int
    chips: int
    holdings: tuple[tuple[str, ChipState, int], ...]


def show_chip(registry: Registry, chip: str) -> ChipView:
    """The chip's holder, state and every record about it, oldest first; UnknownChip if it has none."""
    with registry.reader() as connection:
        found = find_holdings(connection, [chip])
        if chip not in found:
            raise UnknownChip(f"chip {chip} has no genesis record")
        holding, spans = found[chip], closed_spans(connection, [chip])
        birth, later = _birth(connection, holding.ordinal), _changes(connection, holding.ordinal)
    first = HistoryLine(
        sequence=0,
        event=birth.event,
        kind="genesis",
        time=birth.time,
        holder=birth.name,
        state=ChipState.FABRICATED,
    )
    rest = (
        HistoryLine(
            sequence=row.sequence,
            event=row.event,
            kind=row.kind,
            time=row.time,
            holder=row.name,
            state=ChipState(row.state),
        )
        for row in later
    )
    return ChipView(
        chip=chip,
        model=holding.record.model,
        identity=holding.record.identity,
        holder=holding.holder_name,
        state=holding.state,
        sequence=holding.sequence,
        digest=str(holding.record.digest()),
        revoked=any(row.kind == Revocation.kind for row in later),
        history=(first, *rest),
        spans=tuple(spans.get(chip, ())),
    )


def _changes(connection: Connection, ordinal: int) -> Sequence[Any]:
    """Every later record about a chip, oldest first."""
    return connection.execute(
        select(
            changes.c.sequence,
            changes.c.event,
            events.c.kind,
            changes.c.time,
            parties.c.name,
            changes.c.state,
        )
        .join(events, events.c.event == changes.c.event)
        .join(parties, parties.c.party == changes.c.holder)
        .where(changes.c.ordinal == ordinal)
        .order_by(changes.c.sequence)
    ).all()


def _birth(connection: Connection, ordinal: int) -> Any:
    """When and by whom a chip was registered."""
    return connection.execute(
        select(batches.c.event, batches.c.time, parties.c.name)
        .join(parties, parties.c.party == batches.c.maker)
        .where(batches.c.first <= ordinal)
        .order_by(batches.c.first.desc())
        .limit(1)
    ).one()


def summarise(registry: Registry) -> Summary:
    """Count the chips of every holder in every state."""
    with registry.reader() as connection:
        logged = connection.execute(select(func.count()).select_from(events)).scalar_one()
        total = connection.execute(select(func.count()).select_from(genesis)).scalar_one()
        rows = connection.execute(
            select(parties.c.name, holdings.c.state, func.count())
            .join(parties, parties.c.party == holdings.c.holder)
            .group_by(parties.c.name, holdings.c.state)
            .order_by(parties.c.name, holdings.c.state)
        ).all()
    return Summary(
        events=logged, chips=total, holdings=tuple((name, ChipState(state), count) for name, state, count in rows)
    )
