"""Correctly rounded FP32 elementary functions, equal on every device because their value is unique.

Specification: the FP32 number nearest to the true value, ties to even, gradual underflow; limits at ±inf; NaN arguments
and invalid ones give 0x7FC00000; `pow` follows IEEE 754. silu and gelu are one function each, rounded once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics.engines.cpu.exact.functions import power_engine, unary_engine
from monitor.numerics.engines.eager.exact.functions import EPSILON, KERNELS, power_kernel
from monitor.numerics.kernels.bits import canonical, check_subnormals, round_or_flag
from monitor.numerics.reference.resolve import resolve

__all__ = ["UNARY_FUNCTIONS", "power", "unary"]

UNARY_FUNCTIONS = tuple(KERNELS)
_CHUNK = 1 << 15


def require_fp32(x: Tensor, what: str) -> Tensor:
    """`x` as FP32: BF16 and FP16 are embedded exactly, anything else is the caller's mistake."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return x.detach().to(torch.float32)
    if x.dtype != torch.float32:
        raise CallerError(f"{what} needs float32, bfloat16 or float16, not {x.dtype}")
    return x.detach()


def resolve_elements(name: str, result: Tensor, undecided: Tensor, *arguments: Tensor) -> Tensor:
    """`result` (1-D FP32) with the elements marked in `undecided` rounded correctly from their arguments (1-D FP64)."""
    positions = torch.nonzero(undecided).reshape(-1)
    if positions.numel() == 0:
        return result
    columns = [argument[positions].tolist() for argument in arguments]
    values = [resolve(name, *row) for row in zip(*columns, strict=True)]
    return result.index_copy(0, positions, torch.tensor(values, dtype=torch.float32, device=result.device))


def unary_reference(name: str, x: Tensor) -> Tensor:
    """The specification of `unary` in eager PyTorch on any device, in pieces that stay in a processor's cache."""
    check_subnormals(x.device, x.numel())
    flat = x.reshape(-1)
    pieces = []
    size = _CHUNK if x.device.type == "cpu" else max(flat.numel(), 1)
    for start in range(0, flat.numel(), size):
        argument = flat[start : start + size].to(torch.float64)
        result, undecided = round_or_flag(KERNELS[name](argument), EPSILON[name])
        pieces.append(resolve_elements(name, result, undecided, argument))
    return torch.cat(pieces).reshape(x.shape) if pieces else torch.empty_like(x)


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
    if name not in KERNELS:
        raise CallerError(f"no exact function {name!r}; there are {', '.join(UNARY_FUNCTIONS)}")
    if x.device.type == "cpu":
        return unary_engine(name, x, unary_reference)
    return unary_reference(name, x)


def power_reference(x: Tensor, y: Tensor) -> Tensor:
    """The specification of `power` on FP32 tensors of one shape."""
    flat_x, flat_y = x.reshape(-1).to(torch.float64), y.reshape(-1).to(torch.float64)
    result, undecided = round_or_flag(power_kernel(flat_x, flat_y), EPSILON["pow"])
    return resolve_elements("pow", result, undecided, flat_x, flat_y).reshape(x.shape)


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
    if x.device.type == "cpu":
        return power_engine(x, torch.tensor([y], dtype=torch.float32), power_reference)
    return power_reference(x, torch.full_like(x, y))


def _power_tensor(x: Tensor, y: Tensor) -> Tensor:
    if x.device != y.device:
        raise CallerError(f"pow operands lie on {x.device} and {y.device}")
    try:
        shape = np.broadcast_shapes(tuple(x.shape), tuple(y.shape))
    except ValueError:
        raise CallerError(f"pow can't broadcast {tuple(x.shape)} with {tuple(y.shape)}") from None
    x, y = x.expand(shape), y.expand(shape)
    if x.device.type == "cpu":
        return power_engine(x, y, power_reference)
    check_subnormals(x.device, x.numel())
    return power_reference(x, y)
