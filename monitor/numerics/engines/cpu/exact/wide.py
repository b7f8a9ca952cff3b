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
from monitor.numerics.kernels.jit import guarded
from monitor.numerics.reference.resolve import rounded_sum

__all__ = ["round_flagged", "rounded_products"]

_DEPTH = 512
"""K of one FP64 product: its error bound, which grows with K, decides how many elements stay undecided."""

_MARGIN = 1.001
"""Covers the rounding of the norms, of the bound itself and of the sums' tails."""


def _rows(x: Tensor, chosen: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(y, places), y C-contiguous, with y[places] the chosen rows of x (B, R, K), counted through the batch."""
    if x.is_contiguous():
        return x.numpy().reshape(-1, x.shape[-1]), chosen
    used, places = np.unique(chosen, return_inverse=True)
    batch, row = np.divmod(used, x.shape[1])
    return x[torch.from_numpy(batch), torch.from_numpy(row)].contiguous().numpy(), places


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
    """FP64 products (B·R, C) of finite FP32 left (B, R, K) and right (B, C, K), and both sides' row norms."""
    batch, m, k = left.shape
    n = right.shape[1]
    total: Any = None
    tail: Any = None
    squares = [torch.zeros((batch, count), dtype=torch.float64) for count in (m, n)]
    for start in range(0, k, _DEPTH):
        pieces = [x[..., start : start + _DEPTH].to(torch.float64) for x in (left, right)]
        part = torch.bmm(pieces[0], pieces[1].transpose(1, 2)).numpy().reshape(batch * m, n)
        if start == 0:
            total = part
        else:
            tail = np.zeros(total.shape) if start == _DEPTH else tail
            guarded(kernels.add_doubles, 0, batch * m, (part, total, tail))
        for square, piece in zip(squares, pieces, strict=True):
            square += torch.linalg.vecdot(piece, piece)
    return total + tail if k > _DEPTH else total, squares[0].sqrt().numpy().reshape(-1), squares[1].sqrt().numpy()


def _round(left: Tensor, right: Tensor, wide_rows: Any, wide_columns: Any, out: NDArray[np.float32]) -> None:
    """Overwrites the flagged elements of out (B·R, C) with the FP32 of the exact products; NaN stays.

    A product of FP32 numbers is exact in FP64, and a sum of d of them in any order, with FMA or not, is within
    d·2^-53·Σ|a||b| of the true one. Summed over the pieces of K, Σ|a||b| is at most ‖a‖·‖b‖.

    Args:
        left, right: finite FP32 (B, R, K) and (B, C, K), the second being columns of the right factor.
        wide_rows, wide_columns: flags (B·R,) and (B, C).
    """
    value, row_norms, column_norms = _approximate(left, right)
    slack = (min(left.shape[-1], _DEPTH) + 4) * 2.0**-53 * _MARGIN
    flags = wide_rows, wide_columns, wide_columns.any(axis=1)
    found = np.empty(1 << 12, np.int64)
    while True:
        arguments = (value, row_norms, column_norms, slack, *flags, out, found)
        count = guarded(kernels.round_or_collect, 0, out.shape[0], arguments)
        if count <= len(found):
            break
        found = np.empty(count, np.int64)
    if count:
        rows, places = np.divmod(found[:count], out.shape[1])
        columns = rows // left.shape[1] * out.shape[1] + places
        scale = row_norms[rows] * column_norms.reshape(-1)[columns] * _MARGIN
        out[rows, places] = _resolve(left, right, rows, columns, scale)


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def rounded_products(left: Tensor, right: Tensor, outcome: NDArray[np.float64]) -> NDArray[np.float32]:
    """FP32 (R, C) of the exact products of FP32 left (R, K), finite, and right (C, K), columns of the right factor.

    Args:
        outcome: scale factors (C,) of the right side, NaN where it is not finite; there the result is NaN.
    """
    broken = np.isnan(outcome)
    out = np.zeros((left.shape[0], right.shape[0]), np.float32)
    out[:, broken] = np.nan
    clean = _finite(right) if broken.any() else right
    everything = np.ones(out.shape[0], np.bool_), np.zeros((1, out.shape[1]), np.bool_)
    _round(left[None], clean[None], *everything, out)
    return out


def round_flagged(
    a: Tensor, b: Tensor, wide_rows: NDArray[np.bool_], wide_columns: NDArray[np.bool_], out: NDArray[np.float32]
) -> None:
    """Overwrites the elements of out (B, M, N), C-contiguous, whose row or column is wide; NaN stays.

    Args:
        a, b: FP32 (B, M, K) and (B, K, N).
        wide_rows, wide_columns: flags (B, M) and (B, N), false for rows and columns that are not finite.
    """
    chosen = np.flatnonzero(wide_rows.any(axis=1) | wide_columns.any(axis=1))
    everything = len(chosen) == len(out)
    index = torch.from_numpy(chosen)
    left, right = (x if everything else x[index] for x in (a, b.transpose(1, 2)))
    result = out if everything else out[chosen]
    if np.isnan(result).any():
        left, right = _finite(left), _finite(right)
    _round(left, right, wide_rows[chosen].reshape(-1), wide_columns[chosen], result.reshape(-1, out.shape[2]))
    if not everything:
        out[chosen] = result
