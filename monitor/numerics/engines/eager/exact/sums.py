"""Correctly rounded sums in FP64 on any device; what Ziv's test leaves undecided is summed in integers."""

from __future__ import annotations

import torch
from torch import Tensor

from monitor.numerics.kernels.bits import canonical, check_subnormals
from monitor.numerics.reference.resolution import rounded_sum

__all__ = ["scatter_rows", "sum_blocks", "sum_rows"]

_UNIT = 2.0**-52
"""Twice the unit roundoff of FP64: covers the rounding of the bound itself."""


def _decide(total: Tensor, magnitude: Tensor, count: Tensor | int, divisor: int) -> tuple[Tensor, Tensor]:
    """(FP32 of total/divisor, undecided mask) where |error of total| ≤ count·2^-53·magnitude.

    A sum of one term, or of nothing but zeros, has no error.
    """
    slack = magnitude * (_UNIT * count)
    if isinstance(count, Tensor):
        slack = torch.where(count <= 1, 0.0, slack)
    elif count <= 1:
        slack = torch.zeros_like(magnitude)
    low, high = total - slack, total + slack
    if divisor != 1:
        scale = torch.full_like(total, float(divisor))
        low, high = low / scale, high / scale
        low, high = low - low.abs() * _UNIT, high + high.abs() * _UNIT
    low, high = low.to(torch.float32), high.to(torch.float32)
    finite = torch.isfinite(total)
    undecided = (low.view(torch.int32) != high.view(torch.int32)) | ((slack > 0) & (slack >= total.abs()))
    undecided &= finite
    value = torch.where(finite, high.to(torch.float64), total).to(torch.float32)
    return canonical(torch.where(total == 0, 0.0, value)), undecided


def sum_rows(rows: Tensor, divisor: int) -> Tensor:
    """Sums over the last dimension of a 2-D FP32 tensor, divided by `divisor` before the one rounding; any device."""
    check_subnormals(rows.device, rows.numel())
    wide = rows.to(torch.float64)
    result, undecided = _decide(wide.sum(dim=1), wide.abs().sum(dim=1), rows.shape[1], divisor)
    positions = torch.nonzero(undecided).reshape(-1)
    if positions.numel() == 0:
        return result
    values = [rounded_sum(rows[i].tolist(), divisor) for i in positions.tolist()]
    return result.index_copy(0, positions, torch.tensor(values, dtype=torch.float32, device=rows.device))


def sum_blocks(blocks: Tensor, divisor: int) -> Tensor:
    """Sums of (O, N, I) over N, each divided by ``divisor`` before the one rounding: O·I numbers."""
    return sum_rows(blocks.transpose(1, 2).reshape(-1, blocks.shape[1]), divisor)


def scatter_rows(rows: int, slots: Tensor, source: Tensor) -> Tensor:
    """(rows, D) sums of those rows of source (n, D) whose slot (n,) each row is, one rounding for each element.

    The touched rows come first, so that FP64 accumulators exist for them alone.
    """
    check_subnormals(source.device, source.numel())
    touched, inverse = torch.unique(slots, return_inverse=True)
    wide = source.to(torch.float64)
    zeros = wide.new_zeros((len(touched), source.shape[1]))
    total, magnitude = zeros.index_add(0, inverse, wide), zeros.index_add(0, inverse, wide.abs())
    count = torch.bincount(inverse, minlength=len(touched)).to(torch.float64)
    result, undecided = _decide(total, magnitude, count.unsqueeze(1), 1)
    for row, column in torch.nonzero(undecided).tolist():
        result[row, column] = rounded_sum(source[inverse == row, column].tolist())
    return source.new_zeros((rows, source.shape[1])).index_copy(0, touched, result)
