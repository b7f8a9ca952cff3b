"""Compiled CPU twins of ``sums``: the same bits in one or two passes.

Every kernel takes a range of rows. No operation is contracted or reordered except where its partial sums are exact.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from monitor.numerics.kernels.jit import compiled, inlined

__all__ = ["column_sums", "row_sums"]

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_LANES = 8


@inlined
def _magic(largest_bits: Any, width: Any, powers: Any) -> Any:
    """1.5·2^(e + width): adding and subtracting it rounds to the quantum; see ``sums``."""
    e = -200
    if largest_bits != 0:
        e = math.frexp(np.float64(largest_bits))[1] - 1 - 149 if largest_bits >> 23 == 0 else (largest_bits >> 23) - 127
    return 1.5 * powers[e + width + 1022]


@compiled
def row_sums(begin: Any, end: Any, x: Any, bits: Any, width: Any, powers: Any, out: Any) -> Any:
    """Order-free sums of FP32 (outer, kept, inner) over outer and inner, FP64; returns False at a non-finite number."""
    lanes = np.zeros(_LANES)
    for kept in range(begin, end):
        largest = np.int32(0)
        for a in range(x.shape[0]):
            for b in range(x.shape[2]):
                largest = max(largest, bits[a, kept, b] & _MAGNITUDE)
        if largest >= _INFINITY:
            return False
        magic = _magic(largest, width, powers)
        total = 0.0
        for a in range(x.shape[0]):
            line = x[a, kept]
            whole = len(line) - len(line) % _LANES
            lanes[:] = 0.0
            for b in range(0, whole, _LANES):
                for lane in range(_LANES):
                    lanes[lane] += (np.float64(line[b + lane]) + magic) - magic
            for b in range(whole, len(line)):
                lanes[0] += (np.float64(line[b]) + magic) - magic
            for lane in range(_LANES):
                total += lanes[lane]
        out[kept] = total
    return True


@compiled
def column_sums(begin: Any, end: Any, x: Any, bits: Any, width: Any, powers: Any, out: Any) -> Any:
    """Order-free sums of the columns begin … end of FP32 (rows, columns), FP64; False at a non-finite number."""
    largest = np.zeros(end - begin, dtype=np.int32)
    for a in range(x.shape[0]):
        for j in range(begin, end):
            largest[j - begin] = max(largest[j - begin], bits[a, j] & _MAGNITUDE)
    magic = np.empty(end - begin)
    for j in range(end - begin):
        if largest[j] >= _INFINITY:
            return False
        magic[j] = _magic(largest[j], width, powers)
        out[begin + j] = 0.0
    for a in range(x.shape[0]):
        for j in range(begin, end):
            out[j] += (np.float64(x[a, j]) + magic[j - begin]) - magic[j - begin]
    return True
