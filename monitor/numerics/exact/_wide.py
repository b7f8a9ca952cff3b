"""The wide path on the CPU: correctly rounded dot products for rows and columns that three digits would starve."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.numerics.exact import _matmul_kernels as kernels
from monitor.numerics.exact._jit import run_pieces
from monitor.numerics.exact._resolve import round_fraction
from monitor.numerics.exact.sums import sum_of_doubles

__all__ = ["round_products"]

_COLUMNS = 4096
_MARGIN = 1.001
"""Covers the rounding of the norms and of the bound itself."""


def _norms(x: Tensor) -> NDArray[np.float64]:
    """Euclidean norms of the rows (R, K) of an FP64 tensor."""
    norms: NDArray[np.float64] = np.sqrt(torch.linalg.vecdot(x, x).numpy())
    return norms


def _resolve(
    left: NDArray[np.float32],
    right: NDArray[np.float32],
    rows: NDArray[np.int64],
    columns: NDArray[np.int64],
    scale: Any,
) -> NDArray[np.float32]:
    """FP32 of the exact dot products of left[rows] and right[columns]; `scale` bounds Σ|a·b| of each."""
    count, k = len(rows), left.shape[1]
    head, rest = np.empty(count), np.empty(count)
    run_pieces(kernels.dot_products, count, count * k, left, right, rows, columns, head, rest)
    slack = scale * ((k + 1.0) ** 2 * 2.0**-104)
    low = np.nextafter(head + (rest - slack), -np.inf).astype(np.float32)
    high: NDArray[np.float32] = np.nextafter(head + (rest + slack), np.inf).astype(np.float32)
    for p in np.flatnonzero((low != high) | (high == 0)):
        products = left[rows[p]].astype(np.float64) * right[columns[p]].astype(np.float64)
        high[p] = round_fraction(sum_of_doubles(products.tolist()))
    return high


def _block(left: Tensor, right: Tensor) -> NDArray[np.float32]:
    """FP32 of the exact products of finite FP32 left (R, K) and right (C, K), the second being columns of B as rows."""
    wide_left, wide_right = left.to(torch.float64), right.to(torch.float64)
    value = wide_left @ wide_right.t()
    row_norms, column_norms = _norms(wide_left), _norms(wide_right)
    k = left.shape[1]
    out = np.empty(value.shape, np.float32)
    slack = (k + 2) * 2.0**-53 * _MARGIN
    found = np.empty(1 << 12, np.int64)
    while True:
        arguments = (value.numpy(), row_norms, column_norms, slack, out, found)
        count = kernels.round_or_collect(0, out.shape[0], *arguments)
        if count <= len(found):
            break
        found = np.empty(count, np.int64)
    if count:
        rows, columns = np.divmod(found[:count], out.shape[1])
        scale = row_norms[rows] * column_norms[columns] * _MARGIN
        out[rows, columns] = _resolve(left.numpy(), right.numpy(), rows, columns, scale)
    return out


def round_products(
    a: Tensor, b: Tensor, wide_rows: NDArray[np.bool_], wide_columns: NDArray[np.bool_], out: Tensor
) -> None:
    """Overwrites the elements of out (B, M, N) whose row or column is wide; those with a NaN scale keep their NaN.

    Args:
        a, b: FP32 (B, M, K) and (B, K, N).
        wide_rows, wide_columns: flags (B, M) and (B, N), false for rows and columns that are not finite.
    """
    result = out.numpy()
    for batch in range(out.shape[0]):
        rows, columns = np.flatnonzero(wide_rows[batch]), np.flatnonzero(wide_columns[batch])
        others = np.flatnonzero(~wide_rows[batch])
        matrix, turned = a[batch], b[batch].t()
        for chosen, partners in ((rows, np.arange(out.shape[2])), (others, columns)):
            if not len(chosen):
                continue
            left = matrix[torch.from_numpy(chosen)].contiguous()
            for start in range(0, len(partners), _COLUMNS):
                part = partners[start : start + _COLUMNS]
                right = turned[torch.from_numpy(part)].contiguous()
                left, right = (torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in (left, right))
                view = result[batch]
                block = _block(left, right)
                view[np.ix_(chosen, part)] = np.where(
                    np.isnan(view[np.ix_(chosen, part)]), view[np.ix_(chosen, part)], block
                )
    return
