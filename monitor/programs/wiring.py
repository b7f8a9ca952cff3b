"""Where each tensor of a step comes from: the last thing that wrote the memory that it lies in."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from firmware_sim.errors import EvidenceError
from monitor.numerics.strides import canonical_strides
from monitor.programs.trace import reach

__all__ = ["Place", "Stretches", "Wiring"]

_start, _stop = attrgetter("start"), attrgetter("stop")


class Wiring:
    """All writes of a step so far, and of the state and the batch before it."""

    def __init__(self) -> None:
        self._writes: dict[int, Stretches] = {}
        self._shifts: dict[int, int] = {}
        self._held: list[StorageWeakRef] = []
        self._sizes: dict[int, int] = {}  # bytes of the real numbers in each storage

    def knows(self, tensor: Tensor) -> bool:
        """Whether anything that is known wrote the memory that a tensor lies in."""
        return tensor.untyped_storage()._cdata in self._writes

    def record(self, tensor: Tensor, source: str) -> None:
        """Note that ``source`` wrote a tensor, with the order of its elements."""
        storage = tensor.untyped_storage()
        stretches = self._writes.get(storage._cdata)
        if stretches is None:
            # A weak reference frees the memory but keeps its address from being given to another tensor.
            self._held.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
            stretches = self._writes[storage._cdata] = Stretches(is_empty=not storage.nbytes())
            self._sizes[storage._cdata] = _size_of(tensor)
        stretches.write(*self._extent(tensor), source)

    def adopt(self, tensor: Tensor, known: Tensor) -> bool:
        """Take an unknown tensor's memory as part of a known one's, if it lies there; tell whether it does.

        A NumPy array has another storage in each tensor that is made of it.
        """
        mine, storage = tensor.untyped_storage(), known.untyped_storage()
        shift = mine.data_ptr() - storage.data_ptr()
        inside = shift >= 0 and shift + mine.nbytes() <= storage.nbytes() and mine.nbytes() > 0
        if not inside or mine.device != storage.device or tensor.dtype != known.dtype or shift % tensor.itemsize:
            return False
        self._held.append(StorageWeakRef(mine))  # type: ignore[no-untyped-call]
        self._writes[mine._cdata] = self._writes[storage._cdata]
        self._sizes[mine._cdata] = _size_of(tensor)
        numbers = shift // tensor.itemsize * (2 if tensor.is_complex() else 1)
        self._shifts[mine._cdata] = numbers + self._shifts.get(storage._cdata, 0)
        return True

    def place_of(self, tensor: Tensor, reader: str) -> Place:
        """Where a tensor in known memory lies.

        Raises:
            EvidenceError: nothing wrote there; ``reader`` is named.
        """
        start, stop = self._extent(tensor)
        if tensor.is_conj() or tensor.is_neg():
            what = "a lazy view of a conjugate or a negative"
            raise EvidenceError(f"{reader} reads {what}; use resolve_conj() or resolve_neg() first")
        if self._sizes[tensor.untyped_storage()._cdata] != _size_of(tensor):
            raise EvidenceError(f"{reader} reads {tensor.dtype} where numbers of another size were written")
        writes = self._writes[tensor.untyped_storage()._cdata]
        written = writes.newest(start, stop)
        if written is None and start == stop:  # an empty end of a tensor begins behind it
            written = writes.newest(0, start)
            start = 0 if written is None else written.origin
        if written is None:
            raise EvidenceError(f"{reader} reads memory that nothing has written")
        return Place(written.source, tensor.dtype, tensor.shape, canonical_strides(tensor), start - written.origin)

    def _extent(self, tensor: Tensor) -> tuple[int, int]:
        """First real number of the memory that the tensor touches, and the one after the last."""
        start = int(tensor.storage_offset())
        size = tensor.numel() if tensor.is_contiguous() else reach(list(tensor.shape), list(tensor.stride()))
        if tensor.is_complex():
            start, size = 2 * start, 2 * size
        if self._shifts:
            start += self._shifts.get(tensor.untyped_storage()._cdata, 0)
        return start, start + size


def _size_of(tensor: Tensor) -> int:
    """Bytes of one of a tensor's real numbers."""
    return tensor.itemsize // 2 if tensor.is_complex() else tensor.itemsize


class Place(NamedTuple):
    """Where a tensor lies: the last write of its memory, how its elements lie there, and how far from its first.

    The offset counts real numbers (``in_numbers``).
    """

    source: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def to_json(self) -> dict[str, object]:
        """Its form in a program."""
        return {
            "source": self.source,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
            "stride": list(self.stride),
            "offset": self.offset,
        }


class _Write(NamedTuple):
    """A stretch of a storage, in real numbers, that still holds what one write left there.

    Attributes:
        origin: where that write began, from which its elements are counted.
        number: how many writes of this storage came before it.
    """

    start: int
    stop: int
    origin: int
    source: str
    number: int


class Stretches:
    """The writes of one storage whose elements are still there, in the order in which they lie.

    Where all state lies in one storage, as in a chip's memory, there are hundreds.

    Args:
        is_empty: the storage has no elements; then it counts as one, so that its writes follow each other too.
    """

    __slots__ = ("_count", "_is_empty", "_writes")

    def __init__(self, *, is_empty: bool = False) -> None:
        self._count, self._is_empty = 0, is_empty
        self._writes: list[_Write] = []

    def write(self, start: int, stop: int, source: str) -> None:
        """Note that ``source`` wrote the elements from ``start`` up to ``stop``; nothing, if these are none."""
        if start == stop and self._writes and not self._is_empty:
            return
        stop = max(stop, start + 1)
        first, end = self._touched(start, stop)
        new = [_Write(start, stop, start, source, self._count)]
        if first < end:
            before, behind = self._writes[first], self._writes[end - 1]
            if before.start < start:
                new.insert(0, before._replace(stop=start))
            if behind.stop > stop:
                new.append(behind._replace(start=stop))
        self._writes[first:end] = new
        self._count += 1

    def newest(self, start: int, stop: int) -> _Write | None:
        """The last write of any element from ``start`` up to ``stop``, or at ``start`` if these are none."""
        first, end = self._touched(start, max(stop, start + 1))
        if end - first == 1:
            return self._writes[first]
        return max(self._writes[first:end], key=lambda each: each.number, default=None)

    def _touched(self, start: int, stop: int) -> tuple[int, int]:
        """Places of the writes that reach into a range, and the place after them."""
        if len(self._writes) == 1:
            [only] = self._writes
            return (0, 1) if only.start < stop and start < only.stop else (0, 0) if stop <= only.start else (1, 1)
        first = bisect_right(self._writes, start, key=_stop)
        return first, bisect_left(self._writes, stop, lo=first, key=_start)
