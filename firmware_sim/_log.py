"""A chip's log: what was recorded, for what there is room, and the boots and epochs that it is cut into."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from firmware_sim._clock import ClockedChip
from firmware_sim._silicon import Silicon
from firmware_sim.evidence.chiplog import (
    NO_RUN,
    ZERO_DIGEST,
    LogRecord,
    RecordKind,
    Registers,
    check_chain,
    genesis_digest,
    parse_log,
)
from firmware_sim.evidence.pruning import LogCheckpoint
from firmware_sim.evidence.work import NO_WORK, TICK, Work
from firmware_sim.hooks import Hooks
from firmware_sim.identity import Firmware
from firmware_sim.mailbox import ErrorCode
from firmware_sim.nvram import NvramError
from firmware_sim.profiles import NvramStatus
from firmware_sim.schedule import commit_epoch, derive_epoch_key

__all__ = ["LoggingChip"]

_UNTIMED = frozenset({RecordKind.SNAPSHOT, RecordKind.EPOCH, RecordKind.QUOTE})
"""Kinds of records for which the chip does not read its meter anew: a challenge has one time for all that it writes."""
_NO_GAP = frozenset({RecordKind.GENESIS, RecordKind.POWER_OFF, RecordKind.POWER_GAP, RecordKind.SPENT})
_BOOT_NEEDS = {RecordKind.BOOT: 1, RecordKind.EPOCH: 1, RecordKind.CLOSE_EPOCH: 1, RecordKind.SNAPSHOT: 1}


class LoggingChip(ClockedChip):
    """A chip whose records are in NVRAM before the command that makes them returns."""

    def __init__(self, silicon: Silicon, firmware: Firmware, hooks: Hooks) -> None:
        super().__init__(silicon, firmware, hooks)
        self._counts: Counter[RecordKind] = Counter()
        self._registers = Registers()
        self._beacon_time = 0
        self._booted = b""
        self._spent = False

    def _catch_up(self) -> None:
        """Take and record the snapshots whose moments have come."""
        raise NotImplementedError

    def _load(self) -> tuple[LogCheckpoint, RecordKind | None]:
        """Go on from what the log says; returns where it ends, and the kind of its last record.

        Raises:
            NvramError: the log does not match the state.
        """
        records = self._read_log()
        self._counts = Counter(record.kind for record in records)
        end = self._silicon.state.checkpoint.extend(records)
        self._registers = Registers(journey=end.journey, current=end.current)
        self._boot, self._booted, self._beacon_time = end.boot, end.measurement, end.beacon
        self._epoch = max(end.epochs - 1, 0)
        self._earlier = self._silicon.state.work
        return end, records[-1].kind if records else end.ended

    def _resume(self) -> None:
        """Go on from what the storage holds, with no memory attached."""
        self._forget()
        self._load()
        self._epoch_key = derive_epoch_key(self._fuses.schedule_secret, self._epoch)

    def _start(self) -> None:
        """Check the log against the state, then boot: genesis, power gap, BOOT, EPOCH, as far as they are due."""
        end, last = self._load()
        if last is None:
            digest = genesis_digest(self._fused_id, self.certificate_digest, self._fuses.log_id)
            last = self._append(RecordKind.GENESIS, run_id=self._fuses.log_id, digest=digest).kind
        gap = int(last not in _NO_GAP)
        boots = last is not RecordKind.SPENT and self._has_room({**_BOOT_NEEDS, RecordKind.POWER_GAP: gap + 1})
        if not boots and self._firmware.measurement.value != self._booted:
            self._refuse(ErrorCode.CHIP_SPENT, "is spent and answers with the firmware that it last booted only")
        if gap:
            pending = self._silicon.state.pending
            self._append(RecordKind.POWER_GAP, step=self._epoch, op=pending, digest=end.opened)
        if not boots:
            if last is not RecordKind.SPENT:
                self._append(RecordKind.SPENT)
            self._spent = True
            return
        self._silicon.install(self._firmware)
        self._boot += 1
        self._earlier = NO_WORK
        floor = max(self._silicon.state.security_floor, self._firmware.security_version)
        self._append(
            RecordKind.BOOT,
            step=self._firmware.security_version,
            op=int(last in (RecordKind.GENESIS, RecordKind.POWER_OFF)),
            digest=self._firmware.measurement.value,
            security_floor=floor,
        )
        self._open_epoch(end.epochs)

    def _open_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        key = derive_epoch_key(self._fuses.schedule_secret, epoch)
        self._append(RecordKind.EPOCH, step=epoch, digest=commit_epoch(self._fused_id, epoch, key).value)
        self._epoch_key, self._due = key, 0
        self._await_next()

    def _end_epoch(self) -> None:
        digest = commit_epoch(self._fused_id, self._epoch, self._epoch_key).value
        self._append(RecordKind.CLOSE_EPOCH, step=self._epoch, digest=digest)
        self._epoch_key = b""

    def _retire(self) -> None:
        self._end_epoch()
        self._append(RecordKind.SPENT)
        self._spent = True

    def _read_log(self) -> list[LogRecord]:
        state = self._silicon.state
        since = state.checkpoint
        if state.log_size == since.size:
            return []
        records = parse_log(self._silicon.log.read(), chip=self._fused_id)
        genesis = genesis_digest(self._fused_id, self.certificate_digest, self._fuses.log_id)
        check_chain(records, genesis, chip=self._fused_id, size=since.size, head=since.head)
        if records[-1].hash() != state.log_head:
            raise NvramError(f"chip {self._fused_id}: log does not end with the head that its state holds")
        return records

    def _append(
        self,
        kind: RecordKind,
        *,
        run_id: bytes = NO_RUN,
        step: int = 0,
        op: int = 0,
        digest: bytes = ZERO_DIGEST,
        tick: int | None = None,
        work: Work | None = None,
        pending: int = 0,
        security_floor: int | None = None,
    ) -> LogRecord:
        """Record something; a snapshot is of the `tick` and `work` that are given."""
        self._require_space(kind)
        if kind not in _UNTIMED:
            self._catch_up()
            self._require_space(kind)
        state = self._silicon.state
        if kind is RecordKind.BOOT:
            state = dataclasses.replace(state, tick=0, busy=0, work=NO_WORK)
        elif work is None or not work <= state.work:
            state = self._timed(state)
        work = state.work if work is None else work
        record = LogRecord(
            counter=state.log_size, kind=kind, boot=self._boot, tick=state.tick if tick is None else tick,
            busy=self._fuses.roofline.time(work) // TICK, run_id=run_id, step=step, op=op, digest=digest,
            previous=state.log_head, work=work,
        )  # fmt: skip
        following = dataclasses.replace(
            state,
            log_size=state.log_size + 1,
            log_head=record.hash(),
            last_record=record.to_bytes(),
            pending=pending,
            security_floor=state.security_floor if security_floor is None else security_floor,
        )
        self._silicon.append(following)
        self._counts[kind] += 1
        self._registers = self._registers.extend(record)
        return record

    @property
    def _position(self) -> tuple[int, int]:
        return self._boot, self._silicon.state.log_size

    def _nvram_status(self) -> NvramStatus:
        return self._fuses.nvram.status(
            self._counts, released=self._silicon.state.released, changes=self._silicon.nvram.sequence
        )

    def _has_room(self, needed: Mapping[RecordKind, int]) -> bool:
        return all(self._counts[kind] + count <= self._fuses.nvram.quotas[kind] for kind, count in needed.items())

    def _require_service(self) -> None:
        self._require_power()
        if self._spent:
            self._refuse(ErrorCode.CHIP_SPENT, "is used up: its log is full, and it only answers inspections")

    def _require_space(self, kind: RecordKind) -> None:
        self._require_service()
        if self._counts[kind] >= self._fuses.nvram.quotas[kind]:
            self._refuse(ErrorCode.QUOTA_EXCEEDED, f"all {self._fuses.nvram.quotas[kind]} {kind.name} records are used")
