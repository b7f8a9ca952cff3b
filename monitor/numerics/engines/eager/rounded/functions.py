"""Functions of the device's mathematical library in a wide format."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["FUNCTIONS", "STEEP"]

Function = Callable[[Tensor], Tensor]

_ROOT_HALF = math.sqrt(0.5)
STEEP = frozenset(("gelu", "gelu_tanh"))
"""Where the argument's own rounding is magnified, by x² or by twice the exponent: 64 times the usual bound."""


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
