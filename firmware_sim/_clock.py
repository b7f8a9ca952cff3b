"""A chip's own time: what its meter has counted, idle ticks, and the moments that its open epoch draws."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator

from firmware_sim._power import PoweredChip
from firmware_sim._silicon import Silicon, State
from firmware_sim.evidence.chiplog import NO_RUN
from firmware_sim.evidence.work import NO_WORK, TICK, Work
from firmware_sim.hooks import Draw, Hooks
from firmware_sim.identity import Firmware
from firmware_sim.memory import DeviceMemory, MemoryCopy
from firmware_sim.meter import NEVER
from firmware_sim.schedule import threshold

__all__ = ["ClockedChip", "Waiting"]

_AHEAD = 256
"""Ticks in which a chip looks for its next snapshot, so that it does not look at each of them anew."""


class Waiting:
    """The next moment at which the chip has to do something by its clock. The host does not learn of it.

    The meter that calls it may outlive the chip.
    """

    def __init__(self, chip: ClockedChip) -> None:
        self._chip = weakref.ref(chip)

    def __call__(self, before: Work, after: Work) -> None:
        """It has come with an operator, before and after which the meter had counted so much."""
        chip = self._chip()
        if chip is not None:
            chip._wake(self, before, after)


class ClockedChip(PoweredChip):
    """A chip that reads the meter of the memory that it holds, if it holds one."""

    def __init__(self, silicon: Silicon, firmware: Firmware, hooks: Hooks) -> None:
        super().__init__(silicon, firmware, hooks)
        self._limit = threshold(self._fuses.snapshot_rate)
        self._boot = self._epoch = 0
        self._epoch_key = b""
        self._earlier = NO_WORK
        self._forget()

    def _forget(self) -> None:
        """Hold no memory any more."""
        self._memory: DeviceMemory | None = None
        self._copy: MemoryCopy | None = None
        self._waiting: Waiting | None = None
        self._attached_at = self._counted = NO_WORK
        self._committed_at = self._due = 0
        self._coordinate = (NO_RUN, 0)

    @property
    def boot(self) -> int:
        return self._boot

    @property
    def time(self) -> int:
        """The current tick of this boot."""
        return self._time // TICK

    @property
    def _work(self) -> Work:
        """What the meter had counted in this boot when the chip looked last."""
        return self._earlier if self._memory is None else self._shared(self._counted)

    def _shared(self, total: Work) -> Work:
        """The chip's work in this boot by what the meter of its memory counts."""
        share = (1, 1) if self._memory is None else self._memory.share
        return self._earlier + (total - self._attached_at).share(*share)

    @property
    def _held(self) -> int:
        """The chip's part of the results of operators that are held outside its regions, in bytes."""
        if self._memory is None:
            return 0
        part, whole = self._memory.share
        return self._memory.meter.holdings.byte_count * part // whole

    @property
    def _time(self) -> int:
        """The time of this boot, in 2^-32 ticks."""
        return self._time_of(self._work)

    def _time_of(self, work: Work) -> int:
        """The time when the meter has counted so much, with the idle ticks up to now."""
        state = self._silicon.state
        return self._fuses.roofline.time(work) + (state.tick - state.busy) * TICK

    def _timed(self, state: State, *, idle: int = 0) -> State:
        """The state with the time that it is now, and so many idle ticks later."""
        work = self._work
        busy = self._fuses.roofline.time(work) // TICK
        return dataclasses.replace(state, work=work, busy=busy, tick=state.tick - state.busy + busy + idle)

    def _moments(self, start: int, end: int) -> Iterator[int]:
        """The moments in (start, end] at which the open epoch demands a snapshot."""
        return self._hooks.moments(Draw(self._epoch, self._epoch_key, self._boot, self._limit), start, end)

    def _look(self) -> list[int]:
        """Read the meter, once for all that follows; the moments that have come since what NVRAM holds.

        While no epoch is open it is not read: no time passes.
        """
        if self._memory is None or not self._epoch_key:
            return []
        before = self._time_of(self._silicon.state.work)
        self._counted = self._memory.meter.total
        self._work.to_bytes()  # no record holds more: it is not even looked at
        return list(self._moments(before, self._time))

    def _await_next(self) -> None:
        """Have the meter call when the next snapshot is due or the next tick begins, whichever comes first.

        A tick that has begun is in NVRAM before its work goes on, so that no power cut hides it.
        """
        if self._memory is None or self._waiting is None or not self._epoch_key:
            return
        now = self._time
        if not now < self._due:
            ahead = now + _AHEAD * TICK
            self._due = next(self._moments(now, ahead), ahead)
        edge = (now // TICK + 1) * TICK
        self._memory.meter.wake(self._reached(min(edge, self._due)), self._waiting)

    def _reached(self, time: int) -> Work:
        """What the meter of all the memory has counted as soon as the chip's time is so late, in FLOP or in bytes."""
        assert self._memory is not None
        state, (part, whole) = self._silicon.state, self._memory.share
        flop, moved = self._fuses.roofline.least(time - (state.tick - state.busy) * TICK)
        begun = self._attached_at
        return Work(
            NEVER,
            begun.flop - (self._earlier.flop - flop) * whole // part,
            begun.moved - (self._earlier.moved - moved) * whole // part,
        )

    def _wake(self, waiting: Waiting, before: Work, after: Work) -> None:
        """The moment that the chip waits for has come; called between two operators, and not by the host."""
        raise NotImplementedError
