"""What a chip's meter counts, and how long that takes at least."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from firmware_sim.errors import CallerError

__all__ = ["NO_WORK", "TICK", "Roofline", "Work"]

_FORMAT = struct.Struct(">QQQ")


@dataclass(frozen=True, slots=True)
class Work:
    """Counts of operators: their calls, the FLOP of products (two for each multiply-add), and bytes read and written.

    Calls that only return views are no work.
    """

    calls: int = 0
    flop: int = 0
    moved: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.calls + other.calls, self.flop + other.flop, self.moved + other.moved)

    def __sub__(self, other: Work) -> Work:
        return Work(self.calls - other.calls, self.flop - other.flop, self.moved - other.moved)

    def __le__(self, other: Work) -> bool:
        """Whether no count is higher."""
        return self.calls <= other.calls and self.flop <= other.flop and self.moved <= other.moved

    def left(self, spent: Work) -> Work:
        """What is left of it when so much is spent, by each count."""
        rest = self - spent
        return Work(max(rest.calls, 0), max(rest.flop, 0), max(rest.moved, 0))

    def share(self, part: int, whole: int) -> Work:
        """What a chip counts that holds `part` of `whole` bytes of the memory: ⌊n · part / whole⌋ of each count."""
        return Work(self.calls * part // whole, self.flop * part // whole, self.moved * part // whole)

    def __str__(self) -> str:
        return f"{self.calls} calls, {self.flop} FLOP, {self.moved} bytes"

    def to_bytes(self) -> bytes:
        """Return 24 bytes: three unsigned numbers, big-endian; CallerError if one does not fit."""
        try:
            return _FORMAT.pack(self.calls, self.flop, self.moved)
        except struct.error:
            raise CallerError("a meter's count is not in [0, 2^64)") from None

    @classmethod
    def from_bytes(cls, data: bytes) -> Work:
        """Return what `to_bytes` wrote."""
        return cls(*_FORMAT.unpack(data))


NO_WORK = Work()

_BITS = 32
TICK = 1 << _BITS
"""A tick, in the unit of times."""
_MOST = 1 << 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """What a device does in a stretch of time at most: FLOP of products, and bytes of memory read and written.

    In a data sheet the stretch is a second, in a chip's clock a tick.
    """

    flop: int
    moved: int

    def __post_init__(self) -> None:
        if any(type(rate) is not int or not 0 < rate < _MOST for rate in (self.flop, self.moved)):
            raise CallerError("a device's rates must be whole numbers in [1, 2^64)")

    def time(self, work: Work) -> int:
        """The least time that work takes, in 2^-32 of that stretch, rounded down."""
        return max((work.flop << _BITS) // self.flop, (work.moved << _BITS) // self.moved)

    def seconds(self, work: Work) -> float:
        """The least time that work takes, where the stretch is a second."""
        return self.time(work) / TICK

    def least(self, time: int) -> tuple[int, int]:
        """The least FLOP, and the least bytes moved, either of which takes so long."""
        return -(-time * self.flop >> _BITS), -(-time * self.moved >> _BITS)
