"""The chip-owner directory, from fab to destruction (Shavit 2023, §6).

Six rules:

1. A chip enters once, by a genesis record under its maker's signature, in the maker's hands.
2. It changes hands only by a transfer that holder and receiver sign, between two records of its log; each holder
   answers for its own (``positions``).
3. It is lost by its holder's word, found or destroyed only before an inspector.
4. Every statement is applied whole or not at all, once, in the order of the chip's sequence numbers.
5. The registrar alone revokes a chip's certificate, for good; that moves no chip.
6. Whatever is applied is a leaf of the append-only log in the same transaction, under a head that the registrar signs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from sqlalchemy import Connection, Engine, func, insert, inspect, literal, select

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import SignedHead, SigningKey, VerifyingKey, leaf_hash, root_of_hashes
from inspector.registry import _rules
from inspector.registry._bulk import DuplicateGenesis, insert_genesis
from inspector.registry._database import database_url, describe, open_engine, reading, writing
from inspector.registry._log import append
from inspector.registry._schema import (
    SCHEMA_VERSION,
    batches,
    events,
    genesis,
    heads,
    holdings,
    metadata,
    parties,
    properties,
    tail,
)
from inspector.registry._values import ChipRecord, ChipRef, ChipState, ClaimKind, Role, check_name
from inspector.registry.errors import (
    ImportRejected,
    InvalidStatement,
    RegistryMisuse,
    StatementOutOfOrder,
    UnknownChip,
)
from inspector.registry.positions import Files, challenge_of, position_of
from inspector.registry.publications import Publication, ReferenceValues, Revocation
from inspector.registry.signing import SignedStatement, Statement, open_signed, sign
from inspector.registry.statements import Claim, Enrolment, Genesis, Position, Transfer

__all__ = ["CLOCK_SKEW_S", "VALIDITY_S", "Receipt", "Registry", "Writer", "positions_in", "system_clock"]

CLOCK_SKEW_S = 300
VALIDITY_S = 30 * 86_400
_ORIGIN = "chipwitness-registry/"
_MADE_BY_PARTIES = (Transfer, Claim, ReferenceValues)
"""Statements that are signed elsewhere and might be held back."""


def system_clock() -> int:
    """Seconds since 1970."""
    return int(time.time())


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A statement became event ``event`` of the log; ``head`` commits to it."""

    event: int
    head: SignedHead
    chips: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """A transaction that holds the writer's lock, the registrar's key, and the time at which it took the lock."""

    connection: Connection
    signer: SigningKey
    now: int


class Registry:
    """An open directory. Reading needs no key; writing needs the registrar's, which is never stored.

    Safe for any number of processes at once. ``clock`` gives the registrar's time in seconds since 1970.
    """

    def __init__(self, engine: Engine, *, origin: str, registrar: VerifyingKey, signer: SigningKey | None) -> None:
        self.engine = engine
        self.origin = origin
        self.registrar = registrar
        self._signer = signer
        self.clock: Callable[[], int] = system_clock

    @classmethod
    def create(
        cls, where: str | Path, *, name: str, registrar: SigningKey, clock: Callable[[], int] = system_clock
    ) -> Registry:
        """Create the empty directory ``name`` at a path or database URL; event 0 enrols the registrar.

        Raises:
            RegistryMisuse: there is a registry already, or the place is unusable.
            RegistryUnavailable: the database server cannot be reached.
        """
        origin = _ORIGIN + check_name("registry name", name)
        url = database_url(where)
        if url.get_backend_name() == "sqlite":
            file = Path(str(url.database))
            if not file.absolute().parent.is_dir():
                raise RegistryMisuse(f"{url.database}: the folder does not exist")
            if file.exists() and file.stat().st_size:
                raise RegistryMisuse(f"{url.database} exists already")
        enrolment = Enrolment(
            registry=origin, party="registrar", role=Role.REGISTRAR, key=registrar.verifying, time=clock()
        )
        values = {"schema": str(SCHEMA_VERSION), "origin": origin, "registrar": registrar.verifying.raw.hex()}
        with ExitStack() as undo:
            if url.get_backend_name() == "sqlite" and not file.exists():
                for name in (file.name, f"{file.name}-wal", f"{file.name}-shm"):
                    undo.callback(file.with_name(name).unlink, missing_ok=True)
            engine = open_engine(url, new=True)
            undo.callback(engine.dispose)
            registry = cls(engine, origin=origin, registrar=registrar.verifying, signer=registrar)
            registry.clock = clock
            with writing(engine, lock=False) as connection:
                taken = metadata.tables.keys() & set(inspect(connection).get_table_names())
                if taken:
                    raise RegistryMisuse(f"{describe(url)} has a table {min(taken)!r} already")
                metadata.create_all(connection)
                connection.execute(insert(properties), [{"name": key, "value": value} for key, value in values.items()])
                connection.execute(insert(tail).values(id=0, size=0, frontier=b""))
                writer = Writer(connection=connection, signer=registrar, now=enrolment.time)
                registry.append(writer, sign(enrolment, registrar), chips=0)
                _insert_party(connection, enrolment, event=0)
            undo.pop_all()
        return registry

    @classmethod
    def open(
        cls, where: str | Path, *, registrar: SigningKey | None = None, clock: Callable[[], int] = system_clock
    ) -> Registry:
        """Open an existing directory, for writing if ``registrar`` is its registrar's key.

        Raises:
            RegistryMisuse: nothing there, not a registry, another version, or another registrar's key.
        """
        url = database_url(where)
        if url.get_backend_name() == "sqlite" and not Path(str(url.database)).is_file():
            raise RegistryMisuse(f"{url.database}: no such registry")
        with ExitStack() as undo:
            engine = open_engine(url)
            undo.callback(engine.dispose)
            with reading(engine) as connection:
                if not inspect(connection).has_table(properties.name):
                    raise RegistryMisuse(f"{describe(url)} is not a registry")
                values = {row.name: row.value for row in connection.execute(select(properties))}
            schema = values.get("schema")
            if schema != str(SCHEMA_VERSION):
                raise RegistryMisuse(
                    f"{describe(url)} has schema {schema}, but this program reads schema {SCHEMA_VERSION}"
                )
            try:
                key = VerifyingKey(bytes.fromhex(values["registrar"]))
                origin = values["origin"]
            except (KeyError, ValueError, EvidenceError):
                raise RegistryMisuse(f"{describe(url)} does not name its registrar") from None
            if registrar is not None and registrar.verifying != key:
                raise RegistryMisuse(
                    f"{describe(url)} belongs to registrar {key.key_id}, not {registrar.verifying.key_id}"
                )
            registry = cls(engine, origin=origin, registrar=key, signer=registrar)
            registry.clock = clock
            undo.pop_all()
        return registry

    def __enter__(self) -> Registry:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the database connections."""
        self.engine.dispose()

    def enrol(self, party: str, role: Role, key: VerifyingKey) -> Receipt:
        """Admit a party; its name and its key must both be new.

        Raises:
            InvalidStatement: name or key is enrolled already, or the role is the registrar's.
        """
        statement = Enrolment(registry=self.origin, party=party, role=role, key=key, time=self.clock())
        if role is Role.REGISTRAR:
            raise InvalidStatement(f"{party}: a registry has one registrar")
        with self.writer() as writer:
            connection = writer.connection
            if connection.execute(select(parties.c.name).where(parties.c.name == party)).first():
                raise InvalidStatement(f"{party} is enrolled already")
            owner = connection.execute(select(parties.c.name).where(parties.c.keyid == key.key_id)).scalar()
            if owner is not None:
                raise InvalidStatement(f"{party}: this key already belongs to {owner}")
            receipt = self.append(writer, sign(statement, writer.signer), chips=0)
            _insert_party(connection, statement, event=receipt.event)
        return receipt

    def import_chips(
        self, chips: Sequence[ChipRecord], *, maker: str, label: str, key: SigningKey, time: int | None = None
    ) -> Receipt:
        """Sign ``chips`` as one batch of ``maker`` and take it in; all or none."""
        root = _batch_root(chips)
        statement = Genesis(
            registry=self.origin,
            maker=maker,
            label=label,
            count=len(chips),
            root=root,
            time=self.clock() if time is None else time,
        )
        return self._take_in(sign(statement, key), chips, root)

    def import_signed(self, signed: SignedStatement, chips: Sequence[ChipRecord]) -> Receipt:
        """Take in a batch that its maker signed; all or none.

        Raises:
            ForgedStatement: the maker's signature.
            InvalidStatement: the chips are not those under the signed root.
            ImportRejected: a chip or identity has a genesis record already.
        """
        return self._take_in(signed, chips, _batch_root(chips))

    def refs(self, chips: Sequence[str]) -> tuple[ChipRef, ...]:
        """The chips as subjects of a statement that is made now: with their next sequence numbers."""
        with self.reader() as connection:
            found = _rules.find_holdings(connection, chips)
        for chip in chips:
            if chip not in found:
                raise UnknownChip(f"chip {chip} has no genesis record")
        return tuple(ChipRef(chip, found[chip].record.digest(), found[chip].sequence + 1) for chip in chips)

    def transfer(
        self,
        chips: Sequence[str],
        *,
        sender: str,
        receiver: str,
        release: SigningKey,
        acceptance: SigningKey,
        evidence: Mapping[str, Files] | None = None,
    ) -> Receipt:
        """Make, sign twice and submit a transfer; for a caller who holds both keys."""
        statement = Transfer(
            registry=self.origin,
            chips=self.refs(chips),
            sender=sender,
            receiver=receiver,
            time=self.clock(),
            positions=positions_in(chips, evidence),
        )
        return self.submit(sign(statement, release, acceptance), evidence)

    def claim(
        self,
        claim: ClaimKind,
        chips: Sequence[str],
        *,
        holder: str,
        key: SigningKey,
        witness: str = "",
        witness_key: SigningKey | None = None,
        reason: str = "",
        evidence: Mapping[str, Files] | None = None,
    ) -> Receipt:
        """Make, sign and submit a claim; found and destroyed chips need ``witness`` and its key."""
        statement = Claim(
            registry=self.origin,
            chips=self.refs(chips),
            claim=claim,
            holder=holder,
            witness=witness,
            reason=reason,
            time=self.clock(),
            positions=positions_in(chips, evidence),
        )
        keys = (key,) if witness_key is None else (key, witness_key)
        if len(keys) != len(statement.signatories()):
            raise CallerError(
                f"a claim of {claim.value} chips needs {len(statement.signatories())} keys, not {len(keys)}"
            )
        return self.submit(sign(statement, *keys), evidence)

    def submit(self, signed: SignedStatement, evidence: Mapping[str, Files] | None = None) -> Receipt:
        """Verify a transfer, claim or a maker's reference values and apply it, whole or not at all.

        Args:
            evidence: by chip what it answered, for the positions in the statement; it is deposited.

        Raises:
            StatementRefused: one of its subclasses, naming chip and reason; nothing has changed.
        """
        with self.writer() as writer:
            connection = writer.connection
            statement = self.verified(writer, signed)
            match statement:
                case Transfer():
                    moving, receiver = _rules.check_transfer(connection, statement)
                    self.deposit(writer, statement, moving, evidence)
                    receipt = self.append(writer, signed, chips=len(moving))
                    _rules.move(
                        connection,
                        moving,
                        holder=receiver.number,
                        state=ChipState.OWNED,
                        time=statement.time,
                        event=receipt.event,
                    )
                case Claim():
                    moving, state = _rules.check_claim(connection, statement)
                    self.deposit(writer, statement, moving, evidence)
                    receipt = self.append(writer, signed, chips=len(moving))
                    _rules.move(connection, moving, holder=None, state=state, time=statement.time, event=receipt.event)
                case ReferenceValues():
                    _rules.find_party(connection, statement.maker, Role.MAKER)
                    receipt = self.append(writer, signed, chips=0)
                case _:
                    raise InvalidStatement(f"a {signed.kind} cannot be submitted by a party")
        return receipt

    def deposit(
        self,
        writer: Writer,
        statement: Transfer | Claim | Revocation,
        moving: Sequence[_rules.Holding],
        evidence: Mapping[str, Files] | None,
    ) -> None:
        """Check and keep what shows the positions in a statement; InvalidStatement where nothing does."""
        since = writer.now - VALIDITY_S
        _rules.check_positions(writer.connection, statement, moving, evidence or {}, origin=self.origin, since=since)

    def challenges(self, chips: Sequence[str]) -> dict[str, bytes]:
        """By chip the nonce that it answers, in the registry's name, to change hands; RegistryMisuse without a view."""
        refs = self.refs(chips)
        with self.reader() as connection:
            newest = select(events.c.entry).where(events.c.kind == Publication.kind).order_by(events.c.event.desc())
            view = connection.execute(newest.limit(1)).scalar()
        if view is None:
            raise RegistryMisuse("the registry has not published a view yet: run 'registry publish' first")
        return {ref.chip: challenge_of(view, ref) for ref in refs}

    def deposits(self, keys: Sequence[str]) -> dict[str, dict[str, bytes]]:
        """The files of each of these deposits that there is."""
        with self.reader() as connection:
            return {key: files for key in keys if (files := _rules.deposited(connection, key))}

    def head(self) -> tuple[SignedHead, bytes]:
        """The newest head and its signed form, verified under the registrar's key."""
        with self.reader() as connection:
            data = connection.execute(select(heads.c.head).order_by(heads.c.size.desc()).limit(1)).scalar_one()
        return SignedHead.open(data, self.registrar, self.origin), data

    def head_of(self, connection: Connection, size: int) -> bytes:
        """The signed head over the first ``size`` events."""
        head: bytes | None = connection.execute(select(heads.c.head).where(heads.c.size == size)).scalar()
        if head is None:
            raise EvidenceError(f"the log has {size} events but no head of that size")
        return head

    @contextmanager
    def reader(self) -> Iterator[Connection]:
        """One snapshot of the directory."""
        with reading(self.engine) as connection:
            yield connection

    @contextmanager
    def writer(self) -> Iterator[Writer]:
        """One transaction under the writer's lock; the registrar's time never runs back from one to the next."""
        if self._signer is None:
            raise RegistryMisuse("this registry was opened for reading: writing needs the registrar's key")
        with writing(self.engine) as connection:
            latest = connection.execute(select(events.c.received).order_by(events.c.event.desc()).limit(1)).scalar_one()
            yield Writer(connection=connection, signer=self._signer, now=max(self.clock(), latest))

    def verified(self, writer: Writer, signed: SignedStatement) -> Statement:
        """The statement, its signatures verified under the enrolled keys, made for this registry and this time."""
        statement = open_signed(signed, lambda key_id: _rules.find_party_by_key(writer.connection, key_id))
        about = _about(statement)
        if statement.registry != self.origin:
            raise InvalidStatement(f"{about}: made for registry {statement.registry!r:.100}, but this is {self.origin}")
        if statement.time > writer.now + CLOCK_SKEW_S:
            raise StatementOutOfOrder(f"{about}: signed for time {statement.time}, which is later than {writer.now}")
        if isinstance(statement, _MADE_BY_PARTIES) and statement.time < writer.now - VALIDITY_S:
            raise StatementOutOfOrder(
                f"{about}: signed for time {statement.time}, more than 30 days before {writer.now}"
            )
        return statement

    def append(self, writer: Writer, signed: SignedStatement, *, chips: int) -> Receipt:
        """Log a statement that was checked, in the caller's transaction."""
        event, head = append(
            writer.connection, received=writer.now, signed=signed, origin=self.origin, registrar=writer.signer
        )
        return Receipt(event=event, head=head, chips=chips)

    def _take_in(self, signed: SignedStatement, chips: Sequence[ChipRecord], root: bytes) -> Receipt:
        try:
            with self.writer() as writer:
                connection = writer.connection
                statement = self.verified(writer, signed)
                if not isinstance(statement, Genesis):
                    raise InvalidStatement(f"a {signed.kind} cannot bring chips into the registry")
                if statement.count != len(chips) or statement.root != root:
                    raise InvalidStatement(
                        f"batch {statement.label}: the chips are not the {statement.count} chips that were signed for"
                    )
                maker = _rules.find_party(connection, statement.maker, Role.MAKER)
                receipt = self.append(writer, signed, chips=len(chips))
                highest = connection.execute(select(func.max(genesis.c.ordinal))).scalar()
                first = 0 if highest is None else highest + 1
                insert_genesis(connection, first, chips)
                connection.execute(
                    insert(batches).values(
                        event=receipt.event, maker=maker.number, first=first, count=len(chips), time=statement.time
                    )
                )
                _hold_batch(connection, maker.number, first, statement.time, receipt.event)
        except DuplicateGenesis:
            raise self._duplicate(chips) from None
        return receipt

    def _duplicate(self, chips: Sequence[ChipRecord]) -> ImportRejected:
        """Say which chip of a refused batch is known already."""
        with self.reader() as connection:
            for column, name in ((genesis.c.chip, "chip"), (genesis.c.identity, "identity")):
                by_value = {getattr(record, name): position for position, record in enumerate(chips, 1)}
                by_value.pop("", None)
                if len(by_value) < sum(bool(getattr(record, name)) for record in chips):
                    return ImportRejected(f"the batch holds a {name} twice")
                for some in _rules.chunks(list(by_value)):
                    known = connection.execute(select(column).where(column.in_(some)).limit(1)).scalar()
                    if known is not None:
                        position = by_value[known]
                        chip = chips[position - 1].chip
                        return ImportRejected(f"chip {chip} (number {position} of the batch): {name} is known already")
        return ImportRejected("the batch conflicts with chips in the registry")


def positions_in(chips: Sequence[str], evidence: Mapping[str, Files] | None) -> tuple[Position, ...]:
    """Where the logs of these chips end by what they answered; () where nothing is deposited."""
    return () if not evidence else tuple(position_of(chip, evidence.get(chip, {})) for chip in chips)


def _about(statement: Statement) -> str:
    if isinstance(statement, Transfer | Claim | Revocation):
        more = f" and {len(statement.chips) - 1} more" if len(statement.chips) > 1 else ""
        return f"chip {statement.chips[0].chip}{more}"
    return f"{statement.kind} of {statement.subjects()[0][0]}"


def _batch_root(chips: Sequence[ChipRecord]) -> bytes:
    return root_of_hashes([leaf_hash(record.leaf()) for record in chips])


def _insert_party(connection: Connection, statement: Enrolment, *, event: int) -> None:
    number = connection.execute(select(func.count()).select_from(parties)).scalar_one()
    connection.execute(
        insert(parties).values(
            party=number,
            name=statement.party,
            role=statement.role.value,
            keyid=statement.key.key_id,
            key=statement.key.raw.hex(),
            event=event,
        )
    )


def _hold_batch(connection: Connection, maker: int, first: int, time: int, event: int) -> None:
    columns = ("ordinal", "holder", "state", "sequence", "time", "event")
    fabricated = int(ChipState.FABRICATED)
    rows = select(genesis.c.ordinal, *(literal(value) for value in (maker, fabricated, 0, time, event))).where(
        genesis.c.ordinal >= first
    )
    connection.execute(insert(holdings).from_select(columns, rows))
