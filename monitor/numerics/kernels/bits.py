"""Bit patterns of IEEE-754 numbers, and Ziv's rounding test from FP64 to FP32.

Scales are built from exponent bits, because `torch.ldexp` and `pow(2, n)` go through `pow`, whose last bit differs
between devices.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from firmware_sim.errors import DeviceError

__all__ = [
    "CANONICAL_NAN",
    "HALF",
    "canonical",
    "canonical_nan",
    "check_subnormals",
    "exponent_and_significand",
    "power_of_two",
    "round_or_flag",
]

CANONICAL_NAN = 0x7FC00000
HALF = frozenset((torch.bfloat16, torch.float16))
"""Half-precision types."""
_PARALLEL_ELEMENTS = 1 << 17


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent in FP64 for integers in [-1022, 1023], exact."""
    return torch.bitwise_left_shift(exponent.to(torch.int64) + 1023, 52).view(torch.float64)


def exponent_and_significand(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e, m) with |x| = m·2^e and m in [2^23, 2^24) as int64 for finite FP32 x; (0, 0) for zero.

    Subnormal numbers are normalised by going through FP64, where every FP32 number is normal.
    """
    bits = x.to(torch.float64).view(torch.int64) & 0x7FFF_FFFF_FFFF_FFFF
    significand = ((bits & 0xF_FFFF_FFFF_FFFF) | (1 << 52)) >> 29
    exponent = (bits >> 52) - 1023 - 23
    zero = bits == 0
    return exponent.masked_fill(zero, 0), significand.masked_fill(zero, 0)


def canonical(x: Tensor) -> Tensor:
    """The same FP32 values with each NaN as 0x7FC00000: the payload and sign of a NaN differ between processors."""
    bits = x.view(torch.int32)
    return torch.where(x != x, torch.full_like(bits, CANONICAL_NAN), bits).view(torch.float32)


def canonical_nan(out: Any) -> None:
    """Give every NaN the bits of a positive quiet one without payload; a processor may choose sign and payload."""
    if isinstance(out, Tensor):
        if out.is_complex():
            out = torch.view_as_real(out)
        if out.dtype.is_floating_point and out.numel() and not math.isfinite(float(out.sum())):
            out.masked_fill_(out.isnan(), float("nan"))
    elif isinstance(out, list | tuple):
        for value in out:
            canonical_nan(value)


def round_or_flag(value: Tensor, epsilon: float | Tensor) -> tuple[Tensor, Tensor]:
    """(FP32 rounding of `value`, mask of the elements whose rounding is not decided).

    Law (Ziv): if the true value lies in [v(1-ε), v(1+ε)] and both ends round to the same FP32 number, rounding being
    monotone, the true value rounds to it as well. NaN counts as decided. `epsilon` is relative, at least 2^-51.
    """
    low = (value * (1.0 - epsilon)).to(torch.float32)
    high = (value * (1.0 + epsilon)).to(torch.float32)
    undecided = (low.view(torch.int32) != high.view(torch.int32)) & (value == value)
    return canonical(high), undecided


def check_subnormals(device: torch.device, elements: int = 1) -> None:
    """Refuses a processor that flushes subnormal FP32 numbers to zero, in every thread that work of this size reaches.

    Raises:
        DeviceError: a subnormal number times one came back as zero.
    """
    count = 1 if elements < _PARALLEL_ELEMENTS else _PARALLEL_ELEMENTS
    probe = torch.full((count,), 1, dtype=torch.int32, device=device).view(torch.float32)
    if not bool((probe.mul(1.0).view(torch.int32) == 1).all()):
        raise DeviceError(
            f"{device} flushes subnormal numbers to zero, so results would not be equal on other devices; "
            "call torch.set_flush_denormal(False)"
        )
