"""The wide path on the CPU: correctly rounded dot products for rows and columns that three digits would starve.

FP64 products of pieces of K, added without error, decide nearly all elements; the others are recomputed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.numerics.engines.cpu.exact import matmul_kernels as kernels
from monitor.numerics.kernels.arrays import array
from monitor.numerics.kernels.jit import guarded
from monitor.numerics.kernels.scratch import scratch
from monitor.numerics.reference.resolution import rounded_sum

__all__ = ["round_flagged", "rounded_products"]

_DEPTH = 512
"""K of one FP64 product: its error bound, which grows with K, decides how many elements stay undecided."""

_MARGIN = 1.001
"""Covers the rounding of the norms, of the bound itself and of the sums' tails."""


def _rows(x: Tensor, chosen: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(y, places), y C-contiguous, with y[places] the chosen rows of x (B, R, K), counted through the batch."""
    if x.is_contiguous():
        return array(x).reshape(-1, x.shape[-1]), chosen
    used, places = np.unique(chosen, return_inverse=True)
    batch, row = np.divmod(used, x.shape[1])
    return array(x[torch.from_numpy(batch), torch.from_numpy(row)].contiguous()), places


def _resolve(
    left: Tensor, right: Tensor, rows: NDArray[np.int64], columns: NDArray[np.int64], scale: Any
) -> NDArray[np.float32]:
    """FP32 of the exact dot products of rows of left and right, counted through the batch; `scale` bounds Σ|a·b|."""
    count, k = len(rows), left.shape[-1]
    head, rest = np.empty(count), np.empty(count)
    (x, row_of), (y, column_of) = _rows(left, rows), _rows(right, columns)
    guarded(kernels.dot_products, 0, count, (x, y, row_of, column_of, head, rest))
    slack = scale * ((k + 1.0) ** 2 * 2.0**-104)
    with np.errstate(over="ignore"):  # beyond the largest number of FP32 a result is infinite
        low = np.nextafter(head + (rest - slack), -np.inf).astype(np.float32)
        high: NDArray[np.float32] = np.nextafter(head + (rest + slack), np.inf).astype(np.float32)
    for p in np.flatnonzero((low != high) | (high == 0)):
        products = x[row_of[p]].astype(np.float64) * y[column_of[p]].astype(np.float64)
        high[p] = rounded_sum(products.tolist())
    return high


def _approximate(left: Tensor, right: Tensor) -> tuple[Any, Any, Any]:
    """FP64 products (R, C) of finite FP32 left (R, K) and right (C, K), and both sides' row norms."""
    sides = [array(x.contiguous()) for x in (left, right)]
    squares = [np.zeros(len(x)) for x in sides]
    value = scratch("wide products", (len(left), len(right)), torch.float64)
    total: Any = array(value)
    tail: Any = None
    k = left.shape[1]
    for start in range(0, k, _DEPTH):
        pieces = []
        for side, (x, square) in enumerate(zip(sides, squares, strict=True)):
            piece = scratch(f"wide operand {side}", (len(x), min(_DEPTH, k - start)), torch.float64)
            guarded(kernels.widen, 0, len(x), (x, start, array(piece), square))
            pieces.append(piece)
        if start == 0:
            torch.mm(pieces[0], pieces[1].t(), out=value)
        else:
            tail = np.zeros(total.shape) if tail is None else tail
            guarded(kernels.add_doubles, 0, len(left), (array(torch.mm(pieces[0], pieces[1].t())), total, tail))
    return total if tail is None else total + tail, np.sqrt(squares[0]), np.sqrt(squares[1])


def _collected(kernel: Any, rows: int, arguments: tuple[Any, ...], *kinds: type) -> list[NDArray[Any]]:
    """What a kernel collects in its last arguments, of these types, with as much room as it needs."""
    room = 1 << 12
    while True:
        found: list[NDArray[Any]] = [np.empty(room, kind) for kind in kinds]
        count = guarded(kernel, 0, rows, (*arguments, *found))
        if count <= room:
            return [each[:count] for each in found]
        room = count


def rounded_products(left: Tensor, right: Tensor, outcome: NDArray[np.float64]) -> NDArray[np.float32]:
    """FP32 (R, C) of the exact products of FP32 left (R, K), finite, and right (C, K), columns of the right factor.

    A product of FP32 numbers is exact in FP64, and a sum of d of them in any order, with FMA or not, is within
    d·2^-53·Σ|a||b| of the true one. Summed over the pieces of K, Σ|a||b| is at most ‖a‖·‖b‖.

    Args:
        outcome: scale factors (C,) of the right side, NaN where it is not finite; there the result is NaN.
    """
    broken = np.isnan(outcome)
    out = np.zeros((left.shape[0], right.shape[0]), np.float32)
    out[:, broken] = np.nan
    clean = right.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) if broken.any() else right
    value, row_norms, column_norms = _approximate(left, clean)
    slack = _slack(min(left.shape[1], _DEPTH))
    (found,) = _collected(kernels.round_or_collect, len(out), (value, row_norms, column_norms, slack, out), np.int64)
    if len(found):
        rows, columns = np.divmod(found, out.shape[1])
        scale = row_norms[rows] * column_norms[columns] * _MARGIN
        out[rows, columns] = _resolve(left[None], clean[None], rows, columns, scale)
    return out


def round_flagged(
    a: Tensor, b: Tensor, wide_rows: NDArray[np.bool_], wide_columns: NDArray[np.bool_], out: NDArray[np.float32]
) -> None:
    """Overwrites the elements of out (B, M, N), C-contiguous, whose row or column is wide; NaN stays.

    Args:
        a, b: FP32 (B, M, K) and (B, K, N).
        wide_rows, wide_columns: flags (B, M) and (B, N), false for rows and columns that are not finite.
    """
    left, right = a.contiguous(), b.transpose(1, 2).contiguous()
    flags = wide_rows, wide_columns, wide_columns.any(axis=1)
    arguments = (array(left), array(right), *flags, _slack(a.shape[2]), out)
    found, sizes = _collected(kernels.round_flagged, len(out), arguments, np.int64, np.float64)
    if len(found):
        rows, places = np.divmod(found, out.shape[2])
        columns = rows // out.shape[1] * out.shape[2] + places
        out.reshape(-1)[found] = _resolve(left, right, rows, columns, sizes * _MARGIN)


def _slack(terms: int) -> float:
    """Relative error of an FP64 sum of so many products, and of what is computed from it."""
    return (terms + 4) * 2.0**-53 * _MARGIN
