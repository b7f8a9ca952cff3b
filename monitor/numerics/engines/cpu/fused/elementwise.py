"""Operators on each element of plain tensors (``is_plain``), in one pass over the memory, NaN results canonical.

The caller checks with ``is_plain`` and by their shapes that operands fit; here there are no checks but of overlap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monitor.numerics.engines.cpu.fused.elementwise_kernels import FRESH, IN_PLACE, OPERATORS, add_to_rows, canonicalise
from monitor.numerics.kernels.pointers import is_float32, is_plain, overlaps_partly
from monitor.numerics.kernels.workers import run_pieces

__all__ = [
    "OPERATORS",
    "add_row_in_place",
    "canonical_in_place",
    "fresh",
    "in_place",
    "is_float32",
    "is_plain",
    "overlaps_partly",
]


def fresh(name: str, x: Tensor, a: Tensor | None = None, b: Tensor | None = None, c: float = 0.0) -> Tensor:
    """A new tensor of an operator of OPERATORS over plain operands of one shape.

    Raises:
        DeviceError: a thread flushes subnormal numbers to zero.
    """
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    n = x.numel()
    a_at, b_at = 0 if a is None else a.data_ptr(), 0 if b is None else b.data_ptr()
    run_pieces(FRESH[name], n, n, x.data_ptr(), a_at, b_at, c, out.data_ptr())
    return out


def in_place(name: str, x: Tensor, a: Tensor | None = None, b: Tensor | None = None, c: float = 0.0) -> Tensor:
    """Overwrites plain `x`, which no operand may overlap partly, with the operator's result, and returns it.

    Raises:
        DeviceError: a thread flushes subnormal numbers to zero.
    """
    n = x.numel()
    a_at, b_at = 0 if a is None else a.data_ptr(), 0 if b is None else b.data_ptr()
    run_pieces(IN_PLACE[name], n, n, x.data_ptr(), a_at, b_at, c, 0)
    return x


def add_row_in_place(x: Tensor, row: Tensor) -> Tensor:
    """Adds plain `row` (width,) to every row of plain `x` (…, width), which it does not overlap, and returns `x`.

    Raises:
        DeviceError: a thread flushes subnormal numbers to zero.
    """
    n, width = x.numel(), row.numel()
    run_pieces(add_to_rows, n // width if width else 0, n, x.data_ptr(), row.data_ptr(), width)
    return x


def canonical_in_place(x: Tensor) -> Tensor:
    """Gives each NaN of plain `x` the bits 0x7FC00000 and returns `x`.

    Raises:
        DeviceError: a thread flushes subnormal numbers to zero.
    """
    n = x.numel()
    run_pieces(canonicalise, n, n, x.data_ptr())
    return x
