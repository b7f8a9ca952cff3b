"""Functions of the mathematical library in FP64, rounded chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from monitor.numerics.engines.cpu.rounded.tiles import Bounds, flat, settle
from monitor.numerics.engines.results import Near, Piece, Rounding, Settled
from monitor.numerics.kernels.scratch import scratch
from monitor.numerics.kernels.workers import run_tiles

__all__ = ["apply"]

_CHUNK = 1 << 16
_COST = 64
"""Multiplications that an element of a function is worth."""


def apply(function: Callable[[Tensor], Tensor], x: Tensor, rounding: Rounding) -> Settled:
    """FP32 results of ``function`` in FP64; β = rounding.relative·|result|."""
    x = x.detach().contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    if x.numel() == 0:
        return Settled(out=out, near=Near.joined(()))
    source, target = x.reshape(-1), flat(out)
    length = min(_CHUNK, x.numel())
    zeros, spans = np.zeros((1, length)), np.zeros((1, length), dtype=np.int32)
    bounds = Bounds(left=zeros[0, :1], left_spans=spans[0, :1], right=zeros, right_spans=spans, rows_per_right=1)

    def chunk(i: int) -> Piece:
        part = source[i * _CHUNK : (i + 1) * _CHUNK]
        wide = scratch("argument", (len(part),), torch.float64).copy_(part)
        return settle(flat(function(wide)), 1, len(part), bounds, rounding, target, out_base=i * _CHUNK)

    return Settled(out=out, near=Near.joined(run_tiles(-(-x.numel() // _CHUNK), _COST * x.numel(), chunk)))
