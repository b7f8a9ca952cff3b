"""The wide path on the CPU: correctly rounded dot products for rows and columns that three digits would starve.

FP64 products of pieces of K, added without error, decide nearly all elements; the others are recomputed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.numerics.exact import _matmul_kernels as kernels
from monitor.numerics.exact._jit import guarded
from monitor.numerics.exact._resolve import round_fraction
from monitor.numerics.exact.sums import sum_of_doubles

__all__ = ["round_products"]

_SIDE = 4096
"""Most rows or columns of a block."""

_DEPTH = 512
"""K of one FP64 product: its error bound, which grows with K, decides how many elements stay undecided."""

_MARGIN = 1.001
"""Covers the rounding of the norms, of the bound itself and of the sums' tails."""


def _rows(x: Tensor, chosen: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(y, places), y C-contiguous, with y[places] the chosen rows of x."""
    if x.is_contiguous():
        return x.numpy(), chosen
    used, places = np.unique(chosen, return_inverse=True)
    return x[torch.from_numpy(used)].contiguous().numpy(), places


def _resolve(
    left: Tensor, right: Tensor, rows: NDArray[np.int64], columns: NDArray[np.int64], scale: Any
) -> NDArray[np.float32]:
    """FP32 of the exact dot products of left[rows] and right[columns]; `scale` bounds Σ|a·b| of each."""
    count, k = len(rows), left.shape[1]
    head, rest = np.empty(count), np.empty(count)
    (x, row_of), (y, column_of) = _rows(left, rows), _rows(right, columns)
    guarded(kernels.dot_products, 0, count, (x, y, row_of, column_of, head, rest))
    slack = scale * ((k + 1.0) ** 2 * 2.0**-104)
    low = np.nextafter(head + (rest - slack), -np.inf).astype(np.float32)
    high: NDArray[np.float32] = np.nextafter(head + (rest + slack), np.inf).astype(np.float32)
    for p in np.flatnonzero((low != high) | (high == 0)):
        products = x[row_of[p]].astype(np.float64) * y[column_of[p]].astype(np.float64)
        high[p] = round_fraction(sum_of_doubles(products.tolist()))
    return high


def _approximate(left: Tensor, right: Tensor) -> tuple[NDArray[np.float64], Any, Any]:
    """FP64 products of left (R, K) and right (C, K) by rows, and the Euclidean norms of the rows of both."""
    m, n = left.shape[0], right.shape[0]
    head, tail = np.zeros((m, n)), np.zeros((m, n))
    squares = torch.zeros(m, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for start in range(0, left.shape[1], _DEPTH):
        pieces = [x[:, start : start + _DEPTH].to(torch.float64) for x in (left, right)]
        guarded(kernels.add_doubles, 0, m, ((pieces[0] @ pieces[1].t()).numpy(), head, tail))
        for total, piece in zip(squares, pieces, strict=True):
            total += torch.linalg.vecdot(piece, piece)
    return head + tail, squares[0].sqrt().numpy(), squares[1].sqrt().numpy()


def _block(left: Tensor, right: Tensor) -> NDArray[np.float32]:
    """FP32 of the exact products of FP32 left (R, K) and right (C, K), the second being columns of B as rows.

    A product of FP32 numbers is exact in FP64, and a sum of d of them in any order, with FMA or not, is within
    d·2^-53·Σ|a||b| of the true one. Summed over the pieces of K, Σ|a||b| is at most ‖a‖·‖b‖.
    """
    value, row_norms, column_norms = _approximate(left, right)
    out = np.empty(value.shape, np.float32)
    slack = (min(left.shape[1], _DEPTH) + 4) * 2.0**-53 * _MARGIN
    found = np.empty(1 << 12, np.int64)
    while True:
        arguments = (value, row_norms, column_norms, slack, out, found)
        count = guarded(kernels.round_or_collect, 0, out.shape[0], arguments)
        if count <= len(found):
            break
        found = np.empty(count, np.int64)
    if count:
        rows, columns = np.divmod(found[:count], out.shape[1])
        out[rows, columns] = _resolve(left, right, rows, columns, row_norms[rows] * column_norms[columns] * _MARGIN)
    return out


def _picked(x: Tensor, chosen: NDArray[np.int64]) -> Tensor:
    return x if len(chosen) == x.shape[0] else x[torch.from_numpy(chosen)]


def round_products(
    a: Tensor, b: Tensor, wide_rows: NDArray[np.bool_], wide_columns: NDArray[np.bool_], out: NDArray[np.float32]
) -> None:
    """Overwrites the elements of out (M, N) whose row or column is wide; NaN stays.

    Args:
        a, b: FP32 (M, K) and (K, N).
        wide_rows, wide_columns: flags (M,) and (N,), false for rows and columns that are not finite.
    """
    if np.isnan(out).any():  # in the row or column of a value that is not finite
        a, b = (x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for x in (a, b))
    rows, others = np.flatnonzero(wide_rows), np.flatnonzero(~wide_rows)
    for chosen, partners in ((rows, np.arange(b.shape[1])), (others, np.flatnonzero(wide_columns))):
        for i in range(0, len(chosen), _SIDE):
            for j in range(0, len(partners), _SIDE):
                some, part = chosen[i : i + _SIDE], partners[j : j + _SIDE]
                here = np.ix_(some, part)
                block = _block(_picked(a, some), _picked(b.t(), part))
                out[here] = np.where(np.isnan(out[here]), out[here], block)
