"""Compiled CPU twins of ``grid``, ``norms`` and ``sums``: the same bits in one or two passes.

Every kernel takes a range of rows. No operation is contracted or reordered except where its partial sums are exact.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from monitor.numerics.exact._jit import compiled, inlined, reordered

__all__ = ["column_norms", "column_sums", "row_norms", "row_sums", "settle_rows"]

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_POWERS = np.array([math.ldexp(1.0, e) for e in range(-1022, 1024)])
_LANES = 8
_NORMAL, _HUGE = 1023 - 126, 1023 + 127
"""Biased FP64 exponents of the normal FP32 numbers, without the binade that may round to infinity."""


@inlined
def _spacing(biased: Any, beta: Any, grid_bits: Any, powers: Any) -> Any:
    """max(ulp, 2^⌈log2 32β⌉) where β > 0, else ulp, from the biased exponent of an FP64 number."""
    e = max(biased - 1023, -126)
    unit = powers[e - (grid_bits - 1) + 1022]
    wide = 32.0 * beta
    if wide > unit:
        mantissa, above = math.frexp(wide)
        return powers[above + 1022 - (1 if mantissa == 0.5 else 0)]
    return unit


@compiled
def settle_rows(
    begin: Any,
    end: Any,
    v: Any,
    bits: Any,
    left: Any,
    right: Any,
    rows_per_right: Any,
    relative: Any,
    multiple: Any,
    grid_bits: Any,
    powers: Any,
    out: Any,
) -> Any:
    """Round rows of FP64 ``v`` (with its int64 view) into FP32 ``out``; positions and directions of listed elements.

    β of element (r, j) is left[r mod len(left)]·right[r ÷ rows_per_right, j], or relative·|v| where relative > 0.
    """
    width = v.shape[1]
    capacity = 64
    positions = np.empty(capacity, dtype=np.int64)
    upward = np.empty(capacity, dtype=np.bool_)
    count = 0
    plain = grid_bits == 24
    for row in range(begin, end):
        scale = left[row % len(left)]
        column_bounds = right[row // rows_per_right]
        for j in range(width):
            value = v[row, j]
            biased = (bits[row, j] >> 52) & 0x7FF
            if biased == 0x7FF:
                out[row, j] = value if not math.isnan(value) else np.float32(np.nan)
                continue
            magnitude = abs(value)
            beta = relative * magnitude if relative > 0.0 else scale * column_bounds[j]
            if plain and _NORMAL <= biased < _HUGE and 32.0 * beta <= powers[biased - 24]:
                # The grid is FP32 and the processor's own conversion rounds to it; near its midpoint nothing is lost.
                nearest = np.float32(value)
                out[row, j] = nearest
                up = abs(np.float64(nearest)) > magnitude
                distance = 0.5 * powers[biased - 24] - abs(value - np.float64(nearest))
            else:
                spacing = _spacing(biased, beta, grid_bits, powers)
                steps = magnitude / spacing
                floor = math.floor(steps)
                rest = steps - floor
                half = floor * 0.5
                up = rest > 0.5 or (rest == 0.5 and math.floor(half) != half)
                rounded = (floor + 1.0 if up else floor) * spacing
                out[row, j] = np.float32((-rounded if value < 0.0 else rounded) + 0.0)
                distance = abs(rest - 0.5) * spacing
            if beta > 0.0 and distance <= multiple * beta:
                if count == capacity:
                    capacity *= 4
                    longer = np.empty(capacity, dtype=np.int64)
                    longer[:count] = positions
                    positions = longer
                    more = np.empty(capacity, dtype=np.bool_)
                    more[:count] = upward
                    upward = more
                positions[count] = row * width + j
                upward[count] = up
                count += 1
    return positions[:count], upward[:count]


@inlined
def _norm_scale(largest_bits: Any) -> Any:
    """Exponent e of the largest magnitude, at least −160, from FP32 bits."""
    biased = largest_bits >> 23
    if biased > 0:
        return biased - 127
    if largest_bits == 0:
        return -160
    return math.frexp(np.float64(largest_bits))[1] - 1 - 149


@reordered
def _square_sum(x: Any, scale: Any) -> Any:
    """Σ ⌈|x|·scale⌉² of integers that stay exact in FP64 in any order."""
    total = 0.0
    for k in range(len(x)):
        unit = math.ceil(abs(np.float64(x[k])) * scale)
        total += unit * unit
    return total


@compiled
def row_norms(begin: Any, end: Any, x: Any, bits: Any, powers: Any, totals: Any, scales: Any) -> None:
    """Sums of squares of rounded-up magnitudes and their scale for rows of FP32 ``x`` (with its int32 view)."""
    for row in range(begin, end):
        largest = np.int32(0)
        for k in range(x.shape[1]):
            largest = max(largest, bits[row, k] & _MAGNITUDE)
        if largest >= _INFINITY:
            totals[row], scales[row] = 0.0, 1.0
            continue
        e = _norm_scale(largest)
        totals[row] = _square_sum(x[row], powers[14 - e + 1022])
        scales[row] = powers[e - 14 + 1022]


@compiled
def column_norms(begin: Any, end: Any, x: Any, bits: Any, powers: Any, totals: Any, scales: Any) -> None:
    """As ``row_norms`` for the columns of each (k, n) matrix of FP32 ``x`` (batch, k, n)."""
    width = x.shape[2]
    for batch in range(begin, end):
        largest = np.zeros(width, dtype=np.int32)
        for k in range(x.shape[1]):
            for j in range(width):
                largest[j] = max(largest[j], bits[batch, k, j] & _MAGNITUDE)
        factor = np.zeros(width)
        for j in range(width):
            if largest[j] >= _INFINITY:
                scales[batch, j] = 1.0
            else:
                e = _norm_scale(largest[j])
                factor[j] = powers[14 - e + 1022]
                scales[batch, j] = powers[e - 14 + 1022]
        for k in range(x.shape[1]):
            for j in range(width):
                if factor[j] > 0.0:
                    unit = math.ceil(abs(np.float64(x[batch, k, j])) * factor[j])
                    totals[batch, j] += unit * unit


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


def powers_of_two() -> Any:
    """2^e at index e + 1022 for e in [−1022, 1023]."""
    return _POWERS
