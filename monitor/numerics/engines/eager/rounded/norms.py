"""Upper bounds of Euclidean norms that are bit-equal on every device.

Magnitudes are rounded up to integers of at most 15 bits relative to the largest one's exponent; their squares add up
exactly in FP64 in any order (n ≤ 2^23).
"""

from __future__ import annotations

import torch
from torch import Tensor

from monitor.numerics.engines.eager.rounded.rounding_rule import exponent
from monitor.numerics.kernels.bits import power_of_two

__all__ = ["norms", "quantised_squares", "root_above", "spans"]

_ROUND_UP = 1.0 + 2.0**-20
_NO_BITS = 1 << 20


def quantised_squares(x: Tensor, dims: list[int]) -> tuple[Tensor, Tensor]:
    """Squares of the rounded-up magnitudes, exact integers in FP64, and the scale of each slice over ``dims``.

    ``sqrt(sum of squares)·scale`` bounds the norm of any part of the slice. A slice that is not finite gets squares 0:
    its results are not finite either and nothing about them is ambiguous.
    """
    wide = x.abs().to(torch.float64)
    largest = wide.amax(dims, keepdim=True)
    good = largest.isfinite()
    e = exponent(torch.where(good, largest, torch.zeros_like(largest))).clamp(min=-160)
    units = (wide * power_of_two(14 - e)).ceil()
    units = torch.where(good, units, torch.zeros_like(units))
    return units * units, power_of_two(e - 14)


def root_above(total: Tensor) -> Tensor:
    """An FP64 upper bound of the root of exact integers below 2^54, equal on every device.

    Vendors' FP64 roots may be 1 ulp off, but the nearest FP32 number of a root of an FP32 number is certain (as in
    ``operators.elementwise.square_root``).
    """
    above = (total * _ROUND_UP).to(torch.float32).to(torch.float64)
    return torch.sqrt(above).to(torch.float32).to(torch.float64) * _ROUND_UP


def norms(x: Tensor, dim: int) -> Tensor:
    """Upper bounds of the norms along dimension −1 or −2, FP64, the dimension kept with length 1."""
    if x.numel() == 0:
        return x.to(torch.float64).sum(dim, keepdim=True)
    squares, scale = quantised_squares(x, [dim])
    return root_above(squares.sum(dim, keepdim=True)) * scale


def spans(x: Tensor, dims: list[int]) -> Tensor:
    """Bits from the highest set bit of the largest magnitude down to the lowest set bit of any, int64, dims kept.

    0 for a slice of zeros. What it says of a slice that is not finite means nothing.
    """
    wide = x.abs().to(torch.float64)
    if x.numel() == 0:
        return wide.sum(dims, keepdim=True).to(torch.int64)
    finite = torch.where(wide.isfinite(), wide, torch.full_like(wide, 2.0**128))
    significand = (finite.view(torch.int64) & ((1 << 52) - 1)) | (1 << 52)
    isolated = significand & -significand
    lowest = exponent(finite) - 52 + exponent(isolated.to(torch.float64))
    lowest = torch.where(finite == 0, torch.full_like(lowest, _NO_BITS), lowest)
    widths = exponent(finite.amax(dims, keepdim=True)) - lowest.amin(dims, keepdim=True) + 1
    return torch.where(finite.amax(dims, keepdim=True) == 0, torch.zeros_like(widths), widths)
