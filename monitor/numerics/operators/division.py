"""Remainders, and quotients rounded to an integer, of floating-point numbers, as IEEE 754 and PyTorch define them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monitor.numerics.backend import Backend
from monitor.numerics.errors import UnsupportedOperator
from monitor.numerics.kernels.bits import power_of_two

__all__ = ["fmod", "quotient_towards", "remainder"]

Number = int | float | bool


def _pair(name: str, a: Tensor | Number, b: Tensor | Number) -> tuple[Tensor, Tensor] | None:
    """Both as FP32 of one shape; None where neither is floating-point."""
    kind = torch.result_type(a, b)
    if not kind.is_floating_point:
        return None
    if kind != torch.float32:
        raise UnsupportedOperator(name, f"{kind} operands; use float32")
    like = a if isinstance(a, Tensor) else b
    assert isinstance(like, Tensor)
    x, y = (
        each.to(kind) if isinstance(each, Tensor) else torch.full((), each, dtype=kind, device=like.device)
        for each in (a, b)
    )
    shape = np.broadcast_shapes(tuple(x.shape), tuple(y.shape))
    return x.expand(shape), y.expand(shape)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """(m, e) with |x| = m·2^e, m an integer below 2^24 and −149 ≤ e; of finite numbers."""
    bits = x.view(torch.int32).to(torch.int64)
    biased, fraction = (bits >> 23) & 0xFF, bits & 0x7F_FFFF
    return torch.where(biased > 0, fraction | 0x80_0000, fraction), biased.clamp(min=1) - 150


def _remainder_of_magnitudes(a: Tensor, b: Tensor) -> Tensor:
    """|a| mod |b|, which FP32 holds without error, by integers alone: 2^k mod m in nine squarings."""
    (m, e), (n, f) = _parts(a), _parts(b)
    down = (f - e).clamp(min=0)
    wide = n << down.clamp(max=30)  # beyond 24 places |b| is larger than |a|
    up = (e - f).clamp(min=0)
    power, base = torch.ones_like(m) % n, torch.full_like(m, 2) % n
    for bit in range(9):
        power = torch.where((up >> bit) & 1 == 1, power * base % n, power)
        base = base * base % n
    rest = torch.where(up > 0, m % n * power % n, m % wide)
    exponent = torch.minimum(e, f).to(torch.float64)
    return (rest.to(torch.float64) * power_of_two(exponent)).to(torch.float32)


def _fmod(a: Tensor, b: Tensor) -> Tensor:
    regular = a.isfinite() & b.isfinite() & (b != 0)
    rest = _remainder_of_magnitudes(torch.where(regular, a, 1.0), torch.where(regular, b, 1.0))
    rest = torch.copysign(rest, a)
    return torch.where(regular, rest, torch.where(a.isfinite() & b.isinf(), a, torch.nan))


def _modulo(a: Tensor, b: Tensor) -> Tensor:
    rest = _fmod(a, b)
    return torch.where((rest != 0) & (torch.signbit(rest) != torch.signbit(b)), rest + b, rest)


def _floored(a: Tensor, b: Tensor) -> Tensor:
    """PyTorch's ``div_floor_floating``: the quotient of what ``fmod`` leaves, made an integer."""
    rest = _fmod(a, b)
    quotient = torch.div(a - rest, b)
    quotient = torch.where((rest != 0) & ((b < 0) != (rest < 0)), quotient - 1.0, quotient)
    floor = torch.floor(quotient)
    floor = torch.where(quotient - floor > 0.5, floor + 1.0, floor)
    whole = torch.div(a, b)
    floor = torch.where(quotient == 0, torch.copysign(torch.zeros_like(whole), whole), floor)
    return torch.where(b == 0, whole, floor)


def _either(
    name: str, floating: Callable[[Tensor, Tensor], Tensor], whole: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    def apply(_: Backend, a: Tensor | Number, b: Tensor | Number) -> Tensor:
        pair = _pair(name, a, b)
        return whole(a, b) if pair is None else floating(*pair)

    return apply


fmod = _either("aten.fmod", _fmod, torch.fmod)
"""a − b·trunc(a/b) without error (IEEE 754's remainder towards zero)."""

remainder = _either("aten.remainder", _modulo, torch.remainder)
"""``fmod``, to which b is added where the signs differ, rounded once."""


def quotient_towards(backend: Backend, a: Any, b: Any, rounding_mode: str | None = "floor") -> Tensor:
    """a / b, rounded to an integer towards zero or down."""
    pair = _pair("aten.div with rounding_mode", a, b)
    if pair is None:
        return torch.div(a, b, rounding_mode=rounding_mode)
    if rounding_mode == "floor":
        return _floored(*pair)
    whole = torch.div(*pair)
    return torch.trunc(whole) if rounding_mode == "trunc" else whole
