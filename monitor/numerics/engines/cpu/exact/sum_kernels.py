"""Compiled CPU kernels of the sums: FP64 totals with Ziv's test on the bound that holds for any order of additions."""

from __future__ import annotations

from typing import Any

import numpy as np

from monitor.numerics.kernels.jit import compiled, inlined, reordered

__all__ = ["rounded", "settle", "sum_groups", "sum_last", "sum_middle", "sum_of", "two_sum"]

_UNIT = 2.0**-52
_SMALLEST = 5e-324
_BLOCK = 1024
_TILE = 512
_NAN = np.float32(np.nan)


@inlined
def rounded(total: Any, magnitude: Any, count: Any, divisor: Any) -> Any:
    """(FP32 of total/divisor, whether undecided); a term passes through < `count` additions, Σ|x| = magnitude."""
    slack = magnitude * (_UNIT * count) if count > 1 else 0.0
    low, high = total - slack, total + slack
    if divisor != 1.0:
        low, high = low / divisor, high / divisor
        low, high = low - abs(low) * _UNIT, high + abs(high) * _UNIT
    if not abs(total) < np.inf:
        return (np.float32(total) if total == total else _NAN), False
    below, above = np.float32(low), np.float32(high)
    value = np.float32(0.0) if total == 0.0 else above
    return value, (below != above) | ((slack > 0.0) & (slack >= abs(total)))


@reordered
def _total_and_magnitude(row: Any) -> Any:
    total = 0.0
    magnitude = 0.0
    for i in range(row.shape[0]):
        value = np.float64(row[i])
        total += value
        magnitude += abs(value)
    return total, magnitude


@compiled
def two_sum(values: Any) -> Any:
    """(total, error, Σ|x|, exact): total + error ≈ Σ x with the error of each addition found exactly (Knuth).

    `exact` says that no addition rounded, so that `total` is the sum.
    """
    total = 0.0
    error = 0.0
    magnitude = 0.0
    exact = True
    for i in range(values.shape[0]):
        value = np.float64(values[i])
        new = total + value
        back = new - total
        lost = (total - (new - back)) + (value - back)
        exact = exact and lost == 0.0
        error += lost
        magnitude += abs(value)
        total = new
    return total, error, magnitude, exact


@compiled
def settle(values: Any, divisor: Any) -> Any:
    """(FP32 of Σ values / divisor, whether still undecided) by compensated summation, for what FP64 leaves open.

    Mostly these are ties, as the sum of two or three numbers often is, which an addition without error decides.
    """
    total, error, magnitude, exact = two_sum(values)
    if exact and divisor == 1.0:
        return np.float32(total + 0.0), False
    slack = 0.0 if exact else magnitude * (values.shape[0] + 1.0) ** 2 * 2.0**-104
    head = total + error
    rest = error - (head - total)
    low, high = (head + (rest - slack)) / divisor, (head + (rest + slack)) / divisor
    low = low - abs(low) * _UNIT - _SMALLEST
    high = high + abs(high) * _UNIT + _SMALLEST
    below, above = np.float32(low), np.float32(high)
    return above, (below != above) | (below == 0.0)


@compiled
def sum_of(row: Any, divisor: Any) -> Any:
    """(FP32 of Σ row / divisor, whether undecided) of a contiguous FP32 row."""
    n = row.shape[0]
    total, magnitude = 0.0, 0.0
    for start in range(0, n, _BLOCK):
        part, size = _total_and_magnitude(row[start : start + _BLOCK])
        total += part
        magnitude += size
    value, undecided = rounded(total, magnitude, min(n, _BLOCK + (n + _BLOCK - 1) // _BLOCK), divisor)
    return settle(row, divisor) if undecided else (value, undecided)


@compiled
def sum_last(begin: Any, end: Any, x: Any, divisor: Any, out: Any, undecided: Any) -> Any:
    """Sums of the rows of x (R, N) over N, divided by `divisor` before the one rounding.

    Returns how many are undecided. Blocks keep the number of additions that any term passes through, and so the error
    bound, near √N.
    """
    count = 0
    for i in range(begin, end):
        out[i], undecided[i] = sum_of(x[i], divisor)
        count += undecided[i]
    return count


@inlined
def _add_rows(x: Any, start: Any, stop: Any, total: Any, magnitude: Any) -> Any:
    """Add columns [start, stop) of x (N, I) and their magnitudes to FP64 totals, four rows at a time."""
    count, width = x.shape[0], stop - start
    for n in range(0, count - 3, 4):
        r0, r1, r2, r3 = x[n, start:stop], x[n + 1, start:stop], x[n + 2, start:stop], x[n + 3, start:stop]
        for i in range(width):
            v0, v1, v2, v3 = np.float64(r0[i]), np.float64(r1[i]), np.float64(r2[i]), np.float64(r3[i])
            total[i] += (v0 + v1) + (v2 + v3)
            magnitude[i] += (abs(v0) + abs(v1)) + (abs(v2) + abs(v3))
    for n in range(count - count % 4, count):
        row = x[n, start:stop]
        for i in range(width):
            value = np.float64(row[i])
            total[i] += value
            magnitude[i] += abs(value)


@compiled
def sum_middle(begin: Any, end: Any, x: Any, divisor: Any, out: Any, undecided: Any) -> Any:
    """Sums of x (O, N, I) over N for inner positions [begin, end), in the manner of `sum_last`.

    A term passes through fewer than N additions; the totals of a tile of positions stay in the nearest cache.
    """
    count = 0
    total, magnitude = np.empty(_TILE), np.empty(_TILE)
    for o in range(x.shape[0]):
        for start in range(begin, end, _TILE):
            stop = min(start + _TILE, end)
            total[:] = 0.0
            magnitude[:] = 0.0
            _add_rows(x[o], start, stop, total, magnitude)
            for i in range(stop - start):
                value, unknown = rounded(total[i], magnitude[i], x.shape[1], divisor)
                if unknown:
                    value, unknown = settle(x[o, :, start + i].copy(), divisor)
                out[o, start + i], undecided[o, start + i] = value, unknown
                count += unknown
    return count


@compiled
def sum_groups(begin: Any, end: Any, order: Any, starts: Any, slots: Any, source: Any, out: Any, undecided: Any) -> Any:
    """Group g sums rows order[starts[g]:starts[g+1]] of source (n, D) into row slots[g] of out.

    Groups with an undecided element keep their row of `out` and are flagged.
    """
    width = source.shape[1]
    total, magnitude, result = np.empty(width), np.empty(width), np.empty(width, np.float32)
    for g in range(begin, end):
        first, last, slot = starts[g], starts[g + 1], slots[g]
        total[:] = 0.0
        magnitude[:] = 0.0
        for p in range(first, last):
            row = source[order[p]]
            for i in range(width):
                value = np.float64(row[i])
                total[i] += value
                magnitude[i] += abs(value)
        count = last - first
        open_elements = 0
        for i in range(width):
            value, unknown = rounded(total[i], magnitude[i], count, 1.0)
            if unknown:
                terms = np.empty(count, np.float32)
                for p in range(first, last):
                    terms[p - first] = source[order[p], i]
                value, unknown = settle(terms, 1.0)
            result[i] = value
            open_elements += unknown
        undecided[g] = open_elements > 0
        if open_elements == 0:
            for i in range(width):
                out[slot, i] = result[i]
