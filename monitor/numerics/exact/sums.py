"""Correctly rounded sums: FP32(Σ x) of the exact sum, so that no order of additions has to be stated.

FP64 adds FP32 numbers with 29 bits to spare. In any order, with any tree and any number of threads, the FP64 sum of n
terms is within n·2^-53·Σ|x| of the true one (Higham 2002, eq. 4.4, for n·2^-53 < 0.01). Ziv's test on that interval
decides almost every element; the others are summed in integers. A zero sum is +0; a NaN, or infinities of both signs,
give 0x7FC00000.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics.engines import engine_of
from monitor.numerics.exact.operands import require_fp32
from monitor.numerics.kernels.bits import canonical

__all__ = ["mean", "scatter_rows", "sum"]


def _reduce(x: Tensor, dims: Sequence[int] | None, keepdim: bool, average: bool) -> Tensor:
    """Sum or mean over `dims`; a block of neighbouring dimensions of a contiguous tensor is summed where it lies."""
    rank = x.dim()
    listed = list(range(rank)) if not dims else list(dims)
    if any(not -max(rank, 1) <= d < max(rank, 1) for d in listed):
        raise CallerError(f"dimensions {listed} are out of range for a tensor of rank {rank}")
    chosen = sorted({d % rank for d in listed}) if rank else []
    if rank and len(chosen) != len(listed):
        raise CallerError(f"dimensions {listed} are repeated")
    kept = [d for d in range(rank) if d not in chosen]
    shape = tuple(1 if d in chosen else x.shape[d] for d in range(rank)) if keepdim else tuple(x.shape[d] for d in kept)
    count = math.prod(x.shape[d] for d in chosen)
    if count == 0:
        return canonical(torch.full(shape, torch.nan if average else 0.0, dtype=torch.float32, device=x.device))
    divisor = count if average else 1
    block = bool(chosen) and chosen[-1] - chosen[0] + 1 == len(chosen) and x.is_contiguous()
    if block:
        inner = math.prod(x.shape[chosen[-1] + 1 :])
        blocks = x.reshape(math.prod(x.shape[: chosen[0]]), count, inner)
    else:
        blocks = x.permute((*kept, *chosen)).reshape(-1, count, 1)
    if blocks.numel() == 0:
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    return engine_of(x.device).sum(blocks, divisor).reshape(shape)


def sum(x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """FP32(Σ x) over `dims` (None or empty: over all), of the exact sum.

    Args:
        x: any shape, FP32 (BF16 and FP16 are taken as the FP32 numbers they are).
        dims: dimensions to sum over.
        keepdim: keep them with length 1.

    Raises:
        CallerError: another dtype, or a dimension out of range or repeated.
        DeviceError: the device flushes subnormal numbers.
    """
    return _reduce(require_fp32(x, "sum"), dims, keepdim, average=False)


def mean(x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """FP32(Σ x / n) over `dims`, rounded once; the mean of nothing is NaN. Arguments and errors as in `sum`."""
    return _reduce(require_fp32(x, "mean"), dims, keepdim, average=True)


def _require_index(index: Tensor, size: int, what: str) -> Tensor:
    if index.dtype not in (torch.int64, torch.int32):
        raise CallerError(f"{what} needs an integer index, not {index.dtype}")
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= size):
        raise CallerError(f"{what} index out of range for {size} rows")
    return index.to(torch.int64)


def scatter_rows(rows: int, index: Tensor, source: Tensor) -> Tensor:
    """(rows, d) tensor: row i is FP32 of the exact sum of the rows of `source` (n, d) whose `index` (n,) is i.

    Raises:
        CallerError: shapes, dtypes or an index out of range.
        DeviceError: the device flushes subnormal numbers.
    """
    source = require_fp32(source, "scatter_rows")
    if source.dim() != 2 or index.shape != source.shape[:1]:
        raise CallerError(
            f"scatter_rows needs index (n,) and source (n, d), not {tuple(index.shape)}, {tuple(source.shape)}"
        )
    return engine_of(source.device).scatter_rows(rows, _require_index(index, rows, "scatter_rows"), source)
