"""What the exact functions take: FP32, and half-precision numbers as the FP32 numbers that they are."""

from __future__ import annotations

import torch
from torch import Tensor

from firmware_sim.errors import CallerError

__all__ = ["operand", "require_fp32"]


def require_fp32(x: Tensor, what: str) -> Tensor:
    """`x` as FP32: BF16 and FP16 are embedded exactly, anything else is the caller's mistake."""
    return operand(x, what).to(torch.float32)


def operand(x: Tensor, what: str) -> Tensor:
    """`x`, detached; anything but FP32, BF16 and FP16 is the caller's mistake."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CallerError(f"{what} needs float32, bfloat16 or float16, not {x.dtype}")
    return x.detach()
