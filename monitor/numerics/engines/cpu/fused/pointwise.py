"""Fused kernels of operators on each element, the same in every controlled numerics."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload

from monitor.numerics.arguments import Arguments, Direct, Keywords
from monitor.numerics.engines.cpu.fused.elementwise import (
    canonical_in_place,
    fresh,
    in_place,
    is_float32,
    is_plain,
    overlaps_partly,
)
from monitor.numerics.engines.cpu.fused.form import Fused
from monitor.numerics.kernels.bits import canonical_nan

__all__ = [
    "binary",
    "copy",
    "from_constant",
    "lerp",
    "native",
    "slope",
    "square",
    "total",
    "unary",
    "with_product",
]

Run = Callable[..., Tensor]
_EXACT_INTEGERS = 1 << 53
_LARGEST = torch.finfo(torch.float32).max


def _constant(value: Any) -> float | None:
    """A Python number as FP32 may take it, or None.

    PyTorch refuses finite numbers beyond FP32's range, and larger integers would be rounded twice.
    """
    if type(value) is float:
        return value if abs(value) <= _LARGEST or not math.isfinite(value) else None
    return float(value) if type(value) is int and abs(value) <= _EXACT_INTEGERS else None


def _is_number(value: Any) -> bool:
    return type(value) in (float, int)


def _fits(x: Tensor, other: Any) -> bool:
    """Whether plain `x` may be combined with `other` element by element and be overwritten by the result."""
    return is_plain(other) and other.shape == x.shape and not overlaps_partly(x, other)


def _run_of(func: OpOverload) -> Run:
    return in_place if func._schema.is_mutable else fresh


def _natively(func: OpOverload) -> Direct:
    """A single IEEE operation on each element, by PyTorch's own kernel; NaN results are made canonical."""

    def call(args: Arguments, kwargs: Keywords) -> Any:
        if kwargs or not all(is_float32(value) if isinstance(value, Tensor) else _is_number(value) for value in args):
            return NotImplemented
        out = func(*args)
        if is_plain(out):
            return canonical_in_place(out)
        canonical_nan(out)
        return out

    return call


def _binary(tensors: str, constant: str, run: Run, native: Direct) -> Direct:
    """x ∘ y for a tensor or a number y."""

    def call(args: Arguments, kwargs: Keywords) -> Any:
        if kwargs or len(args) != 2:
            return NotImplemented
        x, y = args
        if isinstance(y, Tensor):
            return run(tensors, x, y) if is_plain(x) and _fits(x, y) else native(args, kwargs)
        if not is_plain(x):
            return NotImplemented
        number = _constant(y)
        return NotImplemented if number is None else run(constant, x, None, None, number)

    return call


def _sum(run: Run, native: Direct) -> Direct:
    """x + alpha·y for a tensor y, x + y for a number y."""

    def call(args: Arguments, kwargs: Keywords) -> Any:
        if len(args) != 2 or len(kwargs) > 1 or (kwargs and "alpha" not in kwargs):
            return NotImplemented
        x, y = args
        alpha = _constant(kwargs["alpha"]) if kwargs else 1.0
        if alpha is None:
            return NotImplemented
        if isinstance(y, Tensor):
            if not is_plain(x) or not _fits(x, y):
                return native(args, {}) if alpha == 1.0 else NotImplemented
            return run("add", x, y) if alpha == 1.0 else run("add_scaled", x, y, None, alpha)
        number = _constant(y)
        if number is None or alpha != 1.0 or not is_plain(x):
            return NotImplemented
        return run("add_constant", x, None, None, number)

    return call


def _from_constant(args: Arguments, kwargs: Keywords) -> Any:
    """number - x."""
    if kwargs or len(args) != 2 or not is_plain(args[0]):
        return NotImplemented
    number = None if isinstance(args[1], Tensor) else _constant(args[1])
    return NotImplemented if number is None else fresh("constant_minus", args[0], None, None, number)


def _unary(name: str, run: Run, constant: float = 0.0) -> Direct:
    def call(args: Arguments, kwargs: Keywords) -> Any:
        if kwargs or len(args) != 1 or not is_plain(args[0]):
            return NotImplemented
        return run(name, args[0], None, None, constant)

    return call


def _square(run: Run) -> Direct:
    """x², the one power that is a single operation."""

    def call(args: Arguments, kwargs: Keywords) -> Any:
        if kwargs or len(args) != 2 or not _is_number(args[1]) or args[1] != 2 or not is_plain(args[0]):
            return NotImplemented
        return run("mul", args[0], args[0])

    return call


def _lerp(run: Run) -> Direct:
    def call(args: Arguments, kwargs: Keywords) -> Any:
        if kwargs or len(args) != 3:
            return NotImplemented
        start, end, weight = args
        if type(weight) is not float or _constant(weight) is None or not is_plain(start) or not _fits(start, end):
            return NotImplemented
        if abs(weight) < 0.5:
            return run("lerp_low", start, end, None, weight)
        return run("lerp_high", start, end, None, 1 - weight)

    return call


def _with_product(name: str, run: Run) -> Direct:
    """x + value·(a ∘ b)."""

    def call(args: Arguments, kwargs: Keywords) -> Any:
        if len(args) != 3 or len(kwargs) > 1 or (kwargs and "value" not in kwargs):
            return NotImplemented
        x, a, b = args
        value = _constant(kwargs["value"]) if kwargs else 1.0
        if value is None or not is_plain(x) or not _fits(x, a) or not _fits(x, b):
            return NotImplemented
        return run(name, x, a, b) if value == 1.0 else run(f"{name}_scaled", x, a, b, value)

    return call


def _slope(name: str) -> Direct:
    """Gradient of a function from the incoming gradient and the function's value."""

    def call(args: Arguments, kwargs: Keywords) -> Any:
        if kwargs or len(args) != 2 or not is_plain(args[0]) or not _fits(*args):
            return NotImplemented
        return fresh(name, *args)

    return call


def _copy(args: Arguments, kwargs: Keywords) -> Any:
    """Overwrite x by y; NaNs become canonical on the way."""
    if kwargs or not is_plain(args[0]) or not _fits(args[0], args[1]):
        return NotImplemented
    return in_place("copy", args[0], args[1])


def native(spelling: Literal["functional", "both"] = "functional") -> Fused:
    """A single IEEE operation on each element."""
    return Fused(make=lambda func, *_: _natively(func), spelling=spelling)


def binary(name: str) -> Fused:
    """x ∘ y for a tensor or a number y."""
    make = functools.partial(_binary, name, f"{name}_constant")
    return Fused(make=lambda func, *_: make(_run_of(func), _natively(func)), spelling="both")


def unary(name: str, constant: float = 0.0) -> Fused:
    """A function of each element."""
    return Fused(make=lambda func, *_: _unary(name, _run_of(func), constant), spelling="both")


def with_product(name: str) -> Fused:
    """x + value·(a ∘ b)."""
    return Fused(make=lambda func, *_: _with_product(name, _run_of(func)), spelling="both")


def slope(name: str) -> Fused:
    """Gradient of a function from the incoming gradient and the function's value."""
    return Fused(make=lambda *_: _slope(name))


total = Fused(make=lambda func, *_: _sum(_run_of(func), _natively(func)), spelling="both")
"""x + alpha·y."""
square = Fused(make=lambda func, *_: _square(_run_of(func)), spelling="both")
"""x^2."""
lerp = Fused(make=lambda func, *_: _lerp(_run_of(func)), spelling="both")
from_constant = Fused(make=lambda *_: _from_constant)
copy = Fused(make=lambda *_: _copy, spelling="in place")
