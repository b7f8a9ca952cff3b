"""The owner table as the log alone implies it: the write path's rules once more, written separately, in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import VerifyingKey, leaf_hash, root_of_hashes
from inspector.registry._log import LogEntry
from inspector.registry._values import ChipRecord, ChipRef, ChipState, ClaimKind, Role
from inspector.registry.census import draw_without_replacement, drawn_digest
from inspector.registry.census_statements import CensusDraw, CensusResult
from inspector.registry.directory import CLOCK_SKEW_S, VALIDITY_S
from inspector.registry.listing import Listing, chip_entry, party_entry, values_entry
from inspector.registry.positions import close_span
from inspector.registry.publications import Publication, ReferenceValues, Revocation
from inspector.registry.signing import Statement, open_signed
from inspector.registry.statements import Claim, Enrolment, Genesis, Transfer

__all__ = ["Change", "Replay"]

_HOLDER_ROLES = (Role.MAKER, Role.OWNER)
_CLAIMS = {
    ClaimKind.LOST: ({ChipState.FABRICATED, ChipState.OWNED}, ChipState.LOST),
    ClaimKind.FOUND: ({ChipState.LOST}, ChipState.OWNED),
    ClaimKind.DESTROYED: ({ChipState.FABRICATED, ChipState.OWNED}, ChipState.DESTROYED),
}


@dataclass(frozen=True, slots=True)
class Change:
    """One chip's next record, as the ``changes`` table should hold it."""

    ordinal: int
    sequence: int
    event: int
    time: int
    holder_before: int
    state_before: ChipState
    holder: int
    state: ChipState


@dataclass(slots=True)
class Replay:
    """The directory after the entries taken so far.

    Args:
        origin: the registry that every statement must name.
        registrar: the key that the caller trusts for event 0.
        records: ordinals from, count → the genesis records in that range, in order.
        check_views: whether published views are compared with what the log implies, each O(chips).
    """

    origin: str
    registrar: VerifyingKey
    records: Callable[[int, int], Sequence[ChipRecord]]
    received: int = 0
    parties: list[tuple[str, Role, VerifyingKey, int]] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    by_key: dict[str, tuple[str, VerifyingKey]] = field(default_factory=dict)
    ordinals: dict[str, int] = field(default_factory=dict)
    chips: list[ChipRecord] = field(default_factory=list)
    maker: list[int] = field(default_factory=list)
    holder: list[int] = field(default_factory=list)
    state: list[ChipState] = field(default_factory=list)
    sequence: list[int] = field(default_factory=list)
    time: list[int] = field(default_factory=list)
    event: list[int] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    batches: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    identities: set[str] = field(default_factory=set)
    draws: list[tuple[int, CensusDraw, list[int]]] = field(default_factory=list)
    results: dict[int, int] = field(default_factory=dict)
    revoked: set[int] = field(default_factory=set)
    values: dict[str, ReferenceValues] = field(default_factory=dict)
    spans: dict[int, list[dict[str, object]]] = field(default_factory=dict)
    published: tuple[Publication, Listing] | None = None
    check_views: bool = True

    def take(self, entry: LogEntry, *, after_root: tuple[int, bytes]) -> None:
        """Apply the next entry; ``after_root`` is (size, root) of the log before it.

        Raises:
            EvidenceError: the entry breaks a rule of the directory; nothing of it is applied.
        """
        if entry.received < self.received:
            raise EvidenceError(f"event {entry.event} has an earlier time of receipt than the event before it")
        if not self.parties:
            self._found(entry)
            return
        statement = open_signed(entry.signed, self.by_key.get)
        self._check_frame(statement, entry)
        self._apply(statement, entry.event, after_root)
        self.received = entry.received

    def _apply(self, statement: Statement, event: int, after_root: tuple[int, bytes]) -> None:
        match statement:
            case Enrolment():
                self._enrol(statement, event)
            case Genesis():
                self._genesis(statement, event)
            case Transfer():
                self._need_role(statement.receiver, *_HOLDER_ROLES)
                self._move(statement, statement.sender, self.numbers[statement.receiver], ChipState.OWNED, event)
            case Claim():
                self._claim(statement, event)
            case CensusDraw():
                self._draw(statement, event, after_root)
            case CensusResult():
                self._result(statement, event)
            case ReferenceValues():
                self._need_role(statement.maker, Role.MAKER)
                self.values[statement.maker] = statement
            case Revocation():
                self._revoke(statement, event)
            case Publication():
                self._published(statement, event, after_root)

    def _claim(self, statement: Claim, event: int) -> None:
        if statement.claim is not ClaimKind.LOST:
            self._need_role(statement.witness, Role.INSPECTOR)
        self._move(statement, statement.holder, None, _CLAIMS[statement.claim][1], event)

    def _found(self, entry: LogEntry) -> None:
        """Event 0 enrols the registrar, under the key that the caller trusts and not one that the database names."""
        trusted = {self.registrar.key_id: ("registrar", self.registrar)}
        statement = open_signed(entry.signed, trusted.get)
        if not isinstance(statement, Enrolment) or statement.role is not Role.REGISTRAR:
            raise EvidenceError("event 0 does not enrol the registrar")
        if statement.party != "registrar" or statement.key != self.registrar:
            raise EvidenceError("the registrar that event 0 enrols is not the trusted one")
        self._check_frame(statement, entry)
        self._admit(statement, entry.event)
        self.received = entry.received

    def _check_frame(self, statement: Statement, entry: LogEntry) -> None:
        if statement.registry != self.origin:
            raise EvidenceError(f"event {entry.event} was made for another registry, {statement.registry!r:.100}")
        if statement.time > entry.received + CLOCK_SKEW_S:
            raise EvidenceError(f"event {entry.event} is signed for a time that is later than its receipt")
        if isinstance(statement, Transfer | Claim | ReferenceValues) and statement.time < entry.received - VALIDITY_S:
            raise EvidenceError(f"event {entry.event} was signed more than 30 days before it was received")

    def _enrol(self, statement: Enrolment, event: int) -> None:
        if statement.party in self.numbers or statement.key.key_id in self.by_key:
            raise EvidenceError(f"event {event} enrols {statement.party} or its key a second time")
        if statement.role is Role.REGISTRAR:
            raise EvidenceError(f"event {event} enrols a second registrar")
        self._admit(statement, event)

    def _admit(self, statement: Enrolment, event: int) -> None:
        self.numbers[statement.party] = len(self.parties)
        self.by_key[statement.key.key_id] = (statement.party, statement.key)
        self.parties.append((statement.party, statement.role, statement.key, event))

    def _need_role(self, party: str, *roles: Role) -> None:
        number = self.numbers.get(party)
        if number is None or self.parties[number][1] not in roles:
            raise EvidenceError(f"{party} is not enrolled as {' or '.join(role.value for role in roles)}")

    def _genesis(self, statement: Genesis, event: int) -> None:
        self._need_role(statement.maker, Role.MAKER)
        first = len(self.chips)
        records = self.records(first, statement.count)
        if len(records) != statement.count:
            raise EvidenceError(
                f"event {event}: {len(records)} genesis records, but the maker signed for {statement.count}"
            )
        if root_of_hashes([leaf_hash(record.leaf()) for record in records]) != statement.root:
            raise EvidenceError(f"event {event}: the genesis records are not those that {statement.maker} signed for")
        ordinals = {record.chip: ordinal for ordinal, record in enumerate(records, first)}
        identities = [record.identity for record in records if record.identity]
        if len(ordinals) != len(records) or not self.ordinals.keys().isdisjoint(ordinals):
            raise EvidenceError(f"event {event}: a chip has two genesis records")
        if len(set(identities)) != len(identities) or not self.identities.isdisjoint(identities):
            raise EvidenceError(f"event {event}: two chips have one identity")
        maker = self.numbers[statement.maker]
        self.ordinals |= ordinals
        self.identities.update(identities)
        self.chips += records
        self.maker += [maker] * len(records)
        self.holder += [maker] * len(records)
        self.state += [ChipState.FABRICATED] * len(records)
        self.sequence += [0] * len(records)
        self.time += [statement.time] * len(records)
        self.event += [event] * len(records)
        self.batches.append((event, maker, first, statement.count, statement.time))

    def _move(self, statement: Transfer | Claim, holder: str, receiver: int | None, to: ChipState, event: int) -> None:
        self._need_role(holder, *_HOLDER_ROLES)
        allowed = (
            _CLAIMS[statement.claim][0] if isinstance(statement, Claim) else {ChipState.FABRICATED, ChipState.OWNED}
        )
        if isinstance(statement, Claim) and statement.claim is ClaimKind.LOST and statement.positions:
            allowed = allowed | {ChipState.LOST}
        ordinals = []
        for ref in statement.chips:
            ordinal = self._next_of(ref, statement.time, event)
            amends = statement.positions and self.holder[ordinal] == receiver and self._is_open(ordinal, holder)
            if self.holder[ordinal] != self.numbers[holder] and not amends:
                raise EvidenceError(f"event {event}: chip {ref.chip} is not held by {holder}")
            if self.state[ordinal] not in allowed:
                raise EvidenceError(
                    f"event {event}: chip {ref.chip} is {self.state[ordinal].name.lower()}, which forbids this"
                )
            ordinals.append(ordinal)
        self._close_spans(statement, ordinals)
        for ordinal in ordinals:
            self._step(ordinal, self.holder[ordinal] if receiver is None else receiver, to, statement.time, event)

    def _is_open(self, ordinal: int, sender: str) -> bool:
        """Whether the end of the sender's span is not yet stated."""
        last = (self.spans.get(ordinal) or [{}])[-1]
        return (last.get("holder"), last.get("why"), last.get("size")) == (sender, Transfer.kind, None)

    def _close_spans(self, statement: Transfer | Claim | Revocation, ordinals: Sequence[int]) -> None:
        for ordinal, position in zip(ordinals, statement.positions or [None] * len(ordinals), strict=True):
            spans, holder = self.spans.setdefault(ordinal, []), self.parties[self.holder[ordinal]][0]
            close_span(spans, statement, position, holder, self.state[ordinal])

    def _next_of(self, ref: ChipRef, time: int, event: int) -> int:
        ordinal = self.ordinals.get(ref.chip)
        if ordinal is None:
            raise EvidenceError(f"event {event}: chip {ref.chip} has no genesis record")
        if self.chips[ordinal].digest() != ref.digest:
            raise EvidenceError(
                f"event {event}: the genesis record given for chip {ref.chip} is not the one in the log"
            )
        if ref.sequence != self.sequence[ordinal] + 1:
            raise EvidenceError(
                f"event {event}: chip {ref.chip} gets record {ref.sequence} directly after record "
                f"{self.sequence[ordinal]}"
            )
        if time < self.time[ordinal]:
            raise EvidenceError(f"event {event}: chip {ref.chip} moves before its last record")
        return ordinal

    def _revoke(self, statement: Revocation, event: int) -> None:
        ordinals = [self._next_of(ref, statement.time, event) for ref in statement.chips]
        twice = self.revoked.intersection(ordinals)
        if twice:
            raise EvidenceError(f"event {event}: chip {self.chips[min(twice)].chip} is revoked a second time")
        self._close_spans(statement, ordinals)
        for ordinal in ordinals:
            self._step(ordinal, self.holder[ordinal], self.state[ordinal], statement.time, event)
        self.revoked.update(ordinals)

    def listing(self) -> Listing:
        """The list as the log implies it; O(chips)."""
        chips = (
            chip_entry(
                record,
                maker=self.parties[self.maker[ordinal]][0],
                holder=self.parties[self.holder[ordinal]][0],
                state=self.state[ordinal],
                sequence=self.sequence[ordinal],
                revoked=ordinal in self.revoked,
                spans=self.spans.get(ordinal, ()),
            )
            for ordinal, record in enumerate(self.chips)
        )
        admitted = (party_entry(name, role, key) for name, role, key, _ in self.parties)
        return Listing([*chips, *admitted, *map(values_entry, self.values.values())])

    def _published(self, statement: Publication, event: int, before: tuple[int, bytes]) -> None:
        if (statement.size, statement.root) != before:
            raise EvidenceError(f"event {event}: the published view is not of the log before it")
        if not self.check_views:
            return
        listing = self.listing()
        if (statement.entries, statement.map_root) != (len(listing), listing.root):
            raise EvidenceError(
                f"event {event}: the published list is not the one that follows from the registry's log"
            )
        self.published = statement, listing

    def _step(self, ordinal: int, holder: int, state: ChipState, time: int, event: int) -> None:
        self.changes.append(
            Change(
                ordinal,
                self.sequence[ordinal] + 1,
                event,
                time,
                self.holder[ordinal],
                self.state[ordinal],
                holder,
                state,
            )
        )
        self.holder[ordinal] = holder
        self.state[ordinal] = state
        self.sequence[ordinal] += 1
        self.time[ordinal] = time
        self.event[ordinal] = event

    def _draw(self, statement: CensusDraw, event: int, before: tuple[int, bytes]) -> None:
        self._need_role(statement.inspector, Role.INSPECTOR)
        if statement.census != len(self.draws) + 1:
            raise EvidenceError(f"event {event}: census {statement.census} comes after {len(self.draws)} censuses")
        if (statement.size, statement.root) != before:
            raise EvidenceError(f"event {event}: census {statement.census} was not drawn from the log before it")
        owner = None
        if statement.owner:
            self._need_role(statement.owner, *_HOLDER_ROLES)
            owner = self.numbers[statement.owner]
        population = [
            ordinal
            for ordinal, (state, holder) in enumerate(zip(self.state, self.holder, strict=True))
            if state in (ChipState.FABRICATED, ChipState.OWNED) and owner in (None, holder)
        ]
        if len(population) != statement.population:
            raise EvidenceError(
                f"event {event}: census {statement.census} says {statement.population} chips are held, but the log "
                f"gives {len(population)}"
            )
        drawn = [
            population[position]
            for position in draw_without_replacement(statement.seed, len(population), statement.count)
        ]
        if drawn_digest([self.chips[ordinal].chip for ordinal in drawn]) != statement.drawn:
            raise EvidenceError(f"event {event}: census {statement.census} was not drawn by its seed")
        self.draws.append((event, statement, drawn))

    def _result(self, statement: CensusResult, event: int) -> None:
        if not 1 <= statement.census <= len(self.draws) or statement.census in self.results:
            raise EvidenceError(f"event {event}: census {statement.census} was not drawn, or has a result already")
        _, draw, drawn = self.draws[statement.census - 1]
        if (statement.inspector, statement.drawn) != (draw.inspector, draw.drawn):
            raise EvidenceError(f"event {event}: the result is not of the census that was drawn")
        if statement.present + len(statement.retired) + len(statement.missing) != len(drawn):
            raise EvidenceError(f"event {event}: census {statement.census} does not account for every chip drawn")
        self._check_answers(statement, drawn, event)
        times = [self.time[self.ordinals[gone.chip]] for gone in statement.missing]
        for gone in statement.missing:
            if gone.sequence:
                ordinal = self.ordinals[gone.chip]
                self._step(ordinal, self.holder[ordinal], ChipState.LOST, max(statement.time, *times), event)
        self.results[statement.census] = event

    def _check_answers(self, statement: CensusResult, drawn: Sequence[int], event: int) -> None:
        """EvidenceError where a result says of a chip what the log contradicts."""
        asked = {self.chips[ordinal].chip for ordinal in drawn}
        for chip in (*statement.retired, *statement.resurfaced, *(gone.chip for gone in statement.missing)):
            if chip not in asked:
                raise EvidenceError(f"event {event}: chip {chip} was not drawn in census {statement.census}")
        for chip in statement.retired:
            if self.state[self.ordinals[chip]] is not ChipState.DESTROYED:
                raise EvidenceError(f"event {event}: chip {chip} is excused as destroyed, but is not destroyed")
        for chip in statement.resurfaced:
            if self.state[self.ordinals[chip]] not in (ChipState.LOST, ChipState.DESTROYED):
                raise EvidenceError(
                    f"event {event}: chip {chip} is recorded as found again, but was neither lost nor destroyed"
                )
        for gone in statement.missing:
            ordinal = self.ordinals[gone.chip]
            held = self.state[ordinal] in (ChipState.FABRICATED, ChipState.OWNED)
            if gone.sequence != (self.sequence[ordinal] + 1 if held else 0):
                raise EvidenceError(f"event {event}: missing chip {gone.chip} has the wrong record number")
            if self.parties[self.holder[ordinal]][0] != gone.holder:
                raise EvidenceError(f"event {event}: {gone.holder} does not answer for chip {gone.chip}")
