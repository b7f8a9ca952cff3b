"""Orthogonal polynomials by their recurrences in n (Abramowitz & Stegun 1964, table 22.7), in FP64, rounded once.

Each operation has its place in the formula, so that the bits are the same on every device. Errors of the recurrences
grow slowly with n, and only where a value is much smaller than those before it do they reach FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from monitor.numerics.backend import Backend
from monitor.numerics.errors import UnsupportedOperator
from monitor.numerics.operators.row import Code

__all__ = ["POLYNOMIALS"]

_MOST = 1024
Next = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Of x, the values at k and k − 1, and k: the value at k + 1."""


def _polynomial(name: str, first: Callable[[Tensor], Tensor], following: Next) -> Code:
    """Values of x for the whole part of n: 1 for 0, ``first`` of x for 1, and 0 below.

    Raises:
        UnsupportedOperator: n is not finite, or large.
    """

    def apply(_: Backend, x: Any, n: Any) -> Tensor:
        device = next((each.device for each in (x, n) if isinstance(each, Tensor)), None)
        x, n = (torch.as_tensor(each, dtype=torch.float32, device=device) for each in (x, n))
        if not bool((n.abs() <= _MOST).all()):
            raise UnsupportedOperator(f"aten.{name}", f"degrees beyond {_MOST}; take lower ones")
        degree = n.to(torch.int64)
        wide = torch.where(degree < 0, 0.0, x.to(torch.float64))
        before, value = torch.ones_like(wide), first(wide)
        out = torch.where(degree == 0, before, torch.zeros_like(wide))
        for k in range(1, int(degree.max()) + 1 if degree.numel() else 1):
            out = torch.where(degree == k, value, out)
            before, value = value, following(wide, value, before, k)
        return out.to(torch.float32)

    return apply


def _chebyshev(x: Tensor, now: Tensor, before: Tensor, _: int) -> Tensor:
    return 2.0 * x * now - before


def _shifted(first: Callable[[Tensor], Tensor]) -> tuple[Callable[[Tensor], Tensor], Next]:
    """Chebyshev polynomials of 2x − 1."""
    return lambda x: first(2.0 * x - 1.0), lambda x, *rest: _chebyshev(2.0 * x - 1.0, *rest)


_CHEBYSHEV: Mapping[str, Callable[[Tensor], Tensor]] = {
    "t": lambda x: x,
    "u": lambda x: 2.0 * x,
    "v": lambda x: 2.0 * x - 1.0,
    "w": lambda x: 2.0 * x + 1.0,
}
_RULES: Mapping[str, tuple[Callable[[Tensor], Tensor], Next]] = {
    **{f"chebyshev_polynomial_{kind}": (first, _chebyshev) for kind, first in _CHEBYSHEV.items()},
    **{f"shifted_chebyshev_polynomial_{kind}": _shifted(first) for kind, first in _CHEBYSHEV.items()},
    "hermite_polynomial_h": (lambda x: 2.0 * x, lambda x, now, before, k: 2.0 * (x * now - k * before)),
    "hermite_polynomial_he": (lambda x: x, lambda x, now, before, k: x * now - k * before),
    "laguerre_polynomial_l": (
        lambda x: 1.0 - x,
        lambda x, now, before, k: torch.div((2 * k + 1 - x) * now - k * before, k + 1.0),
    ),
    "legendre_polynomial_p": (
        lambda x: x,
        lambda x, now, before, k: torch.div((2 * k + 1) * x * now - k * before, k + 1.0),
    ),
}
POLYNOMIALS: Mapping[str, Code] = {
    f"special_{name}": _polynomial(f"special_{name}", *rule) for name, rule in _RULES.items()
}
"""Code by operator."""
