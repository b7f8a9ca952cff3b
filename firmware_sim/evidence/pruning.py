"""Where an audit of a chip's log ended, signed by the auditor: the next audit goes on from there.

A chip that is shown such a checkpoint releases the memory of all records before it. What came before stays in the head
and in the registers, so to anyone who trusts the signer, a log from a checkpoint on proves as much as all of it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from typing import Any

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence.chiplog import NO_RUN, ZERO_DIGEST, LogRecord, RecordKind, Registers
from firmware_sim.evidence.envelope import SigningKey, VerifyingKey, open_sealed, read_sealed, seal
from firmware_sim.evidence.work import NO_WORK, Work

__all__ = [
    "BIRTH",
    "LOG_CHECKPOINT_TYPE",
    "LogCheckpoint",
    "open_log_checkpoint",
    "read_log_checkpoint",
    "seal_log_checkpoint",
]

LOG_CHECKPOINT_TYPE = "application/vnd.chipwitness.log-checkpoint+json"
_FORMAT = struct.Struct(">QIQQQQI?32s32s32s32s32s24s")
_ENDS = frozenset({RecordKind.CLOSE_EPOCH, RecordKind.POWER_GAP, RecordKind.BOOT})


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCheckpoint:
    """All that the records after the first `size` build on; the default is `BIRTH`.

    `boot`, `tick`, `busy` and `work` (as `Work.to_bytes` gives it) are those of the last record, `epochs` counts those
    that were opened, `opened` is the commitment of the one that is open (zero: none is), `beacon` the newest beacon's
    time; `measurement` and `security_version` are of the last boot. `head`, `journey` and `current` are the log's hash
    and registers. `spent` says that the last record is SPENT.
    """

    size: int = 0
    boot: int = 0
    tick: int = 0
    busy: int = 0
    epochs: int = 0
    beacon: int = 0
    security_version: int = 0
    spent: bool = False
    head: bytes = ZERO_DIGEST
    journey: bytes = ZERO_DIGEST
    current: bytes = ZERO_DIGEST
    measurement: bytes = ZERO_DIGEST
    opened: bytes = ZERO_DIGEST
    work: bytes = NO_WORK.to_bytes()

    def extend(self, records: Sequence[LogRecord]) -> LogCheckpoint:
        """Return the checkpoint behind `records`, which follow on this one."""
        if not records:
            return self
        registers = Registers(journey=self.journey, current=self.current)
        epochs, opened, beacon = self.epochs, self.opened, self.beacon
        measurement, version = self.measurement, self.security_version
        for record in records:
            registers = registers.extend(record)
            if record.kind is RecordKind.EPOCH:
                epochs, opened = record.step + 1, record.digest
            elif record.kind is RecordKind.BEACON:
                beacon = record.step
            elif record.kind in _ENDS:
                opened = ZERO_DIGEST
            if record.kind is RecordKind.BOOT:
                measurement, version = record.digest, record.step
        last = records[-1]
        return LogCheckpoint(
            size=last.counter + 1,
            boot=last.boot,
            tick=last.tick,
            busy=last.busy,
            epochs=epochs,
            beacon=beacon,
            security_version=version,
            spent=last.kind is RecordKind.SPENT,
            head=last.hash(),
            journey=registers.journey,
            current=registers.current,
            measurement=measurement,
            opened=opened,
            work=last.work.to_bytes(),
        )

    @property
    def ended(self) -> RecordKind | None:
        """The kind of record after which the chip is in the same condition; None where there was none."""
        if self.size == 0:
            return None
        return RecordKind.POWER_GAP if self.spent else RecordKind.QUOTE

    @property
    def epoch_record(self) -> LogRecord | None:
        """The record of the open epoch as if it had been opened here; None where none is open."""
        if self.opened == ZERO_DIGEST:
            return None
        return LogRecord(
            counter=self.size - 1, kind=RecordKind.EPOCH, boot=self.boot, tick=self.tick, busy=self.busy,
            run_id=NO_RUN, step=self.epochs - 1, op=0, digest=self.opened, previous=self.head,
            work=Work.from_bytes(self.work),
        )  # fmt: skip

    def to_bytes(self) -> bytes:
        """Return the `BYTES` bytes that a chip keeps."""
        return _FORMAT.pack(*_values(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> LogCheckpoint:
        """Return what `to_bytes` wrote."""
        names = (field.name for field in fields(cls))
        return cls(**dict(zip(names, _FORMAT.unpack(data), strict=True)))


_values = attrgetter(*(field.name for field in fields(LogCheckpoint)))

BIRTH = LogCheckpoint()
"""Before a chip's first record."""


def seal_log_checkpoint(chip_id: str, checkpoint: LogCheckpoint, key: SigningKey) -> bytes:
    """Return the checkpoint of a chip's log, signed by the party that audited the log up to there."""
    values = {name: value.hex() if type(value) is bytes else value for name, value in asdict(checkpoint).items()}
    return seal(LOG_CHECKPOINT_TYPE, {"chip_id": chip_id, **values}, key)


def open_log_checkpoint(data: bytes, chip_id: str, key: VerifyingKey) -> LogCheckpoint:
    """Return the checkpoint that `key` signed for this chip.

    Raises:
        SignatureError: signed by another key or not at all.
        EvidenceError: malformed, or another chip's.
    """
    return _parse(open_sealed(data, LOG_CHECKPOINT_TYPE, key), chip_id)


def read_log_checkpoint(data: bytes, chip_id: str) -> tuple[LogCheckpoint, str]:
    """Parse without the key, for somebody who wants to read it; also the id of the key that is said to have signed.

    Raises:
        EvidenceError: malformed, or another chip's.
    """
    payload, signer = read_sealed(data, LOG_CHECKPOINT_TYPE)
    return _parse(payload, chip_id), signer


def _parse(payload: object, chip_id: str) -> LogCheckpoint:
    if not isinstance(payload, dict) or set(payload) != {"chip_id", *(field.name for field in fields(LogCheckpoint))}:
        raise EvidenceError("malformed log checkpoint")
    if payload.pop("chip_id") != chip_id:
        raise EvidenceError(f"chip {chip_id}: the log checkpoint belongs to another chip")
    try:
        checkpoint = LogCheckpoint(
            **{field.name: _value(payload[field.name], field.default) for field in fields(LogCheckpoint)}
        )
        if LogCheckpoint.from_bytes(checkpoint.to_bytes()) != checkpoint:
            raise CallerError("this is not a value that a chip keeps")
    except (TypeError, ValueError, struct.error, CallerError):
        raise EvidenceError("malformed log checkpoint") from None
    return checkpoint


def _value(value: object, default: object) -> Any:
    if type(default) is bytes:
        if not isinstance(value, str) or len(value) != 2 * len(default) or bytes.fromhex(value).hex() != value:
            raise ValueError
        return bytes.fromhex(value)
    if type(value) is not type(default):
        raise TypeError
    return value
