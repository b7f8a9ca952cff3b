"""The pipeline of a chip's snapshots: due, copied, hashed while the training goes on, recorded."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from firmware_sim._clock import Waiting
from firmware_sim._log import LoggingChip
from firmware_sim._silicon import Silicon
from firmware_sim.chip import EMPTY_MEMORY, SnapshotEvent
from firmware_sim.errors import ChipwitnessError
from firmware_sim.evidence.blocks import prepare
from firmware_sim.evidence.chiplog import LATE, ZERO_DIGEST, RecordKind
from firmware_sim.evidence.digest import Digest
from firmware_sim.evidence.work import TICK, Work
from firmware_sim.hooks import Hooks
from firmware_sim.identity import Firmware
from firmware_sim.mailbox import ChipFailure, ErrorCode, MailboxError
from firmware_sim.memory import DeviceMemory, MemoryCopy

__all__ = ["SnapshottingChip"]

_HASHED_AT_ONCE = 1 << 20
"""Bytes of memory: a thread costs more than hashing as much."""
_PATIENCE = 0.01
"""Seconds after which a thread that waits for the gate looks whether it still must."""


@dataclass(frozen=True, slots=True, eq=False)
class _UnderWay:
    """Snapshots of one moment whose copy is being hashed; the host holds no part of it."""

    events: Sequence[SnapshotEvent]
    op: int
    work: Work
    frozen: MemoryCopy | None
    hashing: Future[Digest] = field(default_factory=Future)


class SnapshottingChip(LoggingChip):
    """A chip that hashes its own copy of its memory at the moments that its epoch draws."""

    def __init__(self, silicon: Silicon, firmware: Firmware, hooks: Hooks) -> None:
        super().__init__(silicon, firmware, hooks)
        self._hasher: ThreadPoolExecutor | None = None
        self._under_way: _UnderWay | None = None
        self._shards: deque[tuple[int, bytes]] | None = None
        self._snapshots = self._bytes_hashed = 0

    def _prepare(self, memory: DeviceMemory) -> None:
        """Start the thread that hashes, where the memory is large; no tick then waits for it."""
        if self._hasher is None and memory.byte_count >= _HASHED_AT_ONCE:
            self._hasher = ThreadPoolExecutor(1)
            self._hasher.submit(bytes)
            prepare()

    def _wake(self, waiting: Waiting, before: Work, after: Work) -> None:
        """Take the snapshot whose moment has come; called between two operators, and not by the host.

        Where these run inside of a command of the chip, in a handler of a signal for instance, it can neither take one
        nor go on without: its power fails.
        """
        if self._waiting is not waiting:
            return  # the chip holds another memory
        try:
            self._gate.check_process()
        except MailboxError:
            return  # a copy of this process, and no chip
        try:
            self._gate.enter()
        except MailboxError:
            self._brown_out()
            return
        try:
            if self._waiting is waiting and self._memory is not None:
                self._pass_time((before, after))
                if self._silicon.state.tick < self.time:
                    self._store(self._timed(self._silicon.state))
                self._await_next()
        except (ChipwitnessError, OSError):
            self._lose_power()  # as the next command will find out
        except BaseException:
            self._brown_out()
            raise
        finally:
            self._gate.leave()

    def _pass_time(self, operator: tuple[Work, Work] | None = None) -> None:
        """Take the snapshots whose moments have come, in time only if that was with the last operator.

        Args:
            operator: what the meter had counted before and after the one that woke the chip, if one did.
        """
        due = self._look()
        if due:
            before, after = operator or (self._counted, self._counted)
            is_late = after != self._counted or due[0] <= self._time_of(self._shared(before))
            self._snapshot([moment // TICK for moment in due], LATE if is_late else 0)

    def _catch_up(self) -> None:
        """Take what the meter wakes the chip for in another thread, which waits for this command."""
        self._pass_time()
        self._settle()

    def _snapshot(self, ticks: Sequence[int], mark: int = 0) -> list[SnapshotEvent]:
        """Copy the memory for the snapshots of some ticks; hash a large copy during the training, others at once.

        A chip whose log is full with them is spent from this moment on.
        """
        if not ticks:
            return []
        self._settle()
        left = self._room_for(ticks)
        in_background = self._hasher is not None and left > 0
        if self._memory is not None:  # whatever becomes of the host while its memory is read, this one was due
            self._store(dataclasses.replace(self._timed(self._silicon.state), pending=ticks[0] + 1))
        frozen = self._freeze()
        first, (run_id, step) = self._silicon.state.log_size, self._coordinate
        events = [
            SnapshotEvent(
                chip_id=self._fused_id,
                record=first + number,
                boot=self._boot,
                tick=tick,
                run_id=run_id,
                step=step,
                bytes_hashed=0 if frozen is None else frozen.byte_count,
            )
            for number, tick in enumerate(ticks)
        ]
        op = mark | self._counted.calls - self._committed_at
        under_way = self._under_way = _UnderWay([_own(event) for event in events], op, self._work, frozen)
        if in_background and self._hasher is not None:
            self._hasher.submit(self._hash, frozen, under_way)
        else:
            under_way.hashing.set_result(self._digest(frozen))
            self._settle()
        if not left:
            self._retire()
        return events

    def _room_for(self, ticks: Sequence[int]) -> int:
        """How many records of snapshots have room in the log after those of some ticks; ChipFailure if these have not.

        Then the chip's power goes, and by what it has stored they were not due yet.
        """
        under_way = 0 if self._under_way is None else len(self._under_way.events)
        used = self._counts[RecordKind.SNAPSHOT] + under_way + len(ticks)
        left = self._fuses.nvram.quotas[RecordKind.SNAPSHOT] - used
        if left < 0:
            raise ChipFailure(ErrorCode.LOG_FULL, f"chip {self._fused_id}: no room for {len(ticks)} SNAPSHOT records")
        return left

    def _freeze(self) -> MemoryCopy | None:
        """An owned copy of the memory, in the buffers of the last one; None where there is none, or it is gone."""
        if self._memory is None:
            return None
        try:
            self._copy = self._memory.copy(self._copy)
        except OSError:
            return None
        return self._hooks.frozen(self._copy)

    def _digest(self, frozen: MemoryCopy | None) -> Digest:
        if frozen is not None:
            return self._hooks.digested(frozen.digest(self._fuses.algorithm))
        return EMPTY_MEMORY if self._memory is None else Digest(self._fuses.algorithm, ZERO_DIGEST)

    def _hash(self, frozen: MemoryCopy | None, under_way: _UnderWay) -> None:
        """Hash a copy while the host goes on, and record it unless a command does so first.

        A command that holds the gate may be waiting for the next hash, which this thread makes: it is not waited for.
        """
        try:
            under_way.hashing.set_result(self._digest(frozen))
        except BaseException as error:
            under_way.hashing.set_exception(error)
        while self._under_way is under_way:
            with self._gate.passed(_PATIENCE) as inside:
                if inside and self._under_way is under_way:
                    try:
                        self._settle()
                    except Exception:
                        self._lose_power()  # as the next command will find out

    def _settle(self) -> None:
        """Record the snapshots that are under way, once they are hashed."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return
        digest = under_way.hashing.result()
        for number, event in enumerate(under_way.events, start=1):
            self._append(
                RecordKind.SNAPSHOT, run_id=event.run_id, step=event.step, op=under_way.op, digest=digest.value,
                tick=event.tick, work=under_way.work,
                pending=under_way.events[number].tick + 1 if number < len(under_way.events) else 0,
            )  # fmt: skip
            self._snapshots += 1
            self._bytes_hashed += event.bytes_hashed
            if self._shards is not None and under_way.frozen is not None:
                self._shards.append((event.record, under_way.frozen.to_bytes()))

    def _brown_out(self) -> None:
        """Lose power; the supply's reserve lasts for one more write, which keeps what the meter has counted.

        Snapshots that this demands, and that were not taken, are under way then.
        """
        if self._finalizer.alive:
            with suppress(ChipwitnessError, OSError):
                self._silicon.recall()
                due, state = self._look(), self._silicon.state
                if self._work != state.work:
                    pending = state.pending or (due[0] // TICK + 1 if due else 0)
                    self._silicon.store(dataclasses.replace(self._timed(state), pending=pending))
        self._lose_power()

    def _lose_power(self) -> None:
        """End at once; a snapshot under way shows as a power gap that names its tick."""
        self._under_way = self._waiting = None
        if self._hasher is not None:
            self._hasher.shutdown(wait=False)
        super()._lose_power()


def _own(event: SnapshotEvent) -> SnapshotEvent:
    """What the host holds can be altered by the host, frozen or not: the firmware goes by a copy."""
    return dataclasses.replace(event)
