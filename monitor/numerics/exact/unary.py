"""Correctly rounded FP32 elementary functions, equal on every device because their value is unique.

Specification: the FP32 number nearest to the true value, ties to even, gradual underflow; limits at ±inf; NaN arguments
and invalid ones give 0x7FC00000; `pow` follows IEEE 754. silu and gelu are one function each, rounded once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics.engines import engine_of
from monitor.numerics.engines.eager.exact.functions import KERNELS
from monitor.numerics.exact.operands import require_fp32
from monitor.numerics.kernels.bits import canonical, check_subnormals

__all__ = ["UNARY_FUNCTIONS", "power", "unary"]

UNARY_FUNCTIONS = tuple(KERNELS)


def unary(name: str, x: Tensor) -> Tensor:
    """A correctly rounded FP32 function, element by element.

    Args:
        name: one of UNARY_FUNCTIONS.
        x: any shape and strides, FP32 (BF16 and FP16 are taken as the FP32 numbers they are).

    Returns:
        FP32 tensor of the same shape.

    Raises:
        CallerError: unknown function or dtype.
        DeviceError: the device flushes subnormal numbers.
    """
    x = require_fp32(x, name)
    if name not in UNARY_FUNCTIONS:
        raise CallerError(f"no exact function {name!r}; there are {', '.join(UNARY_FUNCTIONS)}")
    return engine_of(x.device).unary(name, x)


def power(x: Tensor, y: Tensor | float) -> Tensor:
    """Correctly rounded x**y with the special cases of IEEE 754 `pow`.

    Args:
        x: FP32 tensor.
        y: FP32 tensor that broadcasts with `x`, or a constant, which is first rounded to FP32.

    Raises:
        CallerError: another dtype.
        DeviceError: the device flushes subnormal numbers.
    """
    x = require_fp32(x, "pow")
    if isinstance(y, Tensor):
        return _power_tensor(x, require_fp32(y, "pow"))
    check_subnormals(x.device, x.numel())
    if y == 2.0:
        return canonical(x * x)
    if y == -1.0:
        return canonical(torch.ones_like(x) / x)
    return engine_of(x.device).power(x, torch.tensor([y], dtype=torch.float32, device=x.device))


def _power_tensor(x: Tensor, y: Tensor) -> Tensor:
    if x.device != y.device:
        raise CallerError(f"pow operands lie on {x.device} and {y.device}")
    try:
        shape = np.broadcast_shapes(tuple(x.shape), tuple(y.shape))
    except ValueError:
        raise CallerError(f"pow can't broadcast {tuple(x.shape)} with {tuple(y.shape)}") from None
    return engine_of(x.device).power(x.expand(shape), y.expand(shape))
