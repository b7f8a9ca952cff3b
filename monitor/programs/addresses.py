"""Memory by its addresses: whatever object refers to it, an alias made by DLPack, NumPy or a buffer among them."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from firmware_sim import is_simulated
from firmware_sim.errors import CallerError
from monitor.programs.trace import reach, tensors_in

__all__ = ["Addresses", "are_fake", "dispatches", "is_dense", "span"]


class Addresses:
    """The memory in which some plain tensors lie, each storage whole."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        storages = [each.untyped_storage() for each in tensors]
        self._ranges = sorted({(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages})

    def reaches(self, tensor: Tensor) -> bool:
        """Whether a tensor lies there, or reaches in."""
        if not is_dense(tensor) or not tensor.numel():
            return False
        start = tensor.data_ptr()
        at = bisect_right(self._ranges, (start, sys.maxsize)) - 1
        if at >= 0 and start < self._ranges[at][1]:
            return True
        return at + 1 < len(self._ranges) and self._ranges[at + 1][0] < start + span(tensor)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has its own memory at an address; a subclass may."""
    return tensor.layout is torch.strided and not is_simulated(type(tensor))


def dispatches(tensor_class: type) -> bool:
    """Whether a subclass takes operators apart by its own code."""
    own = getattr(tensor_class, "__torch_dispatch__", None)
    return own is not Tensor.__torch_dispatch__ and not is_simulated(tensor_class)


def are_fake(
    types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any], is_ours: Callable[[Tensor], bool]
) -> bool:
    """Whether the subclasses among an operator's tensors are PyTorch's fake ones, which have shapes and no numbers.

    They do not take it apart while a mode returns NotImplemented, as other subclasses do.

    Raises:
        CallerError: one of them holds numbers, as a constant, that are ours.
    """
    if not all(kind is FakeTensor for kind in types if dispatches(kind)):
        return False
    fakes = [each for each in tensors_in((*args, *kwargs.values())) if isinstance(each, FakeTensor)]
    if any(each.constant is not None and is_ours(each.constant) for each in fakes):
        raise CallerError(
            "a fake tensor holds numbers of the state between two steps, where no chip meters work on them"
        )
    return True


def span(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to behind its last one."""
    return reach(list(tensor.shape), list(tensor.stride())) * tensor.dtype.itemsize
