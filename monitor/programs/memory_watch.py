"""Notices writes to watched memory that no recorded operator made, between the operators of a step.

A copy of every watched tensor follows what recorded operators write. Whatever an operator is about to write must still
have the bytes of its copy, and so must everything when the step ends: what an operator only reads stays as it is until
then. Memory apart from the host's is not watched: no NumPy array shares it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.programs.bits import as_bits, same_bytes
from monitor.programs.trace import reach

__all__ = ["HiddenWrite", "WriteWatch", "unwritten"]


class HiddenWrite(CallerError):
    """Memory was written by something that is no recorded operator."""


_LARGE = 1 << 22
"""Bytes from which on several threads compare."""


@dataclass(order=True, slots=True)
class _Region:
    """A stretch of memory, in addresses. The memory is held, so that nothing else comes to lie there."""

    start: int
    stop: int
    name: str = field(compare=False)
    now: Tensor = field(compare=False)
    copy: Tensor = field(compare=False)

    def part(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """What lies under a tensor and its copy; all of the region where the tensor is no smaller part of it."""
        address, size = tensor.data_ptr(), tensor.dtype.itemsize
        if tensor.nbytes >= self.stop - self.start or address < self.start or _end(tensor) > self.stop:
            return self.now, self.copy
        if size != self.now.dtype.itemsize or (address - self.start) % size:
            return self.now, self.copy
        offset = (address - self.start) // size
        shape, stride = tensor.shape, tensor.stride()
        return self.now.as_strided(shape, stride, self.now.storage_offset() + offset), self.copy.as_strided(
            shape, stride, self.copy.storage_offset() + offset
        )


class WriteWatch:
    """Watches contiguous tensors of the host's memory during one step, from the moment they are added.

    Raises:
        CallerError: from ``before`` and ``close``, naming a tensor that was written by no recorded operator.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._regions: list[_Region] = []
        self._beginning: dict[int, _Region] = {}

    def add(self, name: str, tensor: Tensor, copy: Tensor | None = None) -> None:
        """Watch a tensor; ``copy`` may give memory of its shape that holds the same now."""
        tensor = tensor.detach()
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        if not tensor.numel() or not tensor.is_contiguous() or self._touched(tensor):
            return
        now = as_bits(tensor)
        region = _Region(tensor.data_ptr(), _end(tensor), name, now, now.clone() if copy is None else as_bits(copy))
        insort(self._regions, region)
        self._beginning[region.start] = region

    def before(self, written: Sequence[Tensor]) -> None:
        """An operator is about to write these."""
        for tensor in written:
            for region in self._touched(tensor):
                self._require_unwritten(region.name, *region.part(tensor))

    def after(self, written: Sequence[Tensor]) -> None:
        """It has written these."""
        for tensor in written:
            for region in self._touched(tensor):
                now, copy = region.part(tensor)
                copy.copy_(now)

    def close(self) -> None:
        """The step has ended."""
        if not all(unwritten(*stretch) for stretch in _joined(self._regions)):
            for region in self._regions:
                self._require_unwritten(region.name, region.now, region.copy)

    def _require_unwritten(self, name: str, now: Tensor, copy: Tensor) -> None:
        if not unwritten(now, copy):
            raise self._refusal(name)

    def _refusal(self, name: str) -> CallerError:
        return HiddenWrite(
            f"{name} was written in step {self._step} by something that is no recorded operator; "
            "write it inside of a step, with PyTorch's operators"
        )

    def _touched(self, tensor: Tensor) -> list[_Region]:
        """Regions that a tensor reaches into; no two regions overlap."""
        if tensor.device.type != "cpu" or not tensor.numel():
            return []
        start = tensor.data_ptr()
        whole = self._beginning.get(start)
        if whole is not None and tensor.nbytes <= whole.stop - start and tensor.is_contiguous():
            return [whole]
        stop, found = _end(tensor), []
        first = max(bisect_right(self._regions, start, key=attrgetter("start")) - 1, 0)
        for region in self._regions[first:]:
            if region.start >= stop:
                break
            if region.stop > start:
                found.append(region)
        return found


def unwritten(now: Tensor, copy: Tensor) -> bool:
    """Whether memory holds what recorded operators left there."""
    return torch.equal(now, copy) if now.nbytes < _LARGE else same_bytes(now, copy)


def _joined(regions: Sequence[_Region]) -> list[tuple[Tensor, Tensor]]:
    """Regions with their copies, as one where they follow each other: few large stretches are compared faster."""
    stretches: list[tuple[Tensor, Tensor]] = []
    for region in regions:
        if stretches and all(map(_follows, (region.now, region.copy), stretches[-1])):
            now, copy = stretches.pop()
            size = (now.numel() + region.now.numel(),)
            stretches.append((now.as_strided(size, (1,)), copy.as_strided(size, (1,))))
        else:
            stretches.append((region.now, region.copy))
    return stretches


def _follows(one: Tensor, before: Tensor) -> bool:
    """Whether a flat tensor lies directly behind another one of its type in the same memory."""
    return (
        one.dtype == before.dtype
        and one.untyped_storage().data_ptr() == before.untyped_storage().data_ptr()
        and one.storage_offset() == before.storage_offset() + before.numel()
    )


def _end(tensor: Tensor) -> int:
    """Address of the byte after the last that a tensor touches."""
    return tensor.data_ptr() + reach(list(tensor.shape), list(tensor.stride())) * tensor.dtype.itemsize
