"""Sums in FP64 whose every partial sum is exact, so that no order, thread count or device can change a bit.

Addends are first rounded to multiples of a quantum q with n·max|x| < 2^53·q; then all partial sums are integers
times q below 2^53 and FP64 addition is associative on them. Up to n·q/2 ≤ n²·2^-53·max|x| is lost, typically
√n·n·2^-54·max|x|; addends within 2^(29−log2 n) of the largest lose nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monitor.numerics.engines import engine_of
from monitor.numerics.engines.eager.rounded.sums import quantised

__all__ = ["order_free_cumsum", "order_free_scatter", "order_free_sum"]


def _settle(total: Tensor) -> Tensor:
    out = total.to(torch.float32) + 0.0
    return torch.where(out.isnan(), torch.full_like(out, float("nan")), out)


def order_free_sum(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """Sum of FP32 values over ``dims``, FP32, rounded once; empty sums are +0."""
    if x.numel() == 0:
        return x.sum(dims, keepdim=keepdim)
    total = engine_of(x.device).order_free_total(x, dims)
    return _settle(total if keepdim else total.squeeze(dims))


def order_free_cumsum(x: Tensor, dim: int) -> Tensor:
    """Running sums of FP32 values along ``dim``, each rounded once."""
    if x.numel() == 0 or x.dim() == 0:
        return x + 0.0
    largest = x.abs().amax(dim, keepdim=True).to(torch.float64)
    return _settle(quantised(x.to(torch.float64), largest, x.shape[dim]).cumsum(dim))


def order_free_scatter(rows: int, index: Tensor, source: Tensor) -> Tensor:
    """Row i of the result is the sum of the rows of ``source`` whose index is i, scaled for each output row.

    Args:
        rows: number of rows of the result.
        index: int64, shape (n,), values in [0, rows).
        source: FP32, shape (n, d).

    Returns:
        FP32, shape (rows, d).
    """
    width = source.shape[1]
    if source.numel() == 0:
        return torch.zeros((rows, width), dtype=torch.float32, device=source.device)
    by_row = source.abs().amax(1).to(torch.float64)
    largest = torch.zeros(rows, dtype=torch.float64, device=source.device)
    largest = largest.scatter_reduce(0, index, by_row, "amax", include_self=True)
    terms = int(torch.bincount(index, minlength=rows).max())
    exact = quantised(source.to(torch.float64), largest[index][:, None], terms)
    total = torch.zeros((rows, width), dtype=torch.float64, device=source.device)
    return _settle(total.index_add_(0, index, exact))
