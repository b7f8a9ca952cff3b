"""Matrix products in eager PyTorch, for any device: int8 GEMMs for large products, FP64 ones for the others.

With three balanced base-256 digits q = Σ 256^i·d_i, and l = d_0, the sum V = Σ(q·r - l·l')/256 of the specification
is Σ 256^(p-1)·P_p over p = 1 … 4, where P_p adds the products of those digits whose places add up to p: four int8
products. With q = 256·h + l it is also Σ(h·r + l·h'), one FP64 product: within CHUNK terms every partial sum, in any
order, is an integer below 2^53, so FP64 adds it without rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from monitor.numerics.engines.capability import INT8_WORK, int8_serves, require_fp64
from monitor.numerics.engines.int8_product import int8_product
from monitor.numerics.kernels.bits import CANONICAL_NAN, check_subnormals, exponent_and_significand, power_of_two
from monitor.numerics.reference.matmul import CHUNK
from monitor.numerics.reference.resolution import rounded_sum

__all__ = ["correctly_rounded_product", "eager_matmul", "padded"]

_HALF_LARGEST = 0xFEFEFE
"""Largest 24-bit significand whose half still rounds to at most 0x7F7F7F."""

_GRAIN = 32
"""Sides of int8 operands are padded to multiples of it, as tensor cores want them."""


class _Quantised:
    """Integers q (…, R, K) in FP32, scales s (…, R), and which rows are not finite or need the wide path."""

    __slots__ = ("broken", "q", "scale", "wide")

    def __init__(self, x: Tensor) -> None:
        """Quantises the rows of a finite or non-finite FP32 tensor (…, R, K), K ≥ 1.

        x·2^s is a number of FP32 but where it is subnormal, and then it rounds to 0 all the same. It takes two factors,
        as 2^s alone can be too large; where s is negative, the first makes nothing subnormal that would not round to 0.
        """
        largest = x.abs().amax(dim=-1)
        self.broken = ~(largest < torch.inf)
        if bool(self.broken.any()):
            largest = torch.where(self.broken, 0.0, largest)
            x = torch.where(self.broken.unsqueeze(-1), 0.0, x)
        exponent, significand = exponent_and_significand(largest)
        scale = -exponent - torch.where(significand <= _HALF_LARGEST, 1, 2)
        self.scale = torch.where(largest == 0, 0, scale)
        first = self.scale >> 1
        factors = [power_of_two(part).to(torch.float32).unsqueeze(-1) for part in (first, self.scale - first)]
        self.q = (x * factors[0]).mul_(factors[1]).round_()
        # A sixth of the largest, rounded up: an integer is below it exactly if six times it are below the largest.
        sixth = ((self.q.abs().amax(dim=-1).to(torch.int32) + 5) // 6).clamp(min=1).to(torch.float32)
        large = (self.q.abs() >= sixth.unsqueeze(-1)).sum(dim=-1)
        self.wide = torch.count_nonzero(x, dim=-1) > 8 * large


def _split(q: Tensor) -> tuple[Tensor, Tensor]:
    """(h, l) with q = 256·h + l and l in [-128, 127]."""
    high = torch.floor((q + 128.0) * (1.0 / 256.0))
    return high, q - 256.0 * high


def _fp64_sums(q: Tensor, r: Tensor) -> Tensor:
    """FP64 of V = Σ(h·r + l·h') for FP32 q (B, M, K) and r (B, N, K)."""
    require_fp64(q.device)
    total: Tensor | None = None
    for start in range(0, q.shape[-1], CHUNK):
        piece, other = (x[..., start : start + CHUNK].to(torch.float64) for x in (q, r))
        left = torch.cat(_split(piece), dim=-1)
        right = torch.cat([other, _split(other)[0]], dim=-1)
        value = left @ right.transpose(-1, -2)
        if q.shape[-1] <= CHUNK:
            return value
        total = value.to(torch.int64) if total is None else total + value.to(torch.int64)
    assert total is not None
    return total.to(torch.float64)


def _digits(q: Tensor, order: tuple[int, int, int]) -> Tensor:
    """Digits of integers (R, K) as int8 (R, 3K): all digits of one place, then those of the next.

    After 0x8080 was added, the bytes of a number are its digits, the two lower ones with 128 added.
    """
    integers = q.to(torch.int32, memory_format=torch.contiguous_format).add_(0x8080)
    octets = integers.view(torch.int8).reshape(*q.shape, 4)
    planes = [octets[..., place] ^ -128 if place < 2 else octets[..., place] for place in order]
    return torch.cat(planes, dim=-1)


def padded(x: Tensor) -> Tensor:
    """A matrix with zeros up to multiples of _GRAIN."""
    missing = [-size % _GRAIN for size in x.shape]
    return pad(x, (0, missing[1], 0, missing[0])) if any(missing) else x


def _int8_sums(q: Tensor, r: Tensor) -> Tensor:
    """FP64 of V = Σ_p 256^(p-1)·P_p for FP32 q (M, K) and r (N, K).

    With the digits of q by falling place, [d2 d1 d0], and those of r by rising place, each P_p is one product of views.
    A sum of int32 has at most 3·CHUNK terms of at most 2^14, which is below 2^31.
    """
    (m, k), n = q.shape, r.shape[0]
    above, below = padded(q), padded(r)
    total: Tensor | None = None
    for start in range(0, k, CHUNK):
        left = _digits(above[:, start : start + CHUNK], (2, 1, 0))
        right = _digits(below[:, start : start + CHUNK], (0, 1, 2)).t()
        width = left.shape[1] // 3
        value: Tensor | None = None
        for first, last, begin in ((0, 1, 2), (0, 2, 1), (0, 3, 0), (1, 3, 0)):
            product = int8_product(
                left[:, first * width : last * width], right[begin * width : (begin + last - first) * width]
            )
            value = product.to(torch.float64) if value is None else torch.add(product, value, alpha=256)
        assert value is not None
        if k <= CHUNK:
            return value[:m, :n]
        total = value.to(torch.int64) if total is None else total + value.to(torch.int64)
    assert total is not None
    return total[:m, :n].to(torch.float64)


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
        result[batch, i, j] = rounded_sum(products)
    return result


def eager_matmul(a: Tensor, b: Tensor, *, engine: str = "auto") -> Tensor:
    """The product by the specification of `matmul`, for FP32 (B, M, K) and (B, K, N) with no empty dimension.

    Args:
        engine: "int8" or "fp64" to force one; "auto" takes int8 for large products where its known-answer test passed.
    """
    check_subnormals(a.device, a.numel() + b.numel())
    rows, columns = _Quantised(a), _Quantised(b.transpose(-1, -2))
    batch, m, k = a.shape
    is_large = batch == 1 and m * k * b.shape[-1] >= INT8_WORK
    use_int8 = engine == "int8" or (engine == "auto" and is_large and int8_serves(a.device))
    if use_int8:
        value = torch.stack([_int8_sums(q, r) for q, r in zip(rows.q, columns.q, strict=True)])
    else:
        value = _fp64_sums(rows.q, columns.q)
    scaled = (value * power_of_two(8 - rows.scale).unsqueeze(-1)).mul_(power_of_two(-columns.scale).unsqueeze(-2))
    result = scaled.add_(0.0).to(torch.float32)
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
