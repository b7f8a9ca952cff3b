"""Fused CPU kernels around the BF16 product: quantise and split into two digits, combine and scale.

`x` holds the bits of BF16 numbers. Each row (or column) yields a scale factor, NaN where it holds a non-finite value, a
density and a flag for the wide path, as ``reference.bf16`` says. Arrays are C-contiguous.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from monitor.numerics.engines.cpu.exact.matmul_kernels import _P32, _P64
from monitor.numerics.kernels.jit import compiled, contracted, inlined
from monitor.numerics.reference.bf16 import DENSE, SPARSE, THIN

__all__ = ["combine", "digits_across", "digits_along", "peaks"]

_MAGNITUDE = np.uint16(0x7FFF)
_INFINITY = np.uint16(0x7F80)
_INVERSE = np.float32(1.0 / 255.0)
_BASE = np.float32(255.0)
_ONE = np.float32(1.0)
_DENSE, _SPARSE, _THIN = float(DENSE), float(SPARSE), float(THIN)


@compiled
def _factors(bits: Any) -> Any:
    """(f, g, mask, outcome) of a vector whose largest magnitude has these bits: g·f = 2^s and outcome = 2^-s.

    f and g lie within FP32 where 2^s need not; for a vector that is not finite the mask makes all elements zero.
    """
    if bits >= _INFINITY:
        return np.float32(1.0), np.float32(1.0), np.uint16(0), np.nan
    if bits == 0:
        return np.float32(1.0), np.float32(1.0), np.uint16(0xFFFF), 1.0
    exponent, significand = np.int64(bits >> 7) - 134, np.int64(bits & 0x7F)
    if exponent == -134:
        exponent = np.int64(-133)
        while significand < 128:
            significand <<= 1
            exponent -= 1
    else:
        significand |= 128
    scale: Any = 7 - exponent - (1 if significand == 255 else 0)
    first = min(scale, 100)
    return _P32[first + 126], _P32[scale - first + 126], np.uint16(0xFFFF), _P64[200 - scale]


@inlined
def _write_digits(bits: Any, g: Any, f: Any, high: Any, low: Any, j: Any) -> Any:
    """Stores the two balanced base-255 digits of q = RNE(x·g·f) at place j; returns the high one's square."""
    value = np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)
    q = np.rint(value * g * f)
    h = np.rint(q * _INVERSE)
    high[j] = np.int8(np.int32(h))
    low[j] = np.int8(np.int32(q - _BASE * h))
    return np.int32(h) * np.int32(h)


@inlined
def _density(squares: Any, filled: Any) -> Any:
    """(density, whether the wide path is due) from Σh² and the number of elements that are not zero."""
    if filled == 0:
        return _DENSE, False
    density = np.float64(16 * squares // filled)
    return (_DENSE, True) if density < _SPARSE else (density, False)


@compiled
def digits_along(
    begin: Any, end: Any, x: Any, out: Any, outcome: Any, density: Any, wide: Any, side: Any, chunk: Any, origin: Any
) -> Any:
    """Rows of x (R, K) as int8 digits in rows of out (·, 2K), the first of which is row ``origin``.

    Each piece of ``chunk`` elements becomes its high and low digits for side 0 (A), low and high for B.
    """
    k = x.shape[1]
    for i in range(begin, end):
        largest = np.uint16(0)
        for j in range(k):
            largest = max(largest, x[i, j] & _MAGNITUDE)
        f, g, mask, outcome[i] = _factors(largest)
        total, filled = np.int64(0), np.int32(0)
        for start in range(0, k, chunk):
            width = min(chunk, k - start)
            source = x[i, start : start + width]
            piece = out[i - origin, 2 * start : 2 * (start + width)]
            high, low = piece[side * width : side * width + width], piece[width - side * width :]
            squares = np.int32(0)
            for j in range(width):
                squares += _write_digits(source[j] & mask, g, f, high, low, j)
                filled += np.int32((source[j] & mask & _MAGNITUDE) != 0)
            total += squares
        density[i], wide[i] = _density(total, filled)


@compiled
def digits_across(
    begin: Any, end: Any, x: Any, out: Any, outcome: Any, density: Any, wide: Any, side: Any, chunk: Any, origin: Any
) -> Any:
    """Columns of x (K, C) as int8 digits in columns of out (2K, ·), in the order of ``digits_along``."""
    k = x.shape[0]
    width = end - begin
    largest = np.zeros(width, np.uint16)
    for i in range(k):
        pattern = x[i, begin:end]
        for j in range(width):
            largest[j] = max(largest[j], pattern[j] & _MAGNITUDE)
    f, g, mask = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.uint16)
    squares, filled = np.zeros(width, np.int32), np.zeros(width, np.int32)
    total = np.zeros(width, np.int64)
    special = False
    for j in range(width):
        f[j], g[j], mask[j], outcome[begin + j] = _factors(largest[j])
        special |= g[j] != _ONE or mask[j] == 0
    for start in range(0, k, chunk):
        depth = min(chunk, k - start)
        squares[:] = 0
        for i in range(start, start + depth):
            source = x[i, begin:end]
            high = out[start + i + side * depth, begin - origin : end - origin]
            low = out[start + i + depth - side * depth, begin - origin : end - origin]
            if special:
                for j in range(width):
                    squares[j] += _write_digits(source[j] & mask[j], g[j], f[j], high, low, j)
                    filled[j] += np.int32((source[j] & mask[j] & _MAGNITUDE) != 0)
            else:
                for j in range(width):
                    squares[j] += _write_digits(source[j], _ONE, f[j], high, low, j)
                    filled[j] += np.int32((source[j] & _MAGNITUDE) != 0)
        for j in range(width):
            total[j] += squares[j]
    for j in range(width):
        density[begin + j], wide[begin + j] = _density(total[j], filled[j])


@compiled
def peaks(begin: Any, end: Any, x: Any, rows: Any, columns: Any) -> Any:
    """Largest magnitude bits of rows [begin, end) of x (R, C), and of each column if it exceeds what it is."""
    for i in range(begin, end):
        source, most = x[i], np.uint16(0)
        for j in range(x.shape[1]):
            bits = np.uint16(source[j] & _MAGNITUDE)
            most = max(most, bits)
            columns[j] = max(columns[j], bits)
        rows[i] = most


@contracted
def combine(
    begin: Any, end: Any, p0: Any, p1: Any, p2: Any, total: Any, piece: Any, rows: Any, columns: Any, extra: Any,
    out: Any, corner: Any,
) -> Any:  # fmt: skip
    """One piece of K: V from the digit products (m, n) by falling power of 255, added to ``total`` but for the first.

    With the last piece, the tile of out (M, N) that begins at ``corner`` becomes FP32 of V·2^(-s-t) + extra.

    Args:
        p2: of the low digits, without rows where the tile has no use for it; ``extra`` likewise.
        piece: whether it is the first, and the last.
        rows, columns: scale factors and densities, (2, m) and (2, n).
    """
    width, left = p0.shape[1], corner[1]
    first, last = piece
    has_low, has_extra = len(p2) > 0, len(extra) > 0
    kept_apart = has_low or has_extra or not (first and last)
    for i in range(begin, end):
        scale, dense = rows[0, i], rows[1, i]
        q0, q1 = p0[i], p1[i]
        if has_low:
            q2, kept = p2[i], total[i]
            for j in range(width):
                v = (q0[j] * 255.0 + q1[j]) * 255.0
                kept[j] = (0.0 if first else kept[j]) + (v + q2[j] if dense * columns[1, j] < _THIN else v)
        elif kept_apart:
            kept = total[i]
            for j in range(width):
                kept[j] = (0.0 if first else kept[j]) + (q0[j] * 255.0 + q1[j]) * 255.0
        if not last:
            continue
        target = out[corner[0] + i, left : left + width]
        if has_extra:
            kept, added = total[i], extra[i]
            for j in range(width):
                target[j] = np.float32(kept[j] * scale * columns[0, j] + added[j])
        elif kept_apart:
            kept = total[i]
            for j in range(width):
                target[j] = np.float32(kept[j] * scale * columns[0, j])
        else:
            for j in range(width):
                target[j] = np.float32(((q0[j] * 255.0 + q1[j]) * 255.0) * scale * columns[0, j])
