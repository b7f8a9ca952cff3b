"""Sparse rounding logs: where a step's results were ambiguous, and which way they went.

Layout: 4 bytes magic, 1 byte formats, 1 byte bound kind, then groups in rising (call, sub-operation) order. A group is
four LEB128 integers (call gap, sub-operation, result size, entry count) and three bit strings, each padded to a byte
with zeros: the gaps' high parts in unary, their low parts in ``k`` bits, one direction bit for each entry. ``k``
follows from size and count (Golomb-Rice), so that a log has exactly one encoding; anything else is an EvidenceError.
Version 2: results that are provably exact (``bounds.exact_bits_of``) have no entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from firmware_sim import limits
from firmware_sim.errors import EvidenceError
from monitor.numerics.rounding.bounds import Bound, Formats

__all__ = ["Group", "decode", "encode", "rice_parameter"]

_MAGIC = b"CWR2"
_FORMATS = (("float64", "float32"), ("float32", "bfloat16"))
_KINDS = ("worst-case", "probabilistic", "calibrated")
_LARGEST = 1 << 62

Positions = npt.NDArray[np.int64]
Directions = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Entries of one sub-operation: rising flat positions below ``size`` and True where the magnitude went up."""

    call: int
    part: int
    size: int
    positions: Positions
    upward: Directions

    def __post_init__(self) -> None:
        if len(self.positions) != len(self.upward) or len(self.positions) == 0:
            raise ValueError("a group must hold at least one position, and one direction for each")
        if self.positions[0] < 0 or self.positions[-1] >= self.size or bool(np.any(np.diff(self.positions) <= 0)):
            raise ValueError(f"the positions of a group are not ascending numbers within 0 … {self.size - 1}")


def rice_parameter(size: int, count: int) -> int:
    """Low bits of a gap: floor(log2(0.69·mean gap)), the Golomb-Rice optimum for geometric gaps, in integers."""
    return max(0, ((size * 69) // (count * 100)).bit_length() - 1)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _encode_group(group: Group, previous_call: int) -> bytes:
    count = len(group.positions)
    k = rice_parameter(group.size, count)
    gaps = np.diff(group.positions, prepend=-1) - 1
    high, low = gaps >> k, gaps & ((1 << k) - 1)
    ends = np.cumsum(high + 1)
    unary = np.zeros(int(ends[-1]), dtype=np.uint8)
    unary[ends - 1] = 1
    low_bits = (low[:, None] >> np.arange(k)) & 1
    head = b"".join(_varint(n) for n in (group.call - previous_call, group.part, group.size, count))
    return head + b"".join(
        np.packbits(bits.astype(np.uint8).ravel(), bitorder="little").tobytes()
        for bits in (unary, low_bits, group.upward)
    )


def encode(groups: Iterable[Group], formats: Formats, bound: Bound) -> bytes:
    """The one encoding of groups that are given in rising (call, part) order; EvidenceError if a reader takes fewer."""
    out = [_MAGIC, bytes((_FORMATS.index((formats.compute, formats.grid)), _KINDS.index(bound.kind)))]
    previous = 0
    for count, group in enumerate(groups, start=1):
        limits.ROUNDING_LOG_GROUPS.check(count)
        out.append(_encode_group(group, previous))
        previous = group.call
    return b"".join(out)


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, size: int) -> bytes:
        if size > self.left:
            raise EvidenceError("rounding log is cut short")
        self._at += size
        return self._data[self._at - size : self._at]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                break
            shift += 7
            if shift > 63:
                raise EvidenceError("rounding log holds a number that is too large")
        if value > _LARGEST or (shift and byte == 0):
            raise EvidenceError("rounding log holds a number that is too large or not in its shortest form")
        return value

    def bits(self, count: int) -> npt.NDArray[np.uint8]:
        raw = np.frombuffer(self.take((count + 7) // 8), dtype=np.uint8)
        bits = np.unpackbits(raw, bitorder="little")
        if bits[count:].any():
            raise EvidenceError("rounding log has padding bits that are not zero")
        return bits[:count]

    def unary(self, count: int) -> npt.NDArray[np.int64]:
        """Read up to the ``count``-th one bit; return how many zeros precede each one."""
        raw = np.frombuffer(self._data, dtype=np.uint8, offset=self._at)
        window = max(64, count)
        while True:
            ends = np.flatnonzero(np.unpackbits(raw[:window], bitorder="little"))
            if len(ends) >= count:
                break
            if window >= len(raw):
                raise EvidenceError("rounding log is cut short")
            window *= 4
        self.bits(int(ends[count - 1]) + 1)
        zeros = ends[:count].copy()
        zeros[1:] -= ends[: count - 1] + 1
        return zeros


def _decode_group(reader: _Reader, previous_call: int) -> Group:
    call, part, size, count = previous_call + reader.varint(), reader.varint(), reader.varint(), reader.varint()
    if not 0 < count <= size:
        raise EvidenceError(f"rounding log has {count} entries for {size} elements at call {call}")
    if count > 8 * reader.left:
        raise EvidenceError("rounding log is cut short")
    k = rice_parameter(size, count)
    high = reader.unary(count)
    low = reader.bits(count * k).reshape(count, k) @ (1 << np.arange(k))
    positions = np.cumsum((high << k) + low + 1) - 1
    is_rising = int(positions[0]) >= 0 and not bool((np.diff(positions) <= 0).any())
    if int(high.max()) > (size >> k) or int(positions[-1]) >= size or not is_rising:  # beyond INT64 it falls
        raise EvidenceError(f"rounding log names an element beyond the {size} of call {call}")
    return Group(call=call, part=part, size=size, positions=positions, upward=reader.bits(count).astype(np.bool_))


def decode(log: bytes, formats: Formats, bound: Bound) -> list[Group]:
    """Groups of a log in their order.

    Raises:
        EvidenceError: the bytes are not the encoding of any groups in these formats and under this kind of bound.
    """
    reader = _Reader(log)
    expected = encode((), formats, bound)
    if reader.take(min(len(expected), reader.left)) != expected:
        raise EvidenceError(
            f"this is not a rounding log for ({formats.compute}, {formats.grid}) with {bound.kind} bounds"
        )
    groups: list[Group] = []
    while reader.left:
        group = _decode_group(reader, groups[-1].call if groups else 0)
        if groups and (group.call, group.part) <= (groups[-1].call, groups[-1].part):
            raise EvidenceError(f"rounding log lists call {group.call}, sub-operation {group.part} out of order")
        groups.append(group)
        limits.ROUNDING_LOG_GROUPS.check(len(groups))
    return groups
