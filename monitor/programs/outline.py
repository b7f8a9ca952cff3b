"""The outline of a call: everything about it but the values of its fractional numbers, as plain tuples.

A step mostly makes the calls of a step before it. An outline costs a fraction of a call's form in a program and
determines it, so that a call whose outline is known need not be put into that form again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from monitor.programs.trace import described

__all__ = ["layout_outline", "outline_of"]

_TENSOR, _NUMBER, _DEVICE = "$tensor", "$number", "$device"
_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def outline_of(value: Any, tensors: list[Tensor], numbers: list[str]) -> Any:
    """Arguments without tensors and fractional numbers, which are taken out into ``tensors`` and ``numbers`` as text.

    Each value comes with its kind where another kind's could be equal to it.

    Raises:
        EvidenceError: a value that no program can hold.
    """
    kind = type(value)
    if kind is int or value is None:
        return value
    if isinstance(value, torch.Generator):
        return None
    if isinstance(value, Tensor):
        tensors.append(value)
        return (_TENSOR,)
    if kind is bool or kind is str:
        return kind, value
    if isinstance(value, list | tuple):
        return [outline_of(item, tensors, numbers) for item in value]
    if isinstance(value, float):
        numbers.append(value.hex())
        return (_NUMBER,)
    if isinstance(value, torch.device):
        return (_DEVICE,)
    if not isinstance(value, _NAMED):
        described(value, [])
    return kind, value


def layout_outline(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Types, shapes and strides of results."""
    return [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]
