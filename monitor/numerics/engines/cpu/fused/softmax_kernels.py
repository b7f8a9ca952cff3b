"""Compiled softmax and log-softmax over rows: the roundings of ``operators.normalisation`` without its tensors.

A kernel flags each row that holds an exponential, a logarithm or a sum which Ziv's test leaves undecided; the caller
computes these rows from the separate operators.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from monitor.numerics.engines.cpu.exact.function_kernels import exp64, log64
from monitor.numerics.engines.cpu.exact.sum_kernels import sum_of
from monitor.numerics.engines.eager.exact.functions import EPSILON
from monitor.numerics.kernels.jit import compiled, inlined
from monitor.numerics.kernels.pointers import floats

__all__ = ["log_softmax_rows", "log_softmax_slope_rows", "softmax_rows", "softmax_slope_rows"]

_NAN = np.float32(np.nan)
_ZERO = np.float32(0.0)
_SIGN = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_EXP_DOWN, _EXP_UP = 1.0 - EPSILON["exp"], 1.0 + EPSILON["exp"]
_LOG_DOWN, _LOG_UP = 1.0 - EPSILON["log"], 1.0 + EPSILON["log"]


@inlined
def _top(row: Any) -> Any:
    """(largest number, with +0 for a zero, whether it is finite and there is no NaN) of a row.

    Comparing the patterns as integers, in the order of the numbers, is what LLVM can do in vector lanes.
    """
    largest = np.int32(-0x80000000)
    size = np.int32(0)
    for j in range(row.shape[0]):
        bits = np.float32(row[j]).view(np.int32)
        magnitude = bits & _SIGN
        largest = max(largest, bits ^ ((bits >> np.int32(31)) & _SIGN))
        size = max(size, magnitude)
    top = np.int32(largest ^ ((largest >> np.int32(31)) & _SIGN)).view(np.float32)
    return top + _ZERO, (abs(top) < np.inf) & (size <= _INFINITY)


@inlined
def _weights(row: Any, top: Any, out: Any) -> Any:
    """exp(row - top) into `out`; how many are undecided."""
    undecided = 0
    for j in range(row.shape[0]):
        value = exp64(np.float64(row[j] - top))
        low, high = np.float32(value * _EXP_DOWN), np.float32(value * _EXP_UP)
        out[j] = high
        undecided += low != high
    return undecided


@compiled
def softmax_rows(begin: Any, end: Any, x_at: Any, width: Any, out_at: Any, undecided: Any) -> None:
    """Rows [begin, end) of x (rows, width)."""
    for i in range(begin, end):
        row, out = floats(x_at + 4 * i * width, width), floats(out_at + 4 * i * width, width)
        top, finite = _top(row)
        if not finite:
            out[:] = _NAN
            undecided[i] = False
            continue
        open_weights = _weights(row, top, out)
        total, open_sum = sum_of(out, 1.0)
        for j in range(width):
            out[j] = out[j] / total
        undecided[i] = (open_weights > 0) | open_sum


@compiled
def softmax_slope_rows(begin: Any, end: Any, grad_at: Any, y_at: Any, width: Any, out_at: Any, undecided: Any) -> None:
    """Gradient of rows [begin, end) from the softmax y (rows, width) and its gradient."""
    for i in range(begin, end):
        skipped = 4 * i * width
        grad, y, out = floats(grad_at + skipped, width), floats(y_at + skipped, width), floats(out_at + skipped, width)
        for j in range(width):
            out[j] = grad[j] * y[j]
        total, undecided[i] = sum_of(out, 1.0)
        for j in range(width):
            value = out[j] - y[j] * total
            out[j] = value if value == value else _NAN


@compiled
def log_softmax_rows(begin: Any, end: Any, x_at: Any, width: Any, out_at: Any, undecided: Any) -> None:
    """Rows [begin, end) of x (rows, width)."""
    for i in range(begin, end):
        row, out = floats(x_at + 4 * i * width, width), floats(out_at + 4 * i * width, width)
        top, finite = _top(row)
        if not finite:
            out[:] = _NAN
            undecided[i] = False
            continue
        open_weights = _weights(row, top, out)
        total, open_sum = sum_of(out, 1.0)
        value = log64(np.float64(total))
        low, high = np.float32(value * _LOG_DOWN), np.float32(value * _LOG_UP)
        for j in range(width):
            out[j] = (row[j] - top) - high
        undecided[i] = (open_weights > 0) | open_sum | (low != high)


@compiled
def log_softmax_slope_rows(
    begin: Any, end: Any, grad_at: Any, y_at: Any, width: Any, out_at: Any, undecided: Any
) -> None:
    """Gradient of rows [begin, end) from the log-softmax y (rows, width) and its gradient."""
    for i in range(begin, end):
        skipped = 4 * i * width
        grad, y, out = floats(grad_at + skipped, width), floats(y_at + skipped, width), floats(out_at + skipped, width)
        total, open_sum = sum_of(grad, 1.0)
        open_weights: Any = 0
        for j in range(width):
            value = exp64(np.float64(y[j]))
            low, high = np.float32(value * _EXP_DOWN), np.float32(value * _EXP_UP)
            open_weights += (low < high) | (low > high)
            slope = grad[j] - high * total
            out[j] = slope if slope == slope else _NAN
        undecided[i] = (open_weights > 0) | open_sum
