"""Census: chips drawn at random from the directory, shown by their holders or missing (Shavit 2023, §6).

The draw is a partial Fisher-Yates shuffle of the chips that the directory places in somebody's hands, in the order of
their genesis records, driven by SHA-256 over the seed. It is logged before anyone is asked. The lab has no say in
it: the population comes from the directory, the seed from the inspector. A chip that is not shown, or in whose place
another serial is read, is missing; silence is not an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from sqlalchemy import Connection, Select, func, insert, select, update

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import Digest, SigningKey, canonical, digest_bytes
from inspector.registry import _rules
from inspector.registry._log import LogEntry, read_frontier
from inspector.registry._schema import census_draws, censuses, events, genesis, holdings
from inspector.registry._values import ChipState, Role, check_name
from inspector.registry.census_statements import CensusDraw, CensusResult, MissingChip
from inspector.registry.directory import Registry
from inspector.registry.errors import ImportRejected, InvalidStatement
from inspector.registry.signing import decode_payload, sign

__all__ = [
    "Census",
    "CensusOutcome",
    "answers_from_rows",
    "draw_census",
    "draw_without_replacement",
    "drawn_digest",
    "record_census",
]

_PRESENT = tuple(int(state) for state in ChipState if state.present)


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """A drawn census: the chips to be shown, in the order drawn, and the holder of each at the draw."""

    number: int
    event: int
    population: int
    chips: tuple[str, ...]
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CensusOutcome:
    """A recorded census: how many chips were shown, which were not and who answers for each."""

    number: int
    event: int
    present: int
    retired: tuple[str, ...]
    resurfaced: tuple[str, ...]
    missing: tuple[MissingChip, ...]


def draw_without_replacement(seed: bytes, population: int, count: int) -> list[int]:
    """Return ``count`` distinct integers below ``population``, every ordered choice equally likely over seeds.

    Step i swaps position i with a position drawn evenly from i … population−1: SHA-256(seed ‖ counter) as a 256-bit
    number, drawn again above the largest multiple of the range, so no position is favoured.

    Raises:
        CallerError: more wanted than there are, or none.
    """
    if not 1 <= count <= population:
        raise CallerError(f"cannot draw {count} of {population} chips")
    moved: dict[int, int] = {}
    drawn = []
    counter = 0
    for step in range(count):
        span = population - step
        limit = (1 << 256) - (1 << 256) % span
        while True:
            block = hashlib.sha256(b"chipwitness/census/1\0" + seed + counter.to_bytes(8, "big")).digest()
            counter += 1
            value = int.from_bytes(block, "big")
            if value < limit:
                break
        other = step + value % span
        drawn.append(moved.get(other, other))
        moved[other] = moved.get(step, step)
    return drawn


def drawn_digest(chips: Sequence[str]) -> Digest:
    """Digest of chip ids in the order drawn."""
    return digest_bytes("chipwitness/registry-census/1", canonical.encode(list(chips)))


def draw_census(
    registry: Registry, *, count: int, seed: bytes, inspector: str, key: SigningKey, owner: str = ""
) -> Census:
    """Draw ``count`` chips evenly from all that are held (by ``owner``, if given), and log the draw.

    Args:
        registry: open for writing.
        count: chips to draw, at least 1.
        seed: 32 bytes that no party under inspection can foresee.
        inspector: the enrolled inspector whose ``key`` signs.
        owner: draw from this holder's chips only.

    Raises:
        CallerError: more chips wanted than held.
        ForgedStatement: ``key`` is not the inspector's.
    """
    with registry.writer() as writer:
        connection = writer.connection
        _rules.find_party(connection, inspector, Role.INSPECTOR)
        held = _held(connection, owner, count)
        ordinals = [held[position] for position in draw_without_replacement(seed, len(held), count)]
        found = _holders(connection, ordinals)
        chips = tuple(found[ordinal][0] for ordinal in ordinals)
        frontier = read_frontier(connection)
        number = 1 + connection.execute(select(func.count()).select_from(censuses)).scalar_one()
        statement = CensusDraw(
            registry=registry.origin,
            census=number,
            inspector=inspector,
            owner=owner,
            seed=seed,
            size=frontier.size,
            root=frontier.root(),
            population=len(held),
            count=count,
            drawn=drawn_digest(chips),
            time=writer.now,
        )
        signed = sign(statement, key)
        registry.verified(writer, signed)
        receipt = registry.append(writer, signed, chips=0)
        _keep(connection, number, receipt.event, ordinals)
    return Census(
        number=number,
        event=receipt.event,
        population=len(held),
        chips=chips,
        holders=tuple(found[ordinal][1] for ordinal in ordinals),
    )


def _holders(connection: Connection, ordinals: Sequence[int]) -> dict[int, tuple[str, str]]:
    """By ordinal, a chip's name and its holder's."""
    found = {}
    for some in _rules.chunks(ordinals):
        for row in connection.execute(_rules.holdings_query.where(genesis.c.ordinal.in_(some))):
            found[row.ordinal] = (row.chip, row.name)
    return found


def _lose(connection: Connection, missing: Sequence[_rules.Holding], time: int, event: int) -> None:
    """Mark missing chips lost."""
    _rules.move(
        connection,
        [holding for holding in missing if holding.state.present],
        holder=None,
        state=ChipState.LOST,
        time=max([time, *(holding.time for holding in missing)]),
        event=event,
    )


def _held(connection: Connection, owner: str, count: int) -> Sequence[int]:
    """Ordinals of all chips that are held, by one owner if one is named; CallerError if there are fewer than wanted."""
    holder = _rules.find_party(connection, owner, Role.MAKER, Role.OWNER).number if owner else None
    held: Sequence[int] = connection.execute(_population(holder)).scalars().all()
    if not 1 <= count <= len(held):
        raise CallerError(f"cannot draw {count} chips: {len(held)} are held{f' by {owner}' if owner else ''}")
    return held


def _keep(connection: Connection, number: int, event: int, ordinals: Sequence[int]) -> None:
    """Store a draw, in its order."""
    connection.execute(insert(censuses).values(census=number, drawn_event=event, result_event=None))
    rows = [{"census": number, "rank": rank, "ordinal": ordinal} for rank, ordinal in enumerate(ordinals)]
    connection.execute(insert(census_draws), rows)


def record_census(
    registry: Registry,
    census: int,
    answers: Mapping[str, str],
    *,
    inspector: str,
    key: SigningKey,
    identities: Mapping[str, str] = MappingProxyType({}),
) -> CensusOutcome:
    """Log what was found and mark the missing chips lost, their last holder answering.

    Args:
        registry: open for writing.
        census: number of a drawn census without a result.
        answers: drawn chip → serial that the inspector read off the chip shown ("" for none). A drawn chip without an
            answer is missing.
        inspector: who drew it; ``key`` is that inspector's.
        identities: drawn chip → digest of the device certificate that the chip shown presented. A chip that presents
            another certificate than the registered one was not shown, whatever its case says: of a chip and its
            clone only the one counts.

    Raises:
        ImportRejected: an answer for a chip that was not drawn, or one serial shown for two chips.
        InvalidStatement: no such census, another inspector's, or already recorded.
    """
    with registry.writer() as writer:
        connection = writer.connection
        draw = _open_draw(connection, census, inspector)
        drawn = connection.execute(_drawn_query(census)).all()
        now = _rules.find_holdings(connection, [chip.chip for chip in drawn])
        chips = [chip.chip for chip in drawn]
        _check_answers(census, chips, answers)
        answers = {**answers, **_other_identities(connection, answers, identities, now)}
        statement, missing = _result(draw, registry.origin, census, now, chips, answers, time=writer.now)
        signed = sign(statement, key)
        registry.verified(writer, signed)
        receipt = registry.append(writer, signed, chips=len(missing))
        _lose(connection, missing, statement.time, receipt.event)
        connection.execute(update(censuses).where(censuses.c.census == census).values(result_event=receipt.event))
    return CensusOutcome(
        number=census,
        event=receipt.event,
        present=statement.present,
        retired=statement.retired,
        resurfaced=statement.resurfaced,
        missing=statement.missing,
    )


def _result(
    draw: CensusDraw,
    origin: str,
    census: int,
    now: Mapping[str, _rules.Holding],
    chips: Sequence[str],
    answers: Mapping[str, str],
    *,
    time: int,
) -> tuple[CensusResult, list[_rules.Holding]]:
    """What an inspector states of a census, and the holdings of the chips that are missing."""
    shown = [chip for chip in chips if answers.get(chip) == chip]
    absent = [now[chip] for chip in chips if answers.get(chip) != chip]
    retired = [holding for holding in absent if holding.state is ChipState.DESTROYED]
    missing = [holding for holding in absent if holding.state is not ChipState.DESTROYED]
    statement = CensusResult(
        registry=origin,
        census=census,
        inspector=draw.inspector,
        drawn=draw.drawn,
        present=len(shown),
        retired=tuple(holding.record.chip for holding in retired),
        resurfaced=tuple(chip for chip in shown if not now[chip].state.present),
        missing=tuple(
            MissingChip(
                chip=holding.record.chip,
                holder=holding.holder_name,
                observed=answers.get(holding.record.chip, ""),
                sequence=holding.sequence + 1 if holding.state.present else 0,
            )
            for holding in missing
        ),
        time=time,
    )
    return statement, missing


def _open_draw(connection: Connection, census: int, inspector: str) -> CensusDraw:
    """The draw of a census that has no result yet, by this inspector."""
    row = connection.execute(select(censuses).where(censuses.c.census == census)).one_or_none()
    if row is None:
        raise InvalidStatement(f"census {census} was not drawn")
    if row.result_event is not None:
        raise InvalidStatement(f"census {census} is recorded already, as event {row.result_event}")
    entry = connection.execute(select(events.c.entry).where(events.c.event == row.drawn_event)).scalar_one()
    draw = decode_payload(LogEntry.from_bytes(entry).signed)
    if not isinstance(draw, CensusDraw):
        raise EvidenceError(f"event {row.drawn_event} is not the draw of census {census}")
    if draw.inspector != inspector:
        raise InvalidStatement(f"census {census} was drawn by {draw.inspector}, not by {inspector}")
    return draw


def _check_answers(census: int, chips: Sequence[str], answers: Mapping[str, str]) -> None:
    drawn = set(chips)
    shown_for: dict[str, str] = {}
    for chip, observed in answers.items():
        if chip not in drawn:
            raise ImportRejected(f"chip {chip} was not drawn in census {census}")
        if observed and shown_for.setdefault(observed, chip) != chip:
            raise ImportRejected(f"serial {observed} was read for chip {shown_for[observed]} and for chip {chip}")


def _other_identities(
    connection: Connection,
    answers: Mapping[str, str],
    identities: Mapping[str, str],
    drawn: Mapping[str, _rules.Holding],
) -> dict[str, str]:
    """What was really shown for chips that presented another certificate than theirs: the chip that it names."""
    others = {}
    for chip, identity in identities.items():
        if chip not in drawn or not answers.get(chip):
            raise ImportRejected(f"chip {chip}: a certificate is given, although the chip was not shown")
        registered = drawn[chip].record.identity
        if not registered:
            raise ImportRejected(f"chip {chip}: no certificate is registered that could be compared")
        if identity != registered:
            named = connection.execute(select(genesis.c.chip).where(genesis.c.identity == identity)).scalar()
            others[chip] = named or "unregistered"
    return others


def _population(holder: int | None) -> Select[Any]:
    query = select(holdings.c.ordinal).where(holdings.c.state.in_(_PRESENT)).order_by(holdings.c.ordinal)
    return query if holder is None else query.where(holdings.c.holder == holder)


def _drawn_query(census: int) -> Select[Any]:
    return (
        select(genesis.c.chip)
        .join(census_draws, census_draws.c.ordinal == genesis.c.ordinal)
        .where(census_draws.c.census == census)
        .order_by(census_draws.c.rank)
    )


def answers_from_rows(path: Path, rows: Iterable[tuple[int, list[str]]]) -> dict[str, str]:
    """Answers from the rows of a CSV file with columns ``chip`` and ``observed``."""
    answers: dict[str, str] = {}
    for line, (chip, observed) in rows:
        if chip in answers:
            raise ImportRejected(f"{path}: line {line}: chip {chip} is answered for twice")
        if observed:
            try:
                check_name("observed serial", observed)
            except CallerError as error:
                raise ImportRejected(f"{path}: line {line}: {error}") from None
        answers[chip] = observed
    return answers
