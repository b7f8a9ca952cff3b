"""Compiled picks and scatters with few addends for each element: the losses over classes and max pooling."""

from __future__ import annotations

from typing import Any

import numpy as np

from monitor.numerics.engines.cpu.exact.sum_kernels import rounded, settle
from monitor.numerics.kernels.jit import compiled
from monitor.numerics.kernels.pointers import floats

__all__ = ["pick_negative", "put_in_rows", "scatter_in_planes"]

_NAN = np.float32(np.nan)
_ZERO = np.float32(0.0)


@compiled
def pick_negative(x_at: Any, rows: Any, width: Any, target: Any, ignored: Any, out_at: Any) -> Any:
    """out[i] = -x[i, target[i]], or +0 where the target is `ignored`: (rows kept, targets out of range)."""
    x, out = floats(x_at, (rows, width)), floats(out_at, rows)
    kept, bad = 0, 0
    for i in range(rows):
        place = target[i]
        out[i] = _ZERO
        if place == ignored:
            continue
        if place < 0 or place >= width:
            bad += 1
        else:
            out[i] = -x[i, place]
            kept += 1
    return kept, bad


@compiled
def put_in_rows(out_at: Any, rows: Any, width: Any, target: Any, ignored: Any, values: Any, step: Any) -> Any:
    """out[i, target[i]] = -values[i·step] but where the target is `ignored`: how many targets are out of range."""
    out = floats(out_at, (rows, width))
    bad = 0
    for i in range(rows):
        place = target[i]
        if place == ignored:
            continue
        if place < 0 or place >= width:
            bad += 1
        else:
            value = -values[i * step]
            out[i, place] = value if value == value else _NAN
    return bad


@compiled
def scatter_in_planes(begin: Any, end: Any, grad_at: Any, places: Any, index: Any, out_at: Any, size: Any) -> Any:
    """out[p, j] = FP32 of the exact sum of grad[p, i] over the i with index[p, i] = j.

    Planes [begin, end) of grad and index (planes, places) and out (planes, size), which is written whole. Returns how
    many sums are undecided and places out of range.
    """
    planes = end - begin
    grad = floats(grad_at + 4 * begin * places, (planes, places))
    out = floats(out_at + 4 * begin * size, (planes, size))
    total, magnitude, count = np.empty(size), np.empty(size), np.empty(size, np.int64)
    undecided = 0
    for p in range(planes):
        row, where, target = grad[p], index[begin + p], out[p]
        total[:] = 0.0
        magnitude[:] = 0.0
        count[:] = 0
        for i in range(places):
            j, value = where[i], np.float64(row[i])
            if j < 0 or j >= size:
                undecided += 1
                continue
            total[j] += value
            magnitude[j] += abs(value)
            count[j] += 1
        for j in range(size):
            result, unknown = rounded(total[j], magnitude[j], count[j], 1.0)
            if unknown:
                result, unknown = settle(row[where == j], 1.0)
                undecided += unknown
            target[j] = result
    return undecided
