"""Upper bounds of Euclidean norms that are bit-equal on every device.

Magnitudes are rounded up to integers of at most 15 bits relative to the largest one's exponent; their squares add up
exactly in FP64 in any order (n ≤ 2^23), and the root is one IEEE operation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .grid import exponent, power_of_two

__all__ = ["norms", "quantised_squares"]


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


def norms(x: Tensor, dim: int) -> Tensor:
    """Upper bounds of the norms along ``dim``, FP64, the dimension kept with length 1."""
    if x.numel() == 0:
        return x.to(torch.float64).sum(dim, keepdim=True)
    squares, scale = quantised_squares(x, [dim])
    return squares.sum(dim, keepdim=True).sqrt() * scale
