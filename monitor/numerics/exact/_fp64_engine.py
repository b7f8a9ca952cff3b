"""Matrix products by FP64 GEMMs on integer digits: right on every device with IEEE FP64, in eager PyTorch.

With q = 256·h + l and r = 256·h' + l', the sum Σ(q·r - l·l')/256 is Σ(h·r + l·h'). Within CHUNK terms every partial
sum, in any order, is an integer below 2^53, so FP64 adds it without rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monitor.numerics.exact._bits import CANONICAL_NAN, exponent_and_significand, power_of_two
from monitor.numerics.exact._resolve import round_fraction
from monitor.numerics.exact.matmul_reference import CHUNK
from monitor.numerics.exact.sums import sum_of_doubles

__all__ = ["Quantised", "correctly_rounded_product", "fp64_matmul", "quantise"]

_HALF_LARGEST = 0xFEFEFE
"""Largest 24-bit significand whose half still rounds to at most 0x7F7F7F."""


class Quantised:
    """Integers q (…, R, K) in FP64, scales s (…, R), and which rows are not finite or need the wide path."""

    __slots__ = ("broken", "q", "scale", "wide")

    def __init__(self, x: Tensor) -> None:
        """Quantises the rows of a finite or non-finite FP32 tensor (…, R, K), K ≥ 1."""
        magnitude = x.abs()
        largest = magnitude.amax(dim=-1)
        self.broken = ~(largest < torch.inf)
        largest = torch.where(self.broken, 0.0, largest)
        exponent, significand = exponent_and_significand(largest)
        scale = -exponent - torch.where(significand <= _HALF_LARGEST, 1, 2)
        self.scale = torch.where(largest == 0, 0, scale)
        clean = torch.where(self.broken.unsqueeze(-1), 0.0, x)
        self.q = torch.round(clean.to(torch.float64) * power_of_two(self.scale).unsqueeze(-1))
        size = self.q.abs()
        nonzero = clean != 0
        small = nonzero & (size * 6.0 < size.amax(dim=-1, keepdim=True))
        self.wide = 8 * small.sum(dim=-1) > 7 * nonzero.sum(dim=-1)


def quantise(x: Tensor) -> Quantised:
    """The rows of x (…, R, K) as integers."""
    return Quantised(x)


def _split(q: Tensor) -> tuple[Tensor, Tensor]:
    """(h, l) with q = 256·h + l and l in [-128, 127]."""
    high = torch.floor((q + 128.0) * (1.0 / 256.0))
    return high, q - 256.0 * high


def _integer_product(q: Tensor, r: Tensor) -> Tensor:
    """FP64 of V = Σ(h·r + l·h') for q (B, M, K) and r (B, N, K)."""
    total: Tensor | None = None
    for start in range(0, q.shape[-1], CHUNK):
        piece, other = q[..., start : start + CHUNK], r[..., start : start + CHUNK]
        high, low = _split(piece)
        left = torch.cat([high, low], dim=-1)
        right = torch.cat([other, _split(other)[0]], dim=-1)
        value = left @ right.transpose(-1, -2)
        if q.shape[-1] <= CHUNK:
            return value
        total = value.to(torch.int64) if total is None else total + value.to(torch.int64)
    assert total is not None
    return total.to(torch.float64)


def correctly_rounded_product(a: Tensor, b: Tensor) -> Tensor:
    """FP32 of the exact product of finite FP32 (B, M, K) and (B, K, N): FP64 GEMM and error bound, else exact sums.

    A dot product in FP64, in any order and with or without FMA, is within K·2^-53·Σ|a||b| ≤ K·2^-53·‖a‖·‖b‖ of the true
    one; products of FP32 numbers are exact.
    """
    left, right = a.to(torch.float64), b.to(torch.float64)
    value = left @ right
    norms = (left * left).sum(dim=-1).sqrt().unsqueeze(-1) * (right * right).sum(dim=-2).sqrt().unsqueeze(-2)
    slack = norms * ((a.shape[-1] + 2) * 2.0**-53 * 1.001)
    low, high = (value - slack).to(torch.float32), (value + slack).to(torch.float32)
    undecided = low.view(torch.int32) != high.view(torch.int32)
    result = torch.where(value == 0, 0.0, high)
    for batch, i, j in torch.nonzero(undecided).tolist():
        products = (left[batch, i] * right[batch, :, j]).tolist()
        result[batch, i, j] = round_fraction(sum_of_doubles(products))
    return result


def fp64_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product by the specification of `matmul`, for FP32 (B, M, K) and (B, K, N) with no empty dimension."""
    rows, columns = quantise(a), quantise(b.transpose(-1, -2))
    value = _integer_product(rows.q, columns.q)
    exponent = 8 - rows.scale.unsqueeze(-1) - columns.scale.unsqueeze(-2)
    result = ((value + 0.0) * power_of_two(exponent)).to(torch.float32)
    wide = rows.wide.unsqueeze(-1) | columns.wide.unsqueeze(-2)
    if bool(wide.any()):
        clean_a = torch.where(rows.broken.unsqueeze(-1), 0.0, a)
        clean_b = torch.where(columns.broken.unsqueeze(-2), 0.0, b)
        result = torch.where(wide, correctly_rounded_product(clean_a, clean_b), result)
    broken = rows.broken.unsqueeze(-1) | columns.broken.unsqueeze(-2)
    if bool(broken.any()):
        nan = torch.full((), CANONICAL_NAN, dtype=torch.int32, device=a.device).view(torch.float32)
        result = torch.where(broken, nan, result)
    return result
