"""Fused CPU kernels around the matrix products: quantise and split into digits, combine and scale.

Each row (or column) yields a scale factor, NaN where it holds a non-finite value, and a flag for the wide path.
Arrays are C-contiguous; `bits` is the same memory as `x`, seen as integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from monitor.numerics.exact._jit import compiled

__all__ = [
    "combine_fp64",
    "combine_int8",
    "combine_int64",
    "digits_by_columns",
    "digits_by_rows",
    "dot_products",
    "halves_by_columns",
    "halves_by_rows",
    "round_or_collect",
]

_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_INFINITY = np.uint32(0x7F80_0000)
_ALL_DIGITS_128 = np.int32(0x80_8080)
_LIMIT = np.float32(8388608.0)
_NOTHING = np.float32(0.0)
_P32 = np.ldexp(np.float32(1.0), np.arange(-126, 128)).astype(np.float32)
_P64 = np.ldexp(1.0, np.arange(-200, 201))


@compiled
def _scale_and_peak(bits: Any) -> Any:
    """(s, max|q|) of a row whose largest magnitude has these FP32 bits; (0, 0) for zero and non-finite values."""
    if bits == 0 or bits >= _INFINITY:
        return np.int64(0), np.int64(0)
    exponent = np.int64(bits >> np.uint32(23)) - 150
    significand = np.int64(bits & np.uint32(0x7F_FFFF))
    if exponent == -150:
        exponent = np.int64(-149)
        while significand < 0x80_0000:
            significand <<= 1
            exponent -= 1
    else:
        significand |= 0x80_0000
    if significand <= 0xFEFEFE:
        half = significand >> 1
        return -exponent - 1, half + (significand & half & 1)
    quarter = significand >> 2
    rest = significand & 3
    return -exponent - 2, quarter + (1 if rest > 2 or (rest == 2 and quarter & 1) else 0)


@compiled
def _factors(bits: Any, side: Any) -> Any:
    """(f, g, limit, outcome): f·g = 2^s, |q| < limit iff 6|q| < max|q|, outcome = 2^(8-s) for rows, 2^-t for columns.

    The scale of a subnormal row reaches 2^171, hence two factors.
    """
    scale, peak = _scale_and_peak(bits)
    first = min(scale, 100)
    limit = (peak + 5) // 6
    outcome = np.nan if bits >= _INFINITY else _P64[200 + (8 - scale if side == 0 else -scale)]
    return _P32[first + 126], _P32[scale - first + 126], np.int32(limit), outcome


@compiled
def digits_by_rows(begin: Any, end: Any, x: Any, bits: Any, out: Any, outcome: Any, wide: Any, side: Any) -> Any:
    """Rows of x (R, K) as int8 digits in out (R, 3K): high, middle, low for side 0 (A), else low, middle, high."""
    k = x.shape[1]
    first, last = (0, 2 * k) if side == 0 else (2 * k, 0)
    for i in range(begin, end):
        largest = np.uint32(0)
        for j in range(k):
            largest = max(largest, bits[i, j] & _MAGNITUDE)
        f, g, limit, outcome[i] = _factors(largest, side)
        high, middle, low = out[i, first : first + k], out[i, k : 2 * k], out[i, last : last + k]
        nonzero = np.int32(0)
        small = np.int32(0)
        for j in range(k):
            scaled = np.rint((x[i, j] * f) * g)
            q = np.int32(scaled if abs(scaled) < _LIMIT else _NOTHING)
            u = q + _ALL_DIGITS_128
            high[j] = np.int8((u >> 16) ^ 0x80)
            middle[j] = np.int8((u >> 8) ^ 0x80)
            low[j] = np.int8(u ^ 0x80)
            filled = np.int32((bits[i, j] & _MAGNITUDE) != 0)
            nonzero += filled
            small += filled & np.int32(abs(q) < limit)
        wide[i] = 8 * small > 7 * nonzero


@compiled
def digits_by_columns(begin: Any, end: Any, x: Any, bits: Any, out: Any, outcome: Any, wide: Any, side: Any) -> Any:
    """Columns of x (K, C) as int8 digits in out (3K, C), in the order of `digits_by_rows`."""
    k = x.shape[0]
    first, last = (0, 2 * k) if side == 0 else (2 * k, 0)
    width = end - begin
    largest = np.zeros(width, np.uint32)
    for i in range(k):
        for j in range(width):
            largest[j] = max(largest[j], bits[i, begin + j] & _MAGNITUDE)
    f, g = np.empty(width, np.float32), np.empty(width, np.float32)
    limit, nonzero, small = np.empty(width, np.int32), np.zeros(width, np.int32), np.zeros(width, np.int32)
    for j in range(width):
        f[j], g[j], limit[j], outcome[begin + j] = _factors(largest[j], side)
    for i in range(k):
        source, pattern = x[i, begin:end], bits[i, begin:end]
        high, middle, low = out[first + i, begin:end], out[k + i, begin:end], out[last + i, begin:end]
        for j in range(width):
            scaled = np.rint((source[j] * f[j]) * g[j])
            q = np.int32(scaled if abs(scaled) < _LIMIT else _NOTHING)
            u = q + _ALL_DIGITS_128
            high[j] = np.int8((u >> 16) ^ 0x80)
            middle[j] = np.int8((u >> 8) ^ 0x80)
            low[j] = np.int8(u ^ 0x80)
            filled = np.int32((pattern[j] & _MAGNITUDE) != 0)
            nonzero[j] += filled
            small[j] += filled & np.int32(abs(q) < limit[j])
    for j in range(width):
        wide[begin + j] = 8 * small[j] > 7 * nonzero[j]


@compiled
def halves_by_rows(begin: Any, end: Any, x: Any, bits: Any, out: Any, outcome: Any, wide: Any, side: Any) -> Any:
    """Rows of x (R, K) as FP64 integers in out (R, 2K): h, l with q = 256h + l for side 0, r, h' for side 1."""
    k = x.shape[1]
    for i in range(begin, end):
        largest = np.uint32(0)
        for j in range(k):
            largest = max(largest, bits[i, j] & _MAGNITUDE)
        f, g, limit, outcome[i] = _factors(largest, side)
        left, right = out[i, 0:k], out[i, k : 2 * k]
        nonzero = np.int32(0)
        small = np.int32(0)
        for j in range(k):
            scaled = np.rint((x[i, j] * f) * g)
            q = np.int32(scaled if abs(scaled) < _LIMIT else _NOTHING)
            u = q + _ALL_DIGITS_128
            h = (u >> 8) - 0x8080
            left[j] = np.float64(h if side == 0 else q)
            right[j] = np.float64((u & 255) - 128 if side == 0 else h)
            filled = np.int32((bits[i, j] & _MAGNITUDE) != 0)
            nonzero += filled
            small += filled & np.int32(abs(q) < limit)
        wide[i] = 8 * small > 7 * nonzero


@compiled
def halves_by_columns(begin: Any, end: Any, x: Any, bits: Any, out: Any, outcome: Any, wide: Any, side: Any) -> Any:
    """Columns of each matrix of x (B, K, C) as FP64 integers in out (B, 2K, C), in the order of `halves_by_rows`."""
    k, width = x.shape[1], x.shape[2]
    largest = np.empty(width, np.uint32)
    f, g = np.empty(width, np.float32), np.empty(width, np.float32)
    limit, nonzero, small = np.empty(width, np.int32), np.empty(width, np.int32), np.empty(width, np.int32)
    for b in range(begin, end):
        largest[:] = 0
        nonzero[:] = 0
        small[:] = 0
        for i in range(k):
            for j in range(width):
                largest[j] = max(largest[j], bits[b, i, j] & _MAGNITUDE)
        for j in range(width):
            f[j], g[j], limit[j], outcome[b, j] = _factors(largest[j], side)
        for i in range(k):
            left, right = out[b, i], out[b, k + i]
            for j in range(width):
                scaled = np.rint((x[b, i, j] * f[j]) * g[j])
                q = np.int32(scaled if abs(scaled) < _LIMIT else _NOTHING)
                u = q + _ALL_DIGITS_128
                h = (u >> 8) - 0x8080
                left[j] = np.float64(h if side == 0 else q)
                right[j] = np.float64((u & 255) - 128 if side == 0 else h)
                filled = np.int32((bits[b, i, j] & _MAGNITUDE) != 0)
                nonzero[j] += filled
                small[j] += filled & np.int32(abs(q) < limit[j])
        for j in range(width):
            wide[b, j] = 8 * small[j] > 7 * nonzero[j]


@compiled
def combine_int8(begin: Any, end: Any, p0: Any, p1: Any, p2: Any, p3: Any, rows: Any, columns: Any, out: Any) -> Any:
    """out (M, N) from the digit products by power of 256; V < 2^53, so that FP64 holds each step exactly."""
    for i in range(begin, end):
        row = rows[i]
        for j in range(out.shape[1]):
            v = ((p0[i, j] * 256.0 + p1[i, j]) * 256.0 + p2[i, j]) * 256.0 + p3[i, j]
            out[i, j] = np.float32((v * row) * columns[j])


@compiled
def combine_int64(begin: Any, end: Any, p0: Any, p1: Any, p2: Any, p3: Any, total: Any) -> Any:
    """Adds V of one piece of K to total (M, N) in int64."""
    for i in range(begin, end):
        for j in range(total.shape[1]):
            v = ((np.int64(p0[i, j]) * 256 + p1[i, j]) * 256 + p2[i, j]) * 256 + p3[i, j]
            total[i, j] += v


@compiled
def combine_fp64(begin: Any, end: Any, v: Any, rows: Any, columns: Any, out: Any) -> Any:
    """out (B, M, N) = FP32((v·rows)·columns) for rows (B, M) and columns (B, N) of scale factors; +0 for v = 0."""
    for b in range(begin, end):
        for i in range(out.shape[1]):
            row = rows[b, i]
            for j in range(out.shape[2]):
                out[b, i, j] = np.float32(((np.float64(v[b, i, j]) + 0.0) * row) * columns[b, j])


@compiled
def round_or_collect(
    begin: Any, end: Any, value: Any, rows: Any, columns: Any, slack: Any, out: Any, found: Any
) -> Any:
    """Ziv's test on value (R, N) with error slack·rows·columns; undecided positions go to `found`, counted."""
    n = out.shape[1]
    count = 0
    for i in range(begin, end):
        undecided = 0
        row = rows[i] * slack
        for j in range(n):
            error = row * columns[j]
            v = value[i, j] + 0.0
            low, high = np.float32(v - error), np.float32(v + error)
            out[i, j] = high
            undecided += (low != high) | ((high == 0) & (error > abs(v)))
        if undecided:
            for j in range(n):
                error = row * columns[j]
                v = value[i, j]
                low, high = np.float32(v - error), np.float32(v + error)
                if low != high or (high == 0 and error > abs(v)):
                    if count < found.shape[0]:
                        found[count] = i * n + j
                    count += 1
    return count


@compiled
def dot_products(begin: Any, end: Any, a: Any, b: Any, left: Any, right: Any, sums: Any, rest: Any) -> Any:
    """For pairs p: sums + rest = Σ_k a[left[p], k]·b[right[p], k] (FP32 arrays) within (K+1)²·2^-104·Σ|a·b|.

    Products are exact in FP64; the rounding error of each addition is found without error (Knuth) and added up apart.
    """
    k = a.shape[1]
    for p in range(begin, end):
        total = 0.0
        error = 0.0
        row, column = a[left[p]], b[right[p]]
        for j in range(k):
            product = np.float64(row[j]) * np.float64(column[j])
            new = total + product
            back = new - total
            error += (total - (new - back)) + (product - back)
            total = new
        head = total + error
        sums[p] = head
        rest[p] = error - (head - total)
