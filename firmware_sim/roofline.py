"""A chip's clock: what its meter has counted, by the roofline of its device, and the ticks that it was idle.

No device works faster than its roofline: products at its peak rate, bytes at that of its memory. So the least time that
metered work takes is time that has passed, whatever the host says. For the rest an injected clock tells how many ticks
went by without work; in a simulation that is `Chip.idle`, so that a seed repeats a run.

Times are whole numbers of 2^-32 ticks. How long a tick is, the maker says with what the device does in it at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from firmware_sim.evidence.chiplog import LogRecord, RecordKind
from firmware_sim.evidence.work import TICK, Roofline

__all__ = ["Interval", "intervals", "time_of"]


def time_of(record: LogRecord, roofline: Roofline) -> int:
    """The time in its boot at which a chip with this roofline wrote a record, in 2^-32 ticks."""
    return roofline.time(record.work) + (record.tick - record.busy) * TICK


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """From one beacon to the next in one boot: times in seconds since 1970, and the least time of its work."""

    start: int
    stop: int
    busy: float

    @property
    def idle(self) -> float:
        """Seconds in which the chip may have done nothing; below 0 it counted more than its device can do."""
        return self.stop - self.start - self.busy


def intervals(records: Sequence[LogRecord], roofline: Roofline) -> Iterator[Interval]:
    """The intervals between a log's beacons; a boot begins anew."""
    last: LogRecord | None = None
    for record in records:
        if record.kind is RecordKind.BOOT:
            last = None
        elif record.kind is RecordKind.BEACON:
            if last is not None:
                busy = roofline.seconds(record.work - last.work)
                yield Interval(start=last.step, stop=record.step, busy=busy)
            last = record
