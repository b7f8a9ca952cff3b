"""Rounding to an adaptive grid whose ambiguous elements are known: the reference, in eager PyTorch on any device.

For a computed v whose true value lies within β (Srivastava 2024, Sec. 4, with bounds in place of a searched threshold):
spacing g = max(ulp(v), 2^⌈log2 32β⌉), midpoint m = (⌊|v|/g⌋ + ½)·g. All quantities but v itself are equal on every
device, m is the only midpoint within 6β, and an element is ambiguous where ||v| − m| ≤ 4β.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from monitor.numerics.kernels.bits import power_of_two

__all__ = ["Decisions", "decide", "exponent", "place", "round_to_grid"]

_SMALLEST_EXPONENT = -126


def exponent(x: Tensor) -> Tensor:
    """⌊log2 |x|⌋ of normal FP64 values from their bits; −1023 for zero, 1024 where not finite."""
    return ((x.view(torch.int64) >> 52) & 0x7FF) - 1023


@dataclass(slots=True, kw_only=True)
class Decisions:
    """Where elements lie to their midpoint: ``steps``·``spacing`` is the magnitude, rounded to nearest even."""

    spacing: Tensor
    floor: Tensor
    up: Tensor
    distance: Tensor
    beta: Tensor

    def within(self, multiple: float) -> Tensor:
        """True where an ambiguity exists and the midpoint lies within ``multiple``·β."""
        return (self.beta > 0) & (self.distance <= multiple * self.beta)


def decide(v: Tensor, beta: Tensor, grid_bits: int) -> Decisions:
    """Grid, floor, nearest-even direction and distance to the midpoint of finite FP64 values."""
    magnitude = v.abs()
    unit = power_of_two(exponent(magnitude).clamp(min=_SMALLEST_EXPONENT) - (grid_bits - 1))
    wide = 32.0 * beta
    coarse_bits = wide.view(torch.int64)
    coarse = power_of_two((coarse_bits >> 52) - 1023 + ((coarse_bits & ((1 << 52) - 1)) != 0).to(torch.int64))
    spacing = torch.where(beta > 0, torch.maximum(unit, coarse), unit)
    steps = magnitude / spacing
    floor = steps.floor()
    rest = steps - floor
    up = (rest > 0.5) | ((rest == 0.5) & ((floor * 0.5).floor() * 2.0 != floor))
    return Decisions(spacing=spacing, floor=floor, up=up, distance=(rest - 0.5).abs() * spacing, beta=beta)


def place(v: Tensor, decisions: Decisions, up: Tensor) -> Tensor:
    """FP32 values on the grid; zero is +0, NaN is 0x7FC00000, infinities stay."""
    magnitude = (decisions.floor + up.to(torch.float64)) * decisions.spacing
    out = (torch.where(v < 0, -magnitude, magnitude) + 0.0).to(torch.float32)
    finite = v.isfinite()
    if not bool(finite.all()):
        special = torch.where(v.isnan(), torch.full_like(v, float("nan")), v).to(torch.float32)
        out = torch.where(finite, out, special)
    return out


def round_to_grid(v: Tensor, beta: Tensor, grid_bits: int, multiple: float) -> tuple[Tensor, Tensor, Tensor]:
    """Round FP64 values and list those whose midpoint lies within ``multiple``·β.

    Args:
        v: computed values, FP64, any shape.
        beta: error bounds, FP64, not negative, of a shape that broadcasts to ``v``.
        grid_bits: significand bits of the grid, 24 for FP32 and 8 for BF16.
        multiple: 4 when recording, 2 when looking for entries that must be there.

    Returns:
        FP32 values in the shape of ``v``; rising flat positions of the listed elements; True where they went up.
    """
    beta = beta.expand_as(v)
    safe = torch.where(v.isfinite(), v, torch.zeros_like(v))
    decisions = decide(safe, beta, grid_bits)
    near = (decisions.within(multiple) & v.isfinite()).reshape(-1).nonzero().reshape(-1)
    return place(v, decisions, decisions.up), near, decisions.up.reshape(-1)[near]
