"""A chip's clock as its meter gives it: the least time that metered work takes on a device of stated rates.

No device works faster than its roofline: products at its peak rate, bytes at that of its memory. For the rest of the
time between two of the verifier's signed beacons it may have been idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from firmware_sim.evidence.chiplog import LogRecord, RecordKind
from firmware_sim.evidence.work import Work

__all__ = ["Interval", "Roofline", "intervals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """What a device does in a second at most: FLOP of products, and bytes of memory read and written."""

    flop: float
    moved: float

    def seconds(self, work: Work) -> float:
        """The least time that work takes."""
        return max(work.flop / self.flop, work.moved / self.moved)


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
