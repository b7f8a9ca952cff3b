"""Order-free sums by compiled kernels."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from monitor.numerics.engines.cpu.rounded import sum_kernels as _kernels
from monitor.numerics.engines.cpu.rounded.settle_kernels import POWERS
from monitor.numerics.engines.eager.rounded import sums
from monitor.numerics.kernels.arrays import array
from monitor.numerics.kernels.workers import run_pieces

__all__ = ["order_free_sum_64", "order_free_total"]


def _views(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    values = array(x.detach().contiguous())
    return values, values.view(np.int32)


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
    powers = POWERS
    if values.shape[2] == 1 and outer > 1:
        arguments = (values[:, :, 0], bits[:, :, 0], width, powers, out)
        finite = run_pieces(_kernels.column_sums, count, x.numel(), *arguments)
    else:
        finite = run_pieces(_kernels.row_sums, count, x.numel(), values, bits, width, powers, out)
    return torch.from_numpy(out).reshape(shape) if all(finite) else None


def order_free_total(x: Tensor, dims: list[int]) -> Tensor:
    """FP64 sums over ``dims``, which are kept with length 1."""
    found = order_free_sum_64(x, dims) if x.dtype == torch.float32 else None
    return sums.order_free_total(x, dims) if found is None else found
