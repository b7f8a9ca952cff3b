"""Functions of the device's mathematical library in a wide format."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from monitor.numerics.engines.eager.exact.functions import KERNELS

__all__ = ["FUNCTIONS", "STEEP"]

Function = Callable[[Tensor], Tensor]

_ROOT_HALF = math.sqrt(0.5)
_OWN_NAMES = """
tan asin acos atan sinh cosh asinh acosh atanh exp2 log2 log10 i0 special_i1 special_i0e
special_i1e special_erfcx erfinv
"""
_OWN = tuple(_OWN_NAMES.split())
"""Taken from the kernels of ``exact``, whose error is known: 2^-48, and 2^-45 for Bessel functions."""

STEEP = frozenset(("gelu", "gelu_tanh", *_OWN))
"""Where the argument's own rounding is magnified, or the error bound is wider: 64 times the usual bound."""


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
    **{name: KERNELS[name] for name in _OWN},
}
