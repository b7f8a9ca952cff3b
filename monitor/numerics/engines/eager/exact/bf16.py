"""The BF16 product in eager PyTorch, for any device: int8 GEMMs where these serve, FP64 ones elsewhere.

In FP64, V is Σq·r, less Σl·l' where that is dropped: integers below 2^53, so every order of additions is exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monitor.numerics.engines.capability import int8_serves, require_fp64
from monitor.numerics.engines.eager.exact.matmul import correctly_rounded_product, padded
from monitor.numerics.engines.int8_product import int8_product
from monitor.numerics.kernels.bits import CANONICAL_NAN, check_subnormals, power_of_two
from monitor.numerics.reference import bf16 as rules
from monitor.numerics.reference.matmul import CHUNK

__all__ = ["Quantised", "apart_product", "eager_bf16_matmul", "places_apart", "sides"]

_INFINITY = 0x7F80


def places_apart(left: Tensor, right: Tensor) -> Tensor:
    """Places of K that are set apart, rising, from each side's largest magnitude bits there, INT16 (K,)."""
    if int(left.max()) >= _INFINITY or int(right.max()) >= _INFINITY:
        return torch.empty(0, dtype=torch.int64, device=left.device)
    rank = min(len(left) // rules.APART, rules.MOST_APART)
    usual = [peaks.sort(descending=True).values[rank] for peaks in (left, right)]
    large = (left - usual[0] >= rules.GAP) | (right - usual[1] >= rules.GAP)
    return large.nonzero()[:, 0]


def apart_product(a: Tensor, b: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """FP64 u (M, S) and w (S, N): what is set apart, rounded so that FP64 adds their products without error."""
    sides = []
    for x, along in ((a.index_select(1, places), 1), (b.index_select(0, places), 0)):
        wide = x.to(torch.float64)
        exponent = torch.frexp(wide.abs().amax(along, keepdim=True)).exponent.to(torch.int64)
        grid = power_of_two(exponent - rules.APART_BITS)
        sides.append(wide.mul_(1.0 / grid).round_().mul_(grid))
    return sides[0], sides[1]


def _bits(x: Tensor) -> Tensor:
    """Magnitude bits of BF16 numbers, INT16."""
    return x.view(torch.int16).bitwise_and(0x7FFF)


class Quantised:
    """Digits of the rows of BF16 (R, K) in FP32, scales 2^-s in FP64 and densities (R,), and which rows are broken."""

    __slots__ = ("broken", "density", "high", "low", "q", "scale", "wide")

    def __init__(self, x: Tensor) -> None:
        bits = _bits(x)
        largest = bits.amax(1).to(torch.int64)
        self.broken = largest >= _INFINITY
        value = x.to(torch.float64).masked_fill_(self.broken.unsqueeze(1), 0.0)
        fraction, exponent = torch.frexp(value.abs().amax(1))
        scale = torch.where(fraction == 0.0, 0, 15 - exponent.to(torch.int64) - (fraction * 256 == 255).to(torch.int64))
        self.scale = power_of_two(-scale)
        self.q = value.mul_(power_of_two(scale).unsqueeze(1)).round_()
        self.high = (self.q * (1.0 / rules.BASE)).round_()
        self.low = self.q - rules.BASE * self.high
        filled = ((bits != 0) & ~self.broken.unsqueeze(1)).sum(1)
        squares = (self.high * self.high).sum(1).to(torch.int64)
        density = torch.div(16 * squares, filled.clamp(min=1), rounding_mode="floor")
        density = torch.where(filled == 0, rules.DENSE, density)
        self.wide = density < rules.SPARSE
        self.density = torch.where(self.wide, rules.DENSE, density)


def _int8_sums(rows: Quantised, columns: Quantised) -> tuple[Tensor, Tensor]:
    """FP64 of Σ(q·r - l·l') and Σl·l'."""
    (m, k), n = rows.q.shape, columns.q.shape[0]
    above, below = ([padded(x.to(torch.int8)) for x in (side.high, side.low)] for side in (rows, columns))
    main = low = torch.zeros((), dtype=torch.float64, device=rows.q.device)
    for start in range(0, k, CHUNK):
        h, lower, right, right_low = (x[:, start : start + CHUNK] for x in (*above, *below))
        mixed = int8_product(torch.cat([h, lower], 1), torch.cat([right_low, right], 1).t())
        main = main + (int8_product(h, right.t()).to(torch.float64) * rules.BASE + mixed) * rules.BASE
        low = low + int8_product(lower, right_low.t())
    return main[:m, :n], low[:m, :n]


def _sums(rows: Quantised, columns: Quantised) -> Tensor:
    """FP64 of V (M, N)."""
    thin = rows.density.unsqueeze(1) * columns.density < rules.THIN
    if int8_serves(rows.q.device):
        main, low = _int8_sums(rows, columns)
        return main + low.masked_fill(~thin, 0.0)
    require_fp64(rows.q.device)
    whole = rows.q @ columns.q.t()
    return whole if bool(thin.all()) else whole - (rows.low @ columns.low.t()).masked_fill_(thin, 0.0)


def sides(a: Tensor, b: Tensor) -> tuple[Quantised, Quantised, Tensor]:
    """Rows of BF16 a (M, K), columns of b (K, N), and the places of K that are set apart, zeros in both."""
    places = places_apart(_bits(a).amax(0), _bits(b).amax(1))
    if len(places):
        a, b = a.index_fill(1, places, 0.0), b.index_fill(0, places, 0.0)
    return Quantised(a), Quantised(b.t()), places


def _one(a: Tensor, b: Tensor) -> Tensor:
    """FP32 (M, N) from BF16 (M, K) and (K, N)."""
    rows, columns, places = sides(a, b)
    value = _sums(rows, columns).mul_(rows.scale.unsqueeze(1)).mul_(columns.scale)
    if len(places):
        left, right = apart_product(a, b, places)
        value += left @ right
    result = value.add_(0.0).to(torch.float32)
    broken = rows.broken.unsqueeze(1) | columns.broken
    wide = (rows.wide.unsqueeze(1) | columns.wide) & ~broken
    if bool(wide.any()):
        clean = a.masked_fill(rows.broken.unsqueeze(1), 0.0), b.masked_fill(columns.broken, 0.0)
        whole = correctly_rounded_product(*(x.to(torch.float32)[None] for x in clean))[0]
        result = torch.where(wide, whole, result)
    if bool(broken.any()):
        nan = torch.full((), CANONICAL_NAN, dtype=torch.int32, device=a.device).view(torch.float32)
        result = torch.where(broken, nan, result)
    return result


def eager_bf16_matmul(a: Tensor, b: Tensor) -> Tensor:
    """The product by the specification of ``exact.bf16_matmul``, for BF16 (B, M, K) and (B, K, N), no size 0."""
    check_subnormals(a.device, a.numel() + b.numel())
    return torch.stack([_one(left, right) for left, right in zip(a, b, strict=True)])
