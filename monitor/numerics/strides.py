"""Strides that decide nothing: a dimension of size one, or any of an empty tensor, may have any stride in memory.

Kernels choose them differently, and some operators look at them when they choose a memory format for their result. So
operators under controlled numerics see them, and programs and traces name them, in one canonical form.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["canonical_strides", "with_canonical_strides"]

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def canonical_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides, with those that decide nothing as in a dense tensor of the same memory format.

    Dense is row-major where the elements lie so, else channels last; in any other tensor a dimension of size one steps
    over all that the dimensions after it span.
    """
    shape, stride = tensor.shape, tensor.stride()
    if 1 not in shape and 0 not in shape:
        return stride
    rank = len(shape)
    if tensor.is_contiguous():
        return _dense(shape, range(rank - 1, -1, -1))
    if rank in _CHANNELS_LAST and tensor.is_contiguous(memory_format=_CHANNELS_LAST[rank]):
        return _dense(shape, (1, *range(rank - 1, 1, -1), 0))
    found = list(stride)
    for number in range(rank - 1, -1, -1):
        if shape[number] == 1:
            later = range(number + 1, rank)
            found[number] = max((found[other] * shape[other] for other in later), default=1)
    return tuple(found)


def _dense(shape: torch.Size, order: Any) -> tuple[int, ...]:
    """Strides without gaps; ``order`` names the dimensions from the innermost outwards."""
    found, step = [0] * len(shape), 1
    for number in order:
        found[number] = step
        step *= max(shape[number], 1)
    return tuple(found)


def with_canonical_strides(value: Any) -> Any:
    """An operator's argument with views of canonical strides in place of tensors that have others."""
    if isinstance(value, Tensor):
        if 1 not in value.shape and 0 not in value.shape:
            return value
        strides = canonical_strides(value)
        return value if strides == value.stride() else value.as_strided(value.shape, strides)
    if isinstance(value, list | tuple):
        return type(value)(map(with_canonical_strides, value))
    return value
