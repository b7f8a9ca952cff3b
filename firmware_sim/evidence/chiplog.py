"""The chip's log: fixed-size binary records, each holding the digest of the one before.

Record (166 bytes, big-endian): counter u64, kind u16, boot u32, tick u64, busy u64, meter (calls, FLOP, bytes moved)
3 · u64, run id 32, step u64, op u64, digest 32, previous 32. Record hash = SHA-256 over the length-prefixed label and
the record's bytes; the counter is part of these bytes, so label, index and content are bound. The head of a log is the
hash of its last record.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence.digest import Digest, digest_bytes, length_prefixed
from firmware_sim.evidence.work import NO_WORK, Work

__all__ = [
    "LATE",
    "NO_RUN",
    "RECORD_BYTES",
    "ZERO_DIGEST",
    "LogError",
    "LogRecord",
    "RecordKind",
    "Registers",
    "check_chain",
    "genesis_digest",
    "log_extent",
    "log_head",
    "logs_contradict",
    "parse_log",
    "replay_registers",
]

_FORMAT = struct.Struct(">QHIQQ24s32sQQ32s32s")
_RECORD_PREFIX = length_prefixed("chipwitness/chip-log-record/4") + struct.pack(">Q", _FORMAT.size)
_REGISTER_LABEL = "chipwitness/chip-register/1"

RECORD_BYTES = _FORMAT.size
ZERO_DIGEST = bytes(32)
NO_RUN = bytes(32)
LATE = 1 << 63
"""Bit of a snapshot's op."""


class LogError(EvidenceError):
    """A chip log is malformed or inconsistent; `record` is the number of the first bad record, if one is."""

    def __init__(self, message: str, *, record: int | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.record = record
        self.field = field


class RecordKind(enum.IntEnum):
    """What a record says, and what its `digest`, `run_id`, `step` and `op` mean.

    GENESIS: `genesis_digest`; run_id is the log id. First record only.
    BOOT: the firmware's measurement; step is its security version, op 1 after a clean shutdown and 0 otherwise.
    EPOCH: the commitment to the key of epoch `step`, which begins at the record's time.
    CLOSE_EPOCH: the same commitment again; epoch `step` ends at the record's time.
    POWER_OFF: zero; the chip was shut down in order.
    POWER_GAP: the commitment of the epoch `step` that lost its power; where snapshots were under way op is the tick of
        the first of them and 1, else 0.
    REGIONS: the digest of the region table attached for (run_id, step); op is the bytes of the state of which these
        regions are a share, as the host says.
    COMMIT: what the host committed for (run_id, step); op counts the bytes of results of operators that are held
        outside the declared regions.
    SNAPSHOT: the memory's digest; (run_id, step) is the last commit before it, or what was said when the memory was
        attached. `tick` is the tick of the schedule that demands it; op holds what the chip counted: `operators` since
        the commit, and whether it `is_late`.
    BEACON: the digest of a Verifier-signed beacon; step is its time in seconds.
    QUOTE: the digest of the nonce and verifier id of the quote that covers this record; op as of COMMIT.
    SPENT: zero; the log is full, so the chip never works again, and each later quote covers the log up to here.
    """

    GENESIS = 1
    BOOT = 2
    EPOCH = 3
    CLOSE_EPOCH = 4
    POWER_OFF = 5
    POWER_GAP = 6
    REGIONS = 7
    COMMIT = 8
    SNAPSHOT = 9
    BEACON = 10
    QUOTE = 11
    SPENT = 12


_KINDS = {kind.value: kind for kind in RecordKind}
_WIDTHS = (("counter", 64), ("boot", 32), ("tick", 64), ("busy", 64), ("step", 64), ("op", 64))
_MEASURED = frozenset({RecordKind.BOOT, RecordKind.REGIONS})


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """One entry. `counter` is its index in the log; (boot, tick) is the time, (run_id, step, op) the coordinate.

    `work` is what the meter has counted in this boot, `busy` the whole ticks that this takes, and `tick` those and the
    ticks without work. The time to the 2^-32 tick is `firmware_sim.roofline.time_of`. A SNAPSHOT's `tick` is another.
    """

    counter: int
    kind: RecordKind
    boot: int
    tick: int
    busy: int
    run_id: bytes
    step: int
    op: int
    digest: bytes
    previous: bytes
    work: Work = NO_WORK

    def __post_init__(self) -> None:
        for name in ("run_id", "digest", "previous"):
            if len(getattr(self, name)) != 32:
                raise CallerError(f"log record: {name} has {len(getattr(self, name))} bytes, not 32")
        for name, bits in _WIDTHS:
            if not 0 <= getattr(self, name) < 1 << bits:
                raise CallerError(f"log record: {name} is not in [0, 2^{bits})")

    @property
    def operators(self) -> int:
        """Of a snapshot: how many operators have run on the memory since the last commit, or since it was attached."""
        return self.op & ~LATE

    @property
    def is_late(self) -> bool:
        """Of a snapshot: whether operators may have run between its moment and itself, during a command of the host."""
        return bool(self.op & LATE)

    def to_bytes(self) -> bytes:
        return _FORMAT.pack(
            self.counter, self.kind, self.boot, self.tick, self.busy, self.work.to_bytes(), self.run_id, self.step,
            self.op, self.digest, self.previous,
        )  # fmt: skip

    def hash(self) -> bytes:
        """Return what the next record holds as `previous`."""
        return record_hash(self.to_bytes())


def record_hash(record: bytes) -> bytes:
    return hashlib.sha256(_RECORD_PREFIX + record).digest()


def genesis_digest(chip_id: str, certificate_digest: Digest, log_id: bytes) -> bytes:
    """Return H(chip id, certificate digest, log id), which the log's first record holds."""
    return digest_bytes("chip-log-genesis", length_prefixed(chip_id, str(certificate_digest), log_id)).value


def parse_log(data: bytes, *, chip: str = "") -> list[LogRecord]:
    """Return the records in `data`; their content is judged by `check_chain`, only their form here.

    Law: `b"".join(r.to_bytes() for r in parse_log(data)) == data`.

    Raises:
        LogError: empty, not a whole number of records, or an unknown kind; names the record.
    """
    if not data:
        raise LogError(f"{_of(chip)}log is empty")
    count, rest = divmod(len(data), RECORD_BYTES)
    if rest:
        raise LogError(f"{_of(chip)}log record {count}: has only {rest} of {RECORD_BYTES} bytes", record=count)
    limits.CHIP_LOG_RECORDS.check(count)
    records = []
    for number, fields in enumerate(_FORMAT.iter_unpack(data)):
        counter, kind, boot, tick, busy, work, run_id, step, op, digest, previous = fields
        if kind not in _KINDS:
            raise LogError(f"{_of(chip)}log record {number}: unknown kind {kind}", record=number, field="kind")
        records.append(
            LogRecord(
                counter=counter, kind=_KINDS[kind], boot=boot, tick=tick, busy=busy, run_id=run_id, step=step,
                op=op, digest=digest, previous=previous, work=Work.from_bytes(work),
            )
        )  # fmt: skip
    return records


def check_chain(
    records: Sequence[LogRecord], genesis: bytes, *, chip: str = "", size: int = 0, head: bytes = ZERO_DIGEST
) -> None:
    """Check that `records` are a chain of consecutive counters that starts with the genesis record of this chip.

    Where the chain's first `size` records are not among them, they start with the one behind `head`.

    Raises:
        LogError: names the first bad record and its field.
    """
    if not records:
        raise LogError(f"{_of(chip)}log is empty")
    first = records[0]
    if not size and first.kind is not RecordKind.GENESIS:
        raise _bad(chip, 0, "kind", f"is {first.kind.name}, expected GENESIS")
    if not size and first.digest != genesis:
        raise _bad(chip, 0, "digest", f"is {first.digest.hex()}, expected the chip's genesis {genesis.hex()}")
    if not size and first.previous != ZERO_DIGEST:
        raise _bad(chip, 0, "previous", "is not zero in the first record")
    previous = head
    for number, record in enumerate(records, size):
        if record.counter != number:
            raise _bad(chip, number, "counter", f"is {record.counter}, expected {number}")
        if record.previous != previous:
            raise _bad(chip, number, "previous", "is not the hash of the record before")
        if number and record.kind is RecordKind.GENESIS:
            raise _bad(chip, number, "kind", "is GENESIS, which only the first record may be")
        previous = record.hash()


def log_head(records: Sequence[LogRecord]) -> bytes:
    """Return the hash of the last record."""
    if not records:
        raise LogError("log is empty")
    return records[-1].hash()


def log_extent(log: bytes) -> tuple[int, int]:
    """Return the number of a log's first record and the one behind its last, as the first record numbers itself.

    Raises:
        LogError: empty, or not a whole number of records.
    """
    count, rest = divmod(len(log), RECORD_BYTES)
    if not count or rest:
        raise LogError(f"a log of {len(log)} bytes is not a whole number of records of {RECORD_BYTES} bytes")
    start = int.from_bytes(log[:8], "big")
    return start, start + count


def logs_contradict(one: bytes, other: bytes) -> bool:
    """Say whether two parts of what should be one log differ where they meet.

    They meet in the records that both hold or, where one begins as the other ends, in the hash of the last one.

    Raises:
        LogError: one is empty, or not a whole number of records.
    """
    (one, (first, end)), (other, (start, stop)) = sorted(
        ((log, log_extent(log)) for log in (one, other)), key=lambda entry: entry[1]
    )
    if start > end:
        return False
    if start == end:
        return other[:RECORD_BYTES][-32:] != record_hash(one[-RECORD_BYTES:])
    both = (min(end, stop) - start) * RECORD_BYTES
    place = (start - first) * RECORD_BYTES
    return one[place : place + both] != other[:both]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registers:
    """Measurement registers: `journey` over the chip's whole life, `current` since its last boot.

    Each BOOT and REGIONS record extends both: r ← H(label, register name, counter, kind, record hash, r).
    """

    journey: bytes = ZERO_DIGEST
    current: bytes = ZERO_DIGEST

    def extend(self, record: LogRecord) -> Registers:
        """Return the registers after `record`."""
        if record.kind not in _MEASURED:
            return self
        current = ZERO_DIGEST if record.kind is RecordKind.BOOT else self.current
        return Registers(journey=_extend("journey", self.journey, record), current=_extend("current", current, record))


def replay_registers(records: Iterable[LogRecord]) -> Registers:
    """Return the registers that a chip with this log must hold."""
    registers = Registers()
    for record in records:
        registers = registers.extend(record)
    return registers


def _extend(name: str, value: bytes, record: LogRecord) -> bytes:
    position = struct.pack(">QH", record.counter, record.kind)
    return hashlib.sha256(length_prefixed(_REGISTER_LABEL, name, position, record.hash(), value)).digest()


def _of(chip: str) -> str:
    return f"chip {chip}: " if chip else ""


def _bad(chip: str, number: int, field: str, what: str) -> LogError:
    return LogError(f"{_of(chip)}log record {number}: {field} {what}", record=number, field=field)
