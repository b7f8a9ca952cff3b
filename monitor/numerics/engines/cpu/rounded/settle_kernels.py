"""Compiled twin of ``rounding_rule.round_to_grid`` for one tile of a result: the same bits in one pass.

No operation is contracted or reordered.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from monitor.numerics.kernels.jit import compiled, inlined

__all__ = ["POWERS", "settle_tile"]

POWERS = np.array([math.ldexp(1.0, e) for e in range(-1022, 1024)])
"""2^e at index e + 1022."""
_BLOCK = 64
_EXPONENT = np.int64(0x7FF << 52)
_LOWEST, _HIGHEST = np.int64((1023 - 126) << 52), np.int64((1023 + 126) << 52)
"""Exponents of the normal FP32 numbers, without the binade that may round to infinity."""
_HALF_ULP = np.int64(24 << 52)


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


@inlined
def _convert(v: Any, bits: Any, right: Any, scale: Any, relative: Any, multiple: Any, out: Any) -> Any:
    """FP32 of each value; not 0 if one of them may be ambiguous, or needs another grid than FP32's normal numbers."""
    doubtful = 0
    for i in range(len(v)):
        value = v[i]
        magnitude = abs(value)
        nearest = np.float32(value)
        out[i] = nearest + np.float32(0.0)
        e = bits[i] & _EXPONENT
        half = np.int64(e - _HALF_ULP).view(np.float64)
        beta = scale * right[i] + relative * magnitude
        room = half - abs(value - np.float64(nearest))
        reasons = (1 if room <= multiple * beta else 0) | (1 if 16.0 * beta > half else 0)
        reasons |= (1 if e < _LOWEST else 0) | (1 if e > _HIGHEST else 0)
        doubtful |= reasons if magnitude != 0.0 else 0
    return doubtful


@compiled
def settle_tile(
    v: Any,
    bits: Any,
    v_base: Any,
    v_stride: Any,
    v_jump: Any,
    rows: Any,
    width: Any,
    left: Any,
    left_spans: Any,
    right: Any,
    right_spans: Any,
    rows_per_right: Any,
    exact_bits: Any,
    relative: Any,
    multiple: Any,
    grid_bits: Any,
    powers: Any,
    out: Any,
    out_base: Any,
    out_stride: Any,
    out_jump: Any,
) -> Any:
    """Round a tile of flat FP64 ``v`` (with its int64 view) into flat FP32 ``out`` and list elements in reach.

    Rows lie a stride apart, and groups of rows_per_right rows a jump.
    β of element (r, j), with g = r ÷ rows_per_right, is 0 where left_spans[r] + right_spans[g, j] ≤ exact_bits, and
    left[r]·right[g, j] + relative·|v| elsewhere.

    Returns:
        Flat positions in ``out`` with a midpoint within multiple·β, whether their magnitude went up, and rows of value,
        β and distance to the midpoint.
    """
    capacity = 64
    positions = np.empty(capacity, dtype=np.int64)
    upward = np.empty(capacity, dtype=np.bool_)
    numbers = np.empty((capacity, 3))
    found = 0
    plain = grid_bits == 24
    for row in range(rows):
        group, member = row // rows_per_right, row % rows_per_right
        scale, bounds, spans = left[row], right[group], right_spans[group]
        v_row = v_base + group * v_jump + member * v_stride
        out_row = out_base + group * out_jump + member * out_stride
        for begin in range(0, width, _BLOCK):
            count = min(_BLOCK, width - begin)
            at, to = v_row + begin, out_row + begin
            if plain:
                values_here, bits_here = v[at : at + count], bits[at : at + count]
                bounds_here, out_here = bounds[begin : begin + count], out[to : to + count]
                if not _convert(values_here, bits_here, bounds_here, scale, relative, multiple, out_here):
                    continue
            for i in range(count):
                value = v[at + i]
                magnitude = abs(value)
                e = bits[at + i] & _EXPONENT
                beta = scale * bounds[begin + i] + relative * magnitude
                if plain and _LOWEST <= e <= _HIGHEST:
                    half = np.int64(e - _HALF_ULP).view(np.float64)
                    nearest = np.float64(np.float32(value))
                    if half - abs(value - nearest) > multiple * beta and 16.0 * beta <= half:
                        continue
                if e == _EXPONENT:
                    out[to + i] = value if not math.isnan(value) else np.float32(np.nan)
                    continue
                if left_spans[row] + spans[begin + i] <= exact_bits:
                    beta = 0.0
                spacing = _spacing(e >> 52, beta, grid_bits, powers)
                steps = magnitude / spacing
                floor = math.floor(steps)
                rest = steps - floor
                half_floor = floor * 0.5
                up = rest > 0.5 or (rest == 0.5 and math.floor(half_floor) != half_floor)
                rounded = (floor + 1.0 if up else floor) * spacing
                out[to + i] = np.float32((-rounded if value < 0.0 else rounded) + 0.0)
                distance = abs(rest - 0.5) * spacing
                if beta > 0.0 and distance <= multiple * beta:
                    if found == capacity:
                        capacity *= 4
                        longer = np.empty(capacity, dtype=np.int64)
                        longer[:found] = positions
                        positions = longer
                        more = np.empty(capacity, dtype=np.bool_)
                        more[:found] = upward
                        upward = more
                        wider = np.empty((capacity, 3))
                        wider[:found] = numbers
                        numbers = wider
                    positions[found] = to + i
                    upward[found] = up
                    numbers[found, 0], numbers[found, 1], numbers[found, 2] = value, beta, distance
                    found += 1
    return positions[:found], upward[:found], numbers[:found]
