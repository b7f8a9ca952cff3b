"""The honest firmware: the commands of a chip over a chip folder.

Its parts build on each other: power and identity, clock, log, snapshot pipeline, and here the commands. Whatever a
dishonest chip does otherwise is a hook (`firmware_sim.hooks`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any, Self

from firmware_sim._clock import Waiting
from firmware_sim._commands import check_coordinate, check_digest, check_request, check_sealed, check_ticks, command
from firmware_sim._silicon import Fuses, create_silicon
from firmware_sim._snapshots import SnapshottingChip
from firmware_sim.beacon import beacon_digest, open_beacon
from firmware_sim.chip import SnapshotEvent, Utilisation
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence.chiplog import LogRecord, RecordKind
from firmware_sim.evidence.digest import Digest, digest_bytes, length_prefixed
from firmware_sim.evidence.pruning import open_log_checkpoint
from firmware_sim.evidence.quote import Quote
from firmware_sim.evidence.work import TICK
from firmware_sim.identity import ChipType, issue_alias
from firmware_sim.mailbox import ErrorCode
from firmware_sim.memory import DeviceMemory, MemoryCopy
from firmware_sim.nvram import Disk, PosixDisk
from firmware_sim.order import ChipOrder
from firmware_sim.profiles import FOLDED, NvramStatus
from firmware_sim.schedule import EpochKey, derive_epoch_key

__all__ = ["FirmwareChip", "quote_request_digest"]

_MOST_SHARDS = 4
"""Of them a host that asks after each step misses few."""


class FirmwareChip(SnapshottingChip):
    """The honest firmware over a chip folder; `manufacture` or `power_on` makes one.

    A chip whose log has no room left for another boot, epoch or quote is spent: it closes its epoch, says so in its
    last record, and from then on answers inspections and refuses all else.
    """

    @classmethod
    def manufacture(cls, folder: Path | str, *, disk: Disk | None = None, **order: Any) -> Self:
        """Make a chip in `folder` (which must not exist) and boot it; the keywords are those of `ChipOrder`.

        `disk` is where the system calls go, for fault tests.
        """
        return cls.from_order(folder, ChipOrder(**order), disk=disk)

    @classmethod
    def from_order(cls, folder: Path | str, order: ChipOrder, *, disk: Disk | None = None) -> Self:
        """Make a chip in `folder` and boot it."""
        cls.burn(Path(folder), order, disk or PosixDisk())
        return cls.power_on(folder, disk=disk)

    @classmethod
    def burn(cls, folder: Path, order: ChipOrder, disk: Disk) -> None:
        """Make a chip in `folder`, which must not exist, and leave it off."""
        built = cls._hooks_type.order(order)
        kind = ChipType(Fraction(built.snapshot_rate), built.roofline)
        fuses = Fuses(
            secrets=built.maker.issue_device(built.chip_id, built.seed, kind),
            snapshot_rate=built.snapshot_rate,
            roofline=built.roofline,
            algorithm=built.algorithm,
            beacon_key=built.beacon_key,
            nvram=built.nvram.with_quotas(built.quotas),
        )
        create_silicon(folder, fuses, built.maker.sign_firmware(built.firmware), disk)
        cls._hooks_type.made(folder, order, disk)

    @property
    @command
    def position(self) -> tuple[int, int]:
        return self._position

    @property
    @command
    def utilisation(self) -> Utilisation:
        state = self._silicon.state
        return Utilisation(
            busy_ticks=self._fuses.roofline.time(self._work) // TICK,
            idle_ticks=state.tick - state.busy,
            snapshots=self._snapshots,
            bytes_hashed=self._bytes_hashed,
        )

    @property
    @command
    def nvram(self) -> NvramStatus:
        """How much of its memory the chip uses and how worn it is."""
        return self._nvram_status()

    @command
    def attach(self, memory: DeviceMemory, run_id: bytes, step: int) -> LogRecord:
        check_coordinate(self._fused_id, run_id, step)
        memory = self._own_memory(memory)
        buffers = MemoryCopy.blank(memory.slices())  # no snapshot waits for them
        _, whole = memory.share
        table = memory.table_digest().value
        record = self._append(RecordKind.REGIONS, run_id=run_id, step=step, op=whole, digest=table)
        self._memory, self._copy = memory, buffers
        self._earlier, self._attached_at = record.work, memory.meter.total
        self._counted, self._waiting = self._attached_at, Waiting(self)
        self._committed_at = self._counted.calls
        self._prepare(memory)
        self._coordinate = (run_id, step)
        self._await_next()
        return record

    @command
    def commit(self, run_id: bytes, step: int, digest: bytes) -> LogRecord:
        check_coordinate(self._fused_id, run_id, step)
        check_digest(self._fused_id, digest)
        record = self._append(RecordKind.COMMIT, run_id=run_id, step=step, op=self._held, digest=digest)
        self._committed_at = self._counted.calls
        self._coordinate = (run_id, step)
        return record

    @command
    def idle(self, ticks: int) -> list[SnapshotEvent]:
        check_ticks(self._fused_id, ticks)
        self._require_service()
        self._catch_up()
        start, passed, events = self._time, 0, list[SnapshotEvent]()
        moments = self._moments(start, start + ticks * TICK)
        for until, group in groupby(moments, lambda moment: -((start - moment) // TICK)):
            due = [moment // TICK for moment in group]
            self._room_for(due)
            self._settle()
            timed = self._timed(self._silicon.state, idle=until - passed)
            self._store(dataclasses.replace(timed, pending=due[0] + 1))
            passed = until
            events += self._snapshot(due)
            if self._spent:
                return events
        self._store(self._timed(self._silicon.state, idle=ticks - passed))
        self._await_next()
        return events

    @command
    def shards(self) -> list[tuple[int, bytes]]:
        found = list(self._shards or ())
        self._shards = deque(maxlen=_MOST_SHARDS)
        return found

    @command
    def beacon(self, signed: bytes) -> LogRecord:
        check_sealed(self._fused_id, signed)
        if self._fuses.beacon_key is None:
            self._refuse(ErrorCode.NO_BEACON_KEY, "it has no verifier's beacon key fused in")
        try:
            beacon = open_beacon(signed, self._fuses.beacon_key)
        except EvidenceError as error:
            self._refuse(ErrorCode.BAD_BEACON, str(error))
        if beacon.chip_id != self._fused_id or (beacon.boot, beacon.size) != self._position:
            boot, size = self._position
            self._refuse(
                ErrorCode.BAD_BEACON,
                f"beacon is for chip {beacon.chip_id!r:.100} at boot {beacon.boot} with {beacon.size} records, and "
                f"this one is at boot {boot} with {size}",
            )
        if beacon.time <= self._beacon_time:
            self._refuse(
                ErrorCode.BAD_BEACON,
                f"beacon of time {beacon.time} is not later than the last one, of time {self._beacon_time}",
            )
        record = self._append(RecordKind.BEACON, step=beacon.time, digest=beacon_digest(signed).value)
        self._beacon_time = beacon.time
        return record

    @command
    def prune(self, signed: bytes) -> int:
        """Release all records before a log checkpoint that the verifier signed; a spent chip boots again.

        Returns the bytes of NVRAM that are free.
        """
        check_sealed(self._fused_id, signed)
        self._require_power()
        if self._fuses.beacon_key is None:
            self._refuse(ErrorCode.NO_BEACON_KEY, "it has no verifier's key fused in")
        try:
            checkpoint = open_log_checkpoint(signed, self._fused_id, self._fuses.beacon_key)
        except EvidenceError as error:
            self._refuse(ErrorCode.BAD_CHECKPOINT, str(error))
        state, records = self._silicon.state, self._read_log()
        released = records[: max(checkpoint.size - state.checkpoint.size, 0)]
        if not released or state.checkpoint.extend(released) != checkpoint:
            self._refuse(ErrorCode.BAD_CHECKPOINT, "its log never was what the checkpoint says, or no longer holds it")
        cells = sum(record.kind not in FOLDED for record in released)
        self._silicon.prune(dataclasses.replace(state, checkpoint=checkpoint, released=state.released + cells))
        self._counts = Counter(record.kind for record in records[len(released) :])
        if checkpoint.spent:
            self._spent = False
            self._forget()
            self._start()
        return self._fuses.nvram.capacity - self._nvram_status().used

    @command
    def close_epoch(self) -> int:
        self._require_power()
        return self._close_epoch()

    def _close_epoch(self) -> int:
        state = self._silicon.state
        closes = self._hooks.closing(self.time)
        if self._silicon.state is not state:
            self._resume()
        closed = self._epoch
        if self._spent:
            return closed
        if not closes:
            return closed - 1
        if self._has_room({RecordKind.EPOCH: 1, RecordKind.CLOSE_EPOCH: 2}):
            self._end_epoch()
            self._open_epoch(closed + 1)
        else:
            self._retire()
        return closed

    @command
    def reveal(self) -> tuple[EpochKey, ...]:
        since = self._silicon.state.checkpoint
        first = since.epochs - (since.epoch_record is not None)  # the epoch that was open then has ended since
        return tuple(
            EpochKey(epoch=epoch, key=derive_epoch_key(self._fuses.schedule_secret, epoch))
            for epoch in range(first, self._epoch + self._spent)
        )

    @command
    def quote(self, nonce: bytes, verifier_id: str) -> bytes:
        check_request(self._fused_id, nonce, verifier_id)
        self._require_power()
        self._catch_up()
        return self._quote(nonce, verifier_id)

    @command
    def challenge(self, nonce: bytes, verifier_id: str) -> bytes:
        check_request(self._fused_id, nonce, verifier_id)
        self._require_power()
        self._close_epoch()
        return self._quote(nonce, verifier_id)

    def _quote(self, nonce: bytes, verifier_id: str) -> bytes:
        self._hooks.quoting(nonce, verifier_id)
        if not self._spent and not self._has_room({RecordKind.QUOTE: 1}):
            self._retire()
        held = 0 if self._spent else self._held
        if self._spent:
            self._store(self._silicon.state)  # the counter grows with each quote
        else:
            self._append(RecordKind.QUOTE, op=held, digest=quote_request_digest(nonce, verifier_id).value)
        state = self._silicon.state
        quote = Quote(
            chip_id=self._fused_id,
            certificate_digest=self.certificate_digest,
            measurement=self._firmware.measurement,
            security_version=self._firmware.security_version,
            boot=self._boot,
            tick=state.tick,
            epoch=self._epoch,
            counter=self._silicon.nvram.sequence,
            log_size=self._silicon.state.log_size,
            log_head=self._silicon.state.log_head,
            journey=self._registers.journey,
            current=self._registers.current,
            snapshot_rate=self._fuses.snapshot_rate,
            flop_rate=self._fuses.roofline.flop,
            moved_rate=self._fuses.roofline.moved,
            snapshot_algorithm=self._fuses.algorithm,
            beacon=self._beacon_time,
            calls=state.work.calls,
            flop=state.work.flop,
            moved=state.work.moved,
            held=held,
            nonce=nonce,
            verifier_id=verifier_id,
        )
        return quote.sign(self._alias_key())

    @command
    def log_bytes(self) -> bytes:
        self._require_power()
        return self._hooks.log(self._silicon.log.read())

    @command
    def certificate_chain(self) -> bytes:
        return issue_alias(self._fuses.secrets, self._firmware)

    @command
    def power_off(self) -> None:
        self._require_power()
        self._hooks.ending(in_order=True)
        if not self._spent:
            self._require_space(RecordKind.POWER_OFF)
            self._end_epoch()
            self._append(RecordKind.POWER_OFF)
        self._lose_power()

    @command
    def cut_power(self) -> None:
        self._hooks.ending(in_order=False)
        self._brown_out()

    def _own_memory(self, memory: DeviceMemory) -> DeviceMemory:
        if type(memory) is not DeviceMemory:
            self._refuse(ErrorCode.BAD_ARGUMENT, "a memory is of type DeviceMemory")
        try:
            return self._hooks.attached(memory.owned())
        except CallerError as error:
            self._refuse(ErrorCode.BAD_ARGUMENT, str(error))


def quote_request_digest(nonce: bytes, verifier_id: str) -> Digest:
    """Return what the QUOTE record of a quote for this nonce and verifier holds."""
    return digest_bytes("quote-request", length_prefixed(nonce, verifier_id))
