"""What an inspector checks of a chip's evidence, one law a function; all are pure and name chip and record."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from types import MappingProxyType

from firmware_sim._life import check_life
from firmware_sim.audit import ScheduleAudit, audit_schedule, check_epoch_keys
from firmware_sim.chip import Chip
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence.chiplog import (
    ZERO_DIGEST,
    LogError,
    LogRecord,
    RecordKind,
    check_chain,
    genesis_digest,
    log_head,
    parse_log,
)
from firmware_sim.evidence.digest import Digest
from firmware_sim.evidence.pruning import BIRTH, LogCheckpoint
from firmware_sim.evidence.quote import Quote, QuoteError, open_quote
from firmware_sim.evidence.work import Roofline, Work
from firmware_sim.firmware import quote_request_digest
from firmware_sim.identity import ChipIdentity, ChipType, IdentityError, check_firmware, check_maker, read_chain
from firmware_sim.schedule import EpochKey, decode_epoch_keys, encode_epoch_keys

__all__ = [
    "CHIP_GUARDS",
    "CheckedChip",
    "ChipCase",
    "ChipEvidence",
    "ChipTrust",
    "CloneError",
    "LogPosition",
    "RollbackError",
    "SnapshotError",
    "check_boots",
    "check_chip",
    "check_distinct",
    "check_expected_chip",
    "check_extends",
    "check_life",
    "check_log_chain",
    "check_log_quoted",
    "check_quote_identity",
    "check_quote_request",
    "check_quote_settings",
    "check_quote_time",
    "check_regions",
    "check_registers",
    "check_snapshot",
    "collect_evidence",
    "records_of",
]


class RollbackError(EvidenceError):
    """A chip's log does not extend what the inspector saw of it before."""


class CloneError(EvidenceError):
    """Two chips present one identity."""


class SnapshotError(EvidenceError):
    """A snapshot or region table on a chip is not what the transcript explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipEvidence:
    """Evidence of one chip; `checkpoint` is the file behind which its log begins, empty where the log is whole."""

    chain: bytes
    log: bytes
    quote: bytes
    epoch_keys: bytes
    checkpoint: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipTrust:
    """Reference values for chips, from outside of the run.

    `clocks` is by chip what its device does in a tick at most, of the chips of which its maker has said that.
    """

    ca_digests: Collection[Digest]
    measurements: Collection[Digest]
    minimum_security_version: int
    snapshot_rate: Fraction
    snapshot_algorithm: str
    clocks: Mapping[str, Roofline] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPosition:
    """Where a chip's log ended at an earlier inspection.

    `time` is the last at which the inspector knows the chip to have been there, in seconds since 1970: that of the
    newest beacon in its log, or of a live challenge; 0 where there was neither.
    """

    counter: int
    size: int
    head: bytes
    time: int = 0

    @classmethod
    def of(cls, quote: Quote) -> LogPosition:
        return cls(counter=quote.counter, size=quote.log_size, head=quote.log_head, time=quote.beacon)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipCase:
    """Everything that the guards look at: the chip that was asked, the request, the trust, and the opened evidence.

    `since` is where an audit ended that these records go on from; `BIRTH` where they are the whole log.
    """

    chip_id: str
    nonce: bytes
    verifier_id: str
    trust: ChipTrust
    last: LogPosition | None
    identity: ChipIdentity
    quote: Quote
    records: Sequence[LogRecord]
    keys: Sequence[EpochKey]
    since: LogCheckpoint = BIRTH


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedChip:
    """Evidence that passed, and how far the schedule audit reached (None if that guard was off)."""

    identity: ChipIdentity
    quote: Quote
    records: Sequence[LogRecord]
    audit: ScheduleAudit | None
    since: LogCheckpoint = BIRTH

    def checkpoint(self) -> LogCheckpoint:
        """Where this audit ended, for the next one to go on from; CallerError if no schedule was audited."""
        if self.audit is None:
            raise CallerError(f"chip {self.identity.chip_id}: its schedule was not audited")
        return self.since.extend(self.records)


def collect_evidence(chip: Chip, nonce: bytes, verifier_id: str) -> ChipEvidence:
    """Challenge the chip, which closes its epoch so that its schedule can be audited up to now, and take everything."""
    quote = chip.challenge(nonce, verifier_id)
    return ChipEvidence(
        chain=chip.certificate_chain(),
        log=chip.log_bytes(),
        quote=quote,
        epoch_keys=encode_epoch_keys(chip.reveal()),
    )


def check_expected_chip(identity: ChipIdentity, chip_id: str) -> None:
    """The chip that answers is the one that was drawn."""
    if identity.chip_id != chip_id:
        raise IdentityError(f"chip {chip_id}: presents the identity of chip {identity.chip_id}")


def check_quote_request(quote: Quote, nonce: bytes, verifier_id: str) -> None:
    """The quote answers this verifier's present question, not an older one or another's."""
    if quote.nonce != nonce:
        raise QuoteError(f"chip {quote.chip_id}: quote has nonce {quote.nonce.hex()}, expected {nonce.hex()}")
    if quote.verifier_id != verifier_id:
        raise QuoteError(f"chip {quote.chip_id}: quote is for {quote.verifier_id!r:.100}, expected {verifier_id!r}")


def check_quote_identity(quote: Quote, identity: ChipIdentity) -> None:
    """The quote says of the chip what its certificates say."""
    for name in ("chip_id", "certificate_digest", "measurement", "security_version"):
        claimed, certified = getattr(quote, name), getattr(identity, name)
        if claimed != certified:
            raise QuoteError(
                f"chip {identity.chip_id}: quote has {name} {claimed}, but its certificate has {certified}"
            )
    claimed = ChipType(quote.snapshot_rate, quote.roofline)
    if identity.type is not None and claimed != identity.type:
        text = f"quote is of a {claimed.model}, its certificate of a {identity.type.model}"
        raise QuoteError(f"chip {identity.chip_id}: {text}")


def check_quote_settings(
    quote: Quote, snapshot_rate: Fraction, snapshot_algorithm: str, clock: Roofline | None = None
) -> None:
    """The chip takes snapshots as often as agreed, with the digest agreed, in ticks as long as its maker says."""
    if clock is not None and quote.roofline != clock:
        raise QuoteError(
            f"chip {quote.chip_id}: its tick is {quote.roofline.flop} FLOP or {quote.roofline.moved} bytes, but its "
            f"maker gives {clock.flop} FLOP or {clock.moved} bytes"
        )
    if quote.snapshot_rate != snapshot_rate:
        raise QuoteError(f"chip {quote.chip_id}: snapshot rate is {quote.snapshot_rate}, expected {snapshot_rate}")
    if quote.snapshot_algorithm != snapshot_algorithm:
        raise QuoteError(
            f"chip {quote.chip_id}: snapshot digest is {quote.snapshot_algorithm!r}, expected {snapshot_algorithm!r}"
        )


def check_log_chain(records: Sequence[LogRecord], identity: ChipIdentity, since: LogCheckpoint = BIRTH) -> None:
    """The log is an unbroken chain from this chip's genesis, or from the last audit, on.

    The chip keeps no COMMIT record, only the head into which it folded it: one that is wrong or missing shows here.
    """
    if not records:
        raise LogError(f"chip {identity.chip_id}: log is empty")
    genesis = genesis_digest(identity.chip_id, identity.certificate_digest, records[0].run_id)
    check_chain(records, genesis, chip=identity.chip_id, size=since.size, head=since.head)


def check_log_quoted(records: Sequence[LogRecord], quote: Quote, since: LogCheckpoint = BIRTH) -> None:
    """The log is the one quoted: all of it and nothing more, ending with the record of this very quote.

    The log of a spent chip ends for good, with the record that says so.
    """
    size = len(records) + since.size
    if size != quote.log_size:
        raise QuoteError(f"chip {quote.chip_id}: log has {size} records, but its quote gives {quote.log_size}")
    if log_head(records) != quote.log_head:
        raise QuoteError(
            f"chip {quote.chip_id}: log ends with head {log_head(records).hex()}, but its quote gives "
            f"{quote.log_head.hex()}"
        )
    last = records[-1]
    request = quote_request_digest(quote.nonce, quote.verifier_id).value
    recorded = last.kind is RecordKind.QUOTE and last.digest == request
    if not recorded and last.kind is not RecordKind.SPENT:
        raise QuoteError(
            f"chip {quote.chip_id}: log record {last.counter}: is not the record of this quote, although it is the "
            "last one"
        )
    if quote.counter < quote.log_size:
        raise QuoteError(f"chip {quote.chip_id}: counter {quote.counter} is below its log's size {quote.log_size}")


def check_registers(records: Sequence[LogRecord], quote: Quote, since: LogCheckpoint = BIRTH) -> None:
    """The measurement registers are those that replaying the log gives."""
    end = since.extend(records)
    for name in ("journey", "current"):
        quoted, replayed = getattr(quote, name), getattr(end, name)
        if quoted != replayed:
            raise QuoteError(
                f"chip {quote.chip_id}: {name} register is {quoted.hex()}, but its log gives {replayed.hex()}"
            )


def check_quote_time(records: Sequence[LogRecord], quote: Quote, since: LogCheckpoint = BIRTH) -> None:
    """Boot, tick, epoch, firmware, newest beacon and meter in the quote are those of the log's end."""
    end = since.extend(records)
    for kind, seen in ((RecordKind.BOOT, end.measurement != ZERO_DIGEST), (RecordKind.EPOCH, end.epochs)):
        if not seen:
            raise LogError(f"chip {quote.chip_id}: log holds no {kind.name} record")
    logged = {
        "boot": end.boot,
        "tick": end.tick,
        "epoch": end.epochs - 1,
        "security_version": end.security_version,
        "measurement": Digest("sha256", end.measurement),
        "beacon": end.beacon,
        "held": records[-1].op if records[-1].kind is RecordKind.QUOTE else 0,
        **asdict(Work.from_bytes(end.work)),
    }
    for name, value in logged.items():
        if getattr(quote, name) != value:
            raise QuoteError(
                f"chip {quote.chip_id}: quote has {name} {getattr(quote, name)}, but its log gives {value}"
            )


def check_boots(records: Sequence[LogRecord], trust: ChipTrust, *, chip: str) -> None:
    """Every boot in the chip's life was of allowed firmware, not just the last one before the inspection."""
    allowed = {measurement.value for measurement in trust.measurements}
    for record in records_of(records, RecordKind.BOOT):
        if record.digest not in allowed:
            raise LogError(
                f"chip {chip}: log record {record.counter}: boot {record.boot} of firmware {record.digest.hex()}, "
                "which is not allowed",
                record=record.counter,
                field="digest",
            )
        if record.step < trust.minimum_security_version:
            raise LogError(
                f"chip {chip}: log record {record.counter}: boot {record.boot} has security version {record.step}, "
                f"below {trust.minimum_security_version}",
                record=record.counter,
                field="step",
            )


def check_extends(
    records: Sequence[LogRecord], quote: Quote, last: LogPosition | None, since: LogCheckpoint = BIRTH
) -> None:
    """The log extends what the inspector saw of it last, and the counter has grown; None: never seen.

    What lies before a checkpoint was seen when that was signed.
    """
    if last is None:
        return
    chip, start = quote.chip_id, since.size
    if start + len(records) < last.size:
        raise RollbackError(
            f"chip {chip}: log has {start + len(records)} records, but had {last.size} at the last inspection"
        )
    heads = {start: since.head}
    heads |= {last.size: records[last.size - start - 1].hash()} if last.size > start else {}
    if last.size and heads.get(last.size, last.head) != last.head:
        raise RollbackError(
            f"chip {chip}: log record {last.size - 1}: is not the record that ended the log at the last inspection"
        )
    if quote.counter <= last.counter:
        raise RollbackError(f"chip {chip}: counter {quote.counter} has not grown since the last inspection")


def check_regions(records: Sequence[LogRecord], run_id: bytes, expected: Digest, *, chip: str) -> None:
    """The chip's memory for this run was declared whenever attached, and always as the table with this digest."""
    attached = [record for record in records_of(records, RecordKind.REGIONS) if record.run_id == run_id]
    if not attached:
        raise SnapshotError(f"chip {chip}: it never attached memory for run {run_id.hex()}")
    for record in attached:
        if record.digest != expected.value:
            raise SnapshotError(
                f"chip {chip}: log record {record.counter}: region table is {record.digest.hex()}, "
                f"expected {expected.value.hex()}"
            )


def check_snapshot(record: LogRecord, expected: Digest, *, chip: str) -> None:
    """A snapshot holds the memory that the replay gives at its coordinate."""
    if record.digest != expected.value:
        raise SnapshotError(
            f"chip {chip}: log record {record.counter}: snapshot of step {record.step} is {record.digest.hex()}, "
            f"expected {expected.value.hex()}"
        )


def check_distinct(cases: Sequence[tuple[ChipIdentity, Sequence[LogRecord]]]) -> None:
    """No two chips of a fleet share a chip id, a device certificate, an alias key, or a log whose start names it."""
    seen: dict[object, int] = {}
    for number, (identity, records) in enumerate(cases):
        if not records:
            raise LogError(f"chip {identity.chip_id}: log is empty")
        marks = [identity.chip_id, identity.certificate_digest, identity.alias_key]
        marks += [records[0].run_id] if records[0].kind is RecordKind.GENESIS else []
        for mark in marks:
            if mark in seen:
                raise CloneError(
                    f"chip {identity.chip_id}: chip number {number} is a clone of chip number {seen[mark]}"
                )
        seen.update(dict.fromkeys(marks, number))


def records_of(records: Sequence[LogRecord], kind: RecordKind) -> list[LogRecord]:
    return [record for record in records if record.kind is kind]


CHIP_GUARDS: Mapping[str, Callable[[ChipCase], object]] = MappingProxyType(
    {
        "maker": lambda case: check_maker(case.identity, case.trust.ca_digests),
        "firmware": lambda case: check_firmware(
            case.identity, case.trust.measurements, case.trust.minimum_security_version
        ),
        "expected chip": lambda case: check_expected_chip(case.identity, case.chip_id),
        "quote request": lambda case: check_quote_request(case.quote, case.nonce, case.verifier_id),
        "quote identity": lambda case: check_quote_identity(case.quote, case.identity),
        "quote settings": lambda case: check_quote_settings(
            case.quote,
            case.trust.snapshot_rate,
            case.trust.snapshot_algorithm,
            case.trust.clocks.get(case.chip_id),
        ),
        "extension": lambda case: check_extends(case.records, case.quote, case.last, case.since),
        "log chain": lambda case: check_log_chain(case.records, case.identity, case.since),
        "log quoted": lambda case: check_log_quoted(case.records, case.quote, case.since),
        "life": lambda case: check_life(
            case.records, chip=case.identity.chip_id, roofline=case.quote.roofline, since=case.since
        ),
        "registers": lambda case: check_registers(case.records, case.quote, case.since),
        "quote time": lambda case: check_quote_time(case.records, case.quote, case.since),
        "boots": lambda case: check_boots(case.records, case.trust, chip=case.identity.chip_id),
        "epoch keys": lambda case: check_epoch_keys(
            case.records,
            case.keys,
            chip=case.identity.chip_id,
            roofline=case.quote.roofline,
            since=case.since,
        ),
        "schedule": lambda case: audit_schedule(
            case.records,
            case.keys,
            rate=case.trust.snapshot_rate,
            roofline=case.quote.roofline,
            chip=case.identity.chip_id,
            since=case.since,
        ),
    }
)


def check_chip(
    evidence: ChipEvidence,
    *,
    chip_id: str,
    trust: ChipTrust,
    nonce: bytes,
    verifier_id: str,
    last: LogPosition | None,
    since: LogCheckpoint = BIRTH,
) -> CheckedChip:
    """Check one chip's evidence by all of ``CHIP_GUARDS``, in order, and return it opened.

    With `since`, the evidence is that of a chip that released all records before this checkpoint, and the work is in
    proportion to what came after it.

    Raises:
        EvidenceError: names the chip, and the record if there is one; or a checkpoint is handed over with a whole log.
        CallerError: the trust is empty.
    """
    if evidence.checkpoint and since == BIRTH:
        raise EvidenceError(
            f"chip {chip_id}: a checkpoint was handed over, although the log is judged from record 0 on"
        )
    identity = read_chain(evidence.chain)
    case = ChipCase(
        chip_id=chip_id,
        nonce=nonce,
        verifier_id=verifier_id,
        trust=trust,
        last=last,
        identity=identity,
        quote=open_quote(evidence.quote, identity.alias_key),
        records=parse_log(evidence.log, chip=identity.chip_id),
        keys=decode_epoch_keys(evidence.epoch_keys),
        since=since,
    )
    results = {name: guard(case) for name, guard in CHIP_GUARDS.items()}
    audit = results.get("schedule")
    return CheckedChip(
        identity=identity,
        quote=case.quote,
        records=case.records,
        audit=audit if isinstance(audit, ScheduleAudit) else None,
        since=since,
    )
