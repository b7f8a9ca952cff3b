"""Functions of the device's mathematical library in a wide format, and their rounding chunk by chunk on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monitor.numerics.engines.cpu.rounded.tiles import Bounds, Near, Rounding, Settled, flat, settle
from monitor.numerics.kernels.scratch import scratch
from monitor.numerics.kernels.workers import run_tiles

__all__ = ["FUNCTIONS", "STEEP", "apply"]

Function = Callable[[Tensor], Tensor]

_ROOT_HALF = math.sqrt(0.5)
STEEP = frozenset(("gelu", "gelu_tanh"))
"""Where the argument's own rounding is magnified, by x² or by twice the exponent: 64 times the usual bound."""
_CHUNK = 1 << 16
_COST = 64
"""Multiplications that an element of a function is worth."""


def _gelu_exponent(x: Tensor) -> Tensor:
    """0.5·(1 + tanh y) = 1/(1 + exp(−2y))."""
    return (x + (x * x * x) * 0.044715) * (-2.0 * math.sqrt(2.0 / math.pi))


FUNCTIONS: dict[str, Function] = {
    "exp": torch.exp,
    "log": torch.log,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "sigmoid": lambda x: 1.0 / (1.0 + torch.exp(-x)),
    "rsqrt": lambda x: 1.0 / torch.sqrt(x),
    "silu": lambda x: torch.where(x < -1000.0, -0.0, x / (1.0 + torch.exp(-x))),
    "gelu": lambda x: torch.where(x < -40.0, -0.0, (x * 0.5) * torch.erfc(x * -_ROOT_HALF)),
    "gelu_tanh": lambda x: torch.where(x < -40.0, -0.0, x / (1.0 + torch.exp(_gelu_exponent(x)))),
    "sin": torch.sin,
    "cos": torch.cos,
}


def apply(function: Function, x: Tensor, rounding: Rounding) -> Settled:
    """FP32 results of ``function`` in FP64; β = rounding.relative·|result|."""
    x = x.detach().contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    if x.numel() == 0:
        return Settled(out=out, near=Near.joined(()))
    source, target = x.reshape(-1), flat(out)
    length = min(_CHUNK, x.numel())
    zeros, spans = np.zeros((1, length)), np.zeros((1, length), dtype=np.int32)
    bounds = Bounds(left=zeros[0, :1], left_spans=spans[0, :1], right=zeros, right_spans=spans, rows_per_right=1)

    def chunk(i: int) -> tuple[Any, Any, Any, Any]:
        part = source[i * _CHUNK : (i + 1) * _CHUNK]
        wide = scratch("argument", (len(part),), torch.float64).copy_(part)
        return settle(flat(function(wide)), 1, len(part), bounds, rounding, target, out_base=i * _CHUNK)

    return Settled(out=out, near=Near.joined(run_tiles(-(-x.numel() // _CHUNK), _COST * x.numel(), chunk)))
