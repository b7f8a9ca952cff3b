"""The grammar of a chip's life: which records may follow which, and how time, boots and epochs advance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from firmware_sim.evidence.chiplog import ZERO_DIGEST, LogError, LogRecord, RecordKind
from firmware_sim.evidence.pruning import BIRTH, LogCheckpoint
from firmware_sim.evidence.work import NO_WORK, TICK, Roofline, Work

__all__ = ["check_life"]

_OFF = frozenset({RecordKind.GENESIS, RecordKind.POWER_OFF, RecordKind.POWER_GAP})
_BEFORE_SPENT = frozenset({RecordKind.CLOSE_EPOCH, RecordKind.POWER_OFF, RecordKind.POWER_GAP})
_CLEAN = frozenset({RecordKind.GENESIS, RecordKind.POWER_OFF})


def check_life(records: Sequence[LogRecord], *, chip: str, roofline: Roofline, since: LogCheckpoint = BIRTH) -> None:
    """Check that the records can be the life of one chip, from its start or from a checkpoint on.

    Laws: GENESIS once, first. A chip that is off only boots, and says whether it was shut down in order; a POWER_GAP
    appears exactly where it was not. Boots and epochs count up by one. Within a boot the meter starts at 0 and never
    falls, busy ticks are those that its counts take, and the idle ones never fall either. Snapshots of an epoch are of
    rising ticks. At most one epoch is open; time passes and work, commitments and quotes happen in an open epoch only.
    Each beacon is later than the one before. Nothing comes after SPENT, which is written where an epoch or a boot has
    ended, but a boot if a checkpoint lies between.

    Args:
        roofline: of the chip's device.

    Raises:
        LogError: names the record and its field.
    """
    life = _Life.after(since, chip, roofline)
    takes = roofline.time(life.work) // TICK
    if life.busy != takes:
        raise LogError(
            f"chip {chip}: its checkpoint has {life.busy} busy ticks, but the work that the meter counted takes {takes}"
        )
    for record in records:
        life.take(record)


@dataclass(slots=True)
class _Life:
    chip: str
    roofline: Roofline
    last: RecordKind | None = None
    boot: int = 0
    tick: int = 0
    busy: int = 0
    work: Work = NO_WORK
    idle: int = 0
    snapshot_tick: int = 0
    epochs: int = 0
    open_epoch: LogRecord | None = None
    beacon_time: int = 0
    _record: LogRecord = field(init=False)

    @classmethod
    def after(cls, since: LogCheckpoint, chip: str, roofline: Roofline) -> _Life:
        return cls(
            chip=chip,
            roofline=roofline,
            last=since.ended,
            boot=since.boot,
            tick=since.tick,
            busy=since.busy,
            work=Work.from_bytes(since.work),
            idle=since.tick - since.busy,
            snapshot_tick=since.tick,
            epochs=since.epochs,
            open_epoch=since.epoch_record,
            beacon_time=since.beacon,
        )

    def take(self, record: LogRecord) -> None:
        self._record = record
        kind = record.kind
        if self.last is None or kind is RecordKind.GENESIS:
            self._require(self.last is None and kind is RecordKind.GENESIS, "kind", f"is {kind.name} at this place")
            self._require((record.boot, record.tick) == (0, 0), "boot", "is not 0 in the first record")
            self._require(record.busy == 0, "busy", f"is {record.busy} in the first record, expected 0")
            self._require(record.work == NO_WORK, "work", f"is {record.work} in the first record, expected none")
        elif self.last is RecordKind.SPENT:
            self._require(False, "kind", f"is {kind.name} after the log was full")
        elif kind is RecordKind.SPENT:
            self._require(self.last in _BEFORE_SPENT, "kind", "is SPENT where neither an epoch nor a boot has ended")
            same = (record.boot, record.tick, record.busy, record.work) == (self.boot, self.tick, self.busy, self.work)
            self._require(same, "tick", "is not the time of the record before")
        elif self.last in _OFF:
            self._require(kind is RecordKind.BOOT, "kind", f"is {kind.name} while the chip is off")
            self._take_boot(record)
        else:
            self._take_running(record)
        self.last = kind
        self.boot, self.tick, self.busy, self.work = record.boot, record.tick, record.busy, record.work

    def _take_boot(self, record: LogRecord) -> None:
        self._require(record.boot == self.boot + 1, "boot", f"is {record.boot}, expected {self.boot + 1}")
        self._require(record.tick == 0, "tick", f"is {record.tick} at boot, expected 0")
        self._require(record.busy == 0, "busy", f"is {record.busy} at boot, expected 0")
        self._require(record.work == NO_WORK, "work", f"is {record.work} at boot, expected none")
        clean = int(self.last in _CLEAN)
        self._require(record.op == clean, "op", f"is {record.op}, expected {clean} for how the last boot ended")
        self.idle = self.snapshot_tick = 0

    def _take_running(self, record: LogRecord) -> None:
        kind = record.kind
        self._require(record.boot == self.boot, "boot", f"is {record.boot}, expected {self.boot}")
        self._take_time(record)
        if kind is RecordKind.BOOT:
            self._require(False, "kind", "is BOOT, with neither a shutdown nor a power gap before it")
        elif kind is RecordKind.EPOCH:
            self._require(self.open_epoch is None, "kind", "is EPOCH while one is open")
            self._require(record.step == self.epochs, "step", f"is epoch {record.step}, expected {self.epochs}")
            self.open_epoch = record
            self.epochs += 1
            self.snapshot_tick = record.tick  # which may hold one of each epoch that has a part of it
        elif kind is RecordKind.CLOSE_EPOCH:
            self._take_close(record)
        elif kind is RecordKind.POWER_OFF:
            self._require(self.open_epoch is None, "kind", "is POWER_OFF while an epoch is open")
        elif kind is RecordKind.POWER_GAP:
            self._take_gap(record)
        else:
            self._take_work(record)

    def _take_time(self, record: LogRecord) -> None:
        takes = self.roofline.time(record.work) // TICK
        self._require(self.work <= record.work, "work", f"is {record.work}, below {self.work} of the record before")
        self._require(
            record.busy == takes, "busy", f"is {record.busy}, but the work that the meter counted takes {takes} ticks"
        )
        idle = self.idle
        if record.kind is not RecordKind.SNAPSHOT:
            idle = record.tick - record.busy
            self._require(
                idle >= self.idle,
                "tick",
                f"is {record.tick}, which leaves {idle} idle ticks, fewer than the {self.idle} before",
            )
        is_still = self.open_epoch is not None or (record.work, idle) == (self.work, self.idle)
        self._require(is_still, "tick", f"is {record.tick}, but no epoch has been open since tick {self.tick}")
        self.idle = idle

    def _take_close(self, record: LogRecord) -> None:
        opened = self._opened(record)
        self._require(record.step == opened.step, "step", f"is epoch {record.step}, expected {opened.step}")
        self._require(record.digest == opened.digest, "digest", "is not the commitment of the open epoch")
        self.open_epoch = None

    def _take_gap(self, record: LogRecord) -> None:
        lost = ZERO_DIGEST if self.open_epoch is None else self.open_epoch.digest
        self._require(record.digest == lost, "digest", "is not the commitment of the epoch that lost its power")
        epoch = max(self.epochs - 1, 0)
        self._require(record.step == epoch, "step", f"is epoch {record.step}, expected {epoch}")
        if record.op:
            above = self.snapshot_tick < record.op <= record.tick + 1
            self._require(above, "op", f"is tick {record.op - 1} and 1, which holds a snapshot or is still to come")
        self.open_epoch = None

    def _take_work(self, record: LogRecord) -> None:
        self._opened(record)
        if record.kind is RecordKind.SNAPSHOT:
            above = record.tick >= self.snapshot_tick
            self._require(above, "tick", f"is {record.tick}, not above {self.snapshot_tick - 1} of the one before")
            self.snapshot_tick = record.tick + 1
        elif record.kind is RecordKind.BEACON:
            later = record.step > self.beacon_time
            self._require(later, "step", f"is a beacon of {record.step}, not later than that of {self.beacon_time}")
            self.beacon_time = record.step

    def _opened(self, record: LogRecord) -> LogRecord:
        if self.open_epoch is None:
            raise self._error("kind", f"is {record.kind.name} while no epoch is open")
        return self.open_epoch

    def _require(self, condition: bool, name: str, what: str) -> None:
        if not condition:
            raise self._error(name, what)

    def _error(self, name: str, what: str) -> LogError:
        number = self._record.counter
        return LogError(f"chip {self.chip}: log record {number}: {name} {what}", record=number, field=name)
