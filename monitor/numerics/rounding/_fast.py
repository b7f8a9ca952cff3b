"""CPU calls of the compiled kernels, each with the meaning of its reference in ``grid``, ``norms`` and ``sums``."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from monitor.numerics.exact._jit import run_pieces

from . import _kernels
from .bounds import ProductBound, RelativeBound

__all__ = ["column_norm_parts", "order_free_sum_64", "row_norm_parts", "settle"]

_NO_BOUND = np.zeros(1)


def _views(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    values = x.detach().contiguous().numpy()
    return values, values.view(np.int32)


def settle(
    v: Tensor, bound: ProductBound | RelativeBound, grid_bits: int, multiple: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``grid.round_to_grid`` with the bound's β for contiguous FP64 ``v``."""
    if isinstance(bound, ProductBound):
        rows = v.reshape(-1, bound.right.shape[1]).numpy()
        left, right = bound.left.contiguous().numpy(), bound.right.contiguous().numpy()
        return _run(v, rows, left, right, bound.rows_per_right, 0.0, multiple, grid_bits)
    rows = v.reshape(-1, max(v.shape[-1], 1) if v.dim() else 1).numpy()
    return _run(v, rows, _NO_BOUND, _NO_BOUND[None], max(len(rows), 1), bound.factor, multiple, grid_bits)


def _run(
    v: Tensor,
    rows: np.ndarray,
    left: np.ndarray,
    right: np.ndarray,
    rows_per_right: int,
    relative: float,
    multiple: float,
    grid_bits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty(v.shape, dtype=torch.float32)
    if v.numel() == 0:
        return out, torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.bool)
    pieces = run_pieces(
        _kernels.settle_rows,
        len(rows),
        v.numel(),
        rows,
        rows.view(np.int64),
        left,
        right,
        rows_per_right,
        relative,
        multiple,
        grid_bits,
        _kernels.powers_of_two(),
        out.reshape(rows.shape).numpy(),
    )
    positions = np.concatenate([piece[0] for piece in pieces])
    upward = np.concatenate([piece[1] for piece in pieces])
    return out, torch.from_numpy(positions), torch.from_numpy(upward)


def row_norm_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of squares and scale for each row of FP32 ``x`` (…, k), shape (…, 1)."""
    rows = x.reshape(-1, x.shape[-1])
    values, bits = _views(rows)
    totals, scales = np.empty(len(values)), np.empty(len(values))
    run_pieces(_kernels.row_norms, len(values), x.numel(), values, bits, _kernels.powers_of_two(), totals, scales)
    shape = (*x.shape[:-1], 1)
    return torch.from_numpy(totals).reshape(shape), torch.from_numpy(scales).reshape(shape)


def column_norm_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of squares and scale for each column of FP32 ``x`` (…, k, n), shape (…, 1, n)."""
    if x.mT.is_contiguous():
        totals, scales = row_norm_parts(x.mT)
        return totals.mT, scales.mT
    values, bits = _views(x.reshape(-1, *x.shape[-2:]))
    sums, scale = np.zeros((len(values), x.shape[-1])), np.empty((len(values), x.shape[-1]))
    run_pieces(_kernels.column_norms, len(values), x.numel(), values, bits, _kernels.powers_of_two(), sums, scale)
    shape = (*x.shape[:-2], 1, x.shape[-1])
    return torch.from_numpy(sums).reshape(shape), torch.from_numpy(scale).reshape(shape)


def order_free_sum_64(x: Tensor, dims: list[int]) -> Tensor | None:
    """FP64 sums over ``dims`` (rising, at least one) with those dimensions kept, or None where x is not finite."""
    kept = [d for d in range(x.dim()) if d not in dims]
    shape = [1 if d in dims else x.shape[d] for d in range(x.dim())]
    terms = math.prod(x.shape[d] for d in dims)
    width = max((terms - 1).bit_length(), 2)
    if kept and kept != list(range(kept[0], kept[-1] + 1)):
        x = x.permute(*kept, *dims)
        kept, dims = list(range(len(kept))), list(range(len(kept), x.dim()))
    first, last = (kept[0], kept[-1] + 1) if kept else (0, 0)
    outer, count = math.prod(x.shape[:first]), math.prod(x.shape[first:last])
    values, bits = _views(x.reshape(outer, count, -1))
    out = np.empty(count)
    powers = _kernels.powers_of_two()
    if values.shape[2] == 1 and outer > 1:
        arguments = (values[:, :, 0], bits[:, :, 0], width, powers, out)
        finite = run_pieces(_kernels.column_sums, count, x.numel(), *arguments)
    else:
        finite = run_pieces(_kernels.row_sums, count, x.numel(), values, bits, width, powers, out)
    return torch.from_numpy(out).reshape(shape) if all(finite) else None
