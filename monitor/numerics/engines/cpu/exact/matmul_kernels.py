"""Fused CPU kernels around the matrix products: quantise and split into digits, combine and scale.

Each row (or column) yields a scale factor, NaN where it holds a non-finite value, and a flag for the wide path.
Arrays are C-contiguous; `bits` is the same memory as `x`, seen as integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from monitor.numerics.kernels.jit import compiled, contracted, inlined, reordered

__all__ = [
    "add_doubles",
    "add_int8",
    "combine_fp64",
    "combine_int8",
    "combine_int64",
    "digits_across",
    "digits_along",
    "dot_products",
    "halves_by_columns",
    "halves_by_rows",
    "round_flagged",
    "round_or_collect",
    "widen",
]

_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_INFINITY = np.uint32(0x7F80_0000)
_ALL_DIGITS_128 = np.int32(0x80_8080)
_NOTHING = np.float32(0.0)
_ONE = np.float32(1.0)
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
    """(f, g, limit, outcome): g·f = 2^s, |q| < limit iff 6|q| < max|q|, outcome = 2^(8-s) for rows, 2^-t for columns.

    g is 1 except for vectors of subnormal numbers, whose scale reaches 2^171, and 0 for those that are not finite.
    """
    scale, peak = _scale_and_peak(bits)
    first = min(scale, 100)
    limit = (peak + 5) // 6
    broken = bits >= _INFINITY
    outcome = np.nan if broken else _P64[200 + (8 - scale if side == 0 else -scale)]
    return _P32[first + 126], _NOTHING if broken else _P32[scale - first + 126], np.int32(limit), outcome


@compiled
def _prescaled(source: Any, g: Any, target: Any) -> Any:
    """target = source·g for the few vectors whose g is not 1."""
    for j in range(source.shape[0]):
        target[j] = source[j] * g if g != _NOTHING else _NOTHING


@inlined
def _write_digits(value: Any, factor: Any, high: Any, middle: Any, low: Any, j: Any) -> Any:
    """Stores the three balanced base-256 digits of q = RNE(value·factor) at place j; returns |q|."""
    q = np.int32(np.rint(value * factor))
    u = q + _ALL_DIGITS_128
    high[j] = np.int8((u >> 16) ^ 0x80)
    middle[j] = np.int8((u >> 8) ^ 0x80)
    low[j] = np.int8(u ^ 0x80)
    return abs(q)


@inlined
def _is_wide(below: Any, filled: Any, count: Any) -> Any:
    """Whether over seven eighths of the non-zero elements are small; `below` counts the zeros too."""
    return 8 * (below - (count - filled)) > 7 * filled


@compiled
def digits_along(
    begin: Any, end: Any, x: Any, bits: Any, out: Any, outcome: Any, wide: Any, side: Any, chunk: Any, origin: Any
) -> Any:
    """Rows of x (R, K) as int8 digits in rows of out (·, 3K), the first of which is row ``origin``.

    Each piece of ``chunk`` elements becomes its high, middle and low digits for side 0 (A), low, middle, high for B.
    """
    k = x.shape[1]
    for i in range(begin, end):
        largest = np.uint32(0)
        for j in range(k):
            largest = max(largest, bits[i, j] & _MAGNITUDE)
        f, g, limit, outcome[i] = _factors(largest, side)
        row = x[i]
        if g != _ONE:
            row = np.empty(k, np.float32)
            _prescaled(x[i], g, row)
        filled = np.int32(0)
        below = np.int32(0)
        for start in range(0, k, chunk):
            width = min(chunk, k - start)
            source, original = row[start : start + width], x[i, start : start + width]
            piece = out[i - origin, 3 * start : 3 * (start + width)]
            first, last = (0, 2 * width) if side == 0 else (2 * width, 0)
            high, middle, low = piece[first : first + width], piece[width : 2 * width], piece[last : last + width]
            for j in range(width):
                below += np.int32(_write_digits(source[j], f, high, middle, low, j) < limit)
                filled += np.int32(original[j] != _NOTHING)
        wide[i] = _is_wide(below, filled, k)


@compiled
def digits_across(
    begin: Any, end: Any, x: Any, bits: Any, out: Any, outcome: Any, wide: Any, side: Any, chunk: Any, origin: Any
) -> Any:
    """Columns of x (K, C) as int8 digits in columns of out (3K, ·), in the order of ``digits_along``."""
    k = x.shape[0]
    width = end - begin
    largest = np.zeros(width, np.uint32)
    for i in range(k):
        pattern = bits[i, begin:end]
        for j in range(width):
            largest[j] = max(largest[j], pattern[j] & _MAGNITUDE)
    f, g, scaled = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    limit, filled, below = np.empty(width, np.int32), np.zeros(width, np.int32), np.zeros(width, np.int32)
    special = False
    for j in range(width):
        f[j], g[j], limit[j], outcome[begin + j] = _factors(largest[j], side)
        special |= g[j] != _ONE
    for i in range(k):
        original = source = x[i, begin:end]
        if special:
            for j in range(width):
                scaled[j] = source[j] * g[j] if g[j] != _NOTHING else _NOTHING
            source = scaled
        start = i // chunk * chunk
        depth = min(chunk, k - start)
        row = 2 * start + i
        first, last = (0, 2 * depth) if side == 0 else (2 * depth, 0)
        high = out[row + first, begin - origin : end - origin]
        middle = out[row + depth, begin - origin : end - origin]
        low = out[row + last, begin - origin : end - origin]
        for j in range(width):
            below[j] += np.int32(_write_digits(source[j], f[j], high, middle, low, j) < limit[j])
            filled[j] += np.int32(original[j] != _NOTHING)
    for j in range(width):
        wide[begin + j] = _is_wide(below[j], filled[j], k)


@compiled
def halves_by_rows(begin: Any, end: Any, x: Any, bits: Any, out: Any, outcome: Any, wide: Any, side: Any) -> Any:
    """Rows of x (R, K) as FP64 integers in out (R, 2K): h, l with q = 256h + l for side 0, r, h' for side 1."""
    k = x.shape[1]
    for i in range(begin, end):
        largest = np.uint32(0)
        for j in range(k):
            largest = max(largest, bits[i, j] & _MAGNITUDE)
        f, g, limit, outcome[i] = _factors(largest, side)
        original = source = x[i]
        if g != _ONE:
            source = np.empty(k, np.float32)
            _prescaled(original, g, source)
        left, right = out[i, 0:k], out[i, k : 2 * k]
        filled = np.int32(0)
        below = np.int32(0)
        for j in range(k):
            q = np.int32(np.rint(source[j] * f))
            u = q + _ALL_DIGITS_128
            h = (u >> 8) - 0x8080
            left[j] = np.float64(h if side == 0 else q)
            right[j] = np.float64((u & 255) - 128 if side == 0 else h)
            below += np.int32(abs(q) < limit)
            filled += np.int32(original[j] != _NOTHING)
        wide[i] = _is_wide(below, filled, k)


@compiled
def halves_by_columns(begin: Any, end: Any, x: Any, bits: Any, out: Any, outcome: Any, wide: Any, side: Any) -> Any:
    """Columns of each matrix of x (B, K, C) as FP64 integers in out (B, 2K, C), in the order of `halves_by_rows`."""
    k, width = x.shape[1], x.shape[2]
    largest = np.empty(width, np.uint32)
    f, g, scaled = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    limit, filled, below = np.empty(width, np.int32), np.empty(width, np.int32), np.empty(width, np.int32)
    for b in range(begin, end):
        largest[:] = 0
        filled[:] = 0
        below[:] = 0
        special = False
        for i in range(k):
            for j in range(width):
                largest[j] = max(largest[j], bits[b, i, j] & _MAGNITUDE)
        for j in range(width):
            f[j], g[j], limit[j], outcome[b, j] = _factors(largest[j], side)
            special |= g[j] != _ONE
        for i in range(k):
            original = source = x[b, i]
            if special:
                for j in range(width):
                    scaled[j] = source[j] * g[j] if g[j] != _NOTHING else _NOTHING
                source = scaled
            left, right = out[b, i], out[b, k + i]
            for j in range(width):
                q = np.int32(np.rint(source[j] * f[j]))
                u = q + _ALL_DIGITS_128
                h = (u >> 8) - 0x8080
                left[j] = np.float64(h if side == 0 else q)
                right[j] = np.float64((u & 255) - 128 if side == 0 else h)
                below[j] += np.int32(abs(q) < limit[j])
                filled[j] += np.int32(original[j] != _NOTHING)
        for j in range(width):
            wide[b, j] = _is_wide(below[j], filled[j], k)


@contracted
def combine_int8(
    begin: Any, end: Any, p0: Any, p1: Any, p2: Any, p3: Any, rows: Any, columns: Any, out: Any, top: Any, left: Any
) -> Any:
    """Row top + i of out (B, M, P), as long as B·P, from column `left` on, from digit products (m, n) by power of 256.

    V < 2^53, so FP64 holds each step exactly.
    """
    width, length = p0.shape[1], out.shape[2]
    for i in range(begin, end):
        row = rows[i]
        block, at, done = left // length, left % length, 0
        while done < width:
            more = min(length - at, width - done)
            q0, q1, q2, q3 = p0[i, done:], p1[i, done:], p2[i, done:], p3[i, done:]
            scales, target = columns[done:], out[block, top + i, at:]
            for j in range(more):
                v = ((q0[j] * 256.0 + q1[j]) * 256.0 + q2[j]) * 256.0 + q3[j]
                target[j] = np.float32((v * row) * scales[j])
            block, at, done = block + 1, 0, done + more


@compiled
def add_int8(begin: Any, end: Any, p0: Any, p1: Any, p2: Any, p3: Any, total: Any) -> Any:
    """Adds V of one piece of K to total (M, N) in int64."""
    for i in range(begin, end):
        q0, q1, q2, q3, target = p0[i], p1[i], p2[i], p3[i], total[i]
        for j in range(total.shape[1]):
            target[j] += ((np.int64(q0[j]) * 256 + q1[j]) * 256 + q2[j]) * 256 + q3[j]


@compiled
def combine_int64(begin: Any, end: Any, total: Any, rows: Any, columns: Any, out: Any, top: Any, left: Any) -> Any:
    """As ``combine_int8``, from V (m, n) in int64."""
    length = out.shape[2]
    for i in range(begin, end):
        row = rows[i]
        for j in range(total.shape[1]):
            block, at = (left + j) // length, (left + j) % length
            out[block, top + i, at] = np.float32((np.float64(total[i, j]) * row) * columns[j])


@compiled
def combine_fp64(begin: Any, end: Any, v: Any, rows: Any, columns: Any, out: Any) -> Any:
    """out (B, M, N) = FP32((v·rows)·columns) for rows (B, M) and columns (B, N) of scale factors; +0 for v = 0."""
    for b in range(begin, end):
        for i in range(out.shape[1]):
            row = rows[b, i]
            for j in range(out.shape[2]):
                out[b, i, j] = np.float32(((np.float64(v[b, i, j]) + 0.0) * row) * columns[b, j])


@compiled
def add_doubles(begin: Any, end: Any, part: Any, head: Any, tail: Any) -> Any:
    """head + tail (R, N) += part: each addition's error is found without error (Knuth) and kept in tail."""
    for i in range(begin, end):
        for j in range(part.shape[1]):
            old, more = head[i, j], part[i, j]
            new = old + more
            back = new - old
            head[i, j] = new
            tail[i, j] += (old - (new - back)) + (more - back)


@reordered
def widen(begin: Any, end: Any, x: Any, start: Any, out: Any, squares: Any) -> None:
    """out (R, W) = columns [start, start + W) of x (R, K) in FP64, and adds the squares of each row to squares (R,)."""
    width = out.shape[1]
    for i in range(begin, end):
        source, target = x[i, start : start + width], out[i]
        total = 0.0
        for j in range(width):
            value = np.float64(source[j])
            target[j] = value
            total += value * value
        squares[i] += total


@compiled
def round_or_collect(
    begin: Any, end: Any, value: Any, rows: Any, columns: Any, slack: Any, out: Any, found: Any
) -> Any:
    """Ziv's test on value (R, N) with error slack·rows·columns, for norms (R,) and (N,).

    Undecided positions go to `found`, as far as it reaches, and are counted; a NaN in `out` stays.
    """
    n = out.shape[1]
    count = 0
    for i in range(begin, end):
        undecided = 0
        row = rows[i] * slack
        target, source = out[i], value[i]
        for j in range(n):
            error = row * columns[j]
            v = source[j] + 0.0
            low, high = np.float32(v - error), np.float32(v + error)
            chosen = target[j] == target[j]
            target[j] = high if chosen else target[j]
            undecided += chosen & ((low != high) | ((high == 0) & (error > abs(v))))
        if undecided:
            for j in range(n):
                error = row * columns[j]
                v = source[j]
                low, high = np.float32(v - error), np.float32(v + error)
                if target[j] == target[j] and (low != high or (high == 0 and error > abs(v))):
                    if count < found.shape[0]:
                        found[count] = i * n + j
                    count += 1
    return count


@inlined
def _dot(row: Any, column: Any) -> Any:
    """(Σ a·b, Σ |a·b|) in FP64, added in any order."""
    total = size = 0.0
    for k in range(row.shape[0]):
        product = np.float64(row[k]) * np.float64(column[k])
        total += product
        size += abs(product)
    return total, size


@reordered
def round_flagged(
    begin: Any,
    end: Any,
    left: Any,
    right: Any,
    wide_rows: Any,
    wide_columns: Any,
    any_column: Any,
    slack: Any,
    out: Any,
    found: Any,
    scales: Any,
) -> Any:
    """Dot products of rows of left (B, M, K) and right (B, N, K) where either is flagged, and Ziv's test on them.

    Their error is slack·Σ|a·b|. Undecided positions go to `found` and that sum to `scales`, as far as these reach, and
    are counted; a NaN in `out` stays.
    """
    m, n = out.shape[1], out.shape[2]
    count = 0
    for b in range(begin, end):
        for i in range(m):
            whole = wide_rows[b, i]
            if not (whole or any_column[b]):
                continue
            for j in range(n):
                if not (whole or wide_columns[b, j]) or out[b, i, j] != out[b, i, j]:
                    continue
                v, size = _dot(left[b, i], right[b, j])
                error = size * slack
                low, high = np.float32(v - error), np.float32(v + error)
                out[b, i, j] = high
                if low != high or (high == 0 and error > abs(v)):
                    if count < found.shape[0]:
                        found[count] = (b * m + i) * n + j
                        scales[count] = size
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
