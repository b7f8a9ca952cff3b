"""Compiled operators on each element: one rounding after every operation, NaN results as 0x7FC00000.

Numba does not contract a product and a sum to FMA, so that a kernel gives the bits of the separate operators without
their intermediate tensors. IEEE 754 fixes FP32 +, -, ×, ÷ and √, and LLVM takes each from the processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from monitor.numerics.kernels.jit import compiled, inlined
from monitor.numerics.kernels.pointers import floats

__all__ = ["FRESH", "IN_PLACE", "OPERATORS", "add_to_rows", "canonicalise"]

_NAN = np.float32(np.nan)
_ONE, _HALF = np.float32(1.0), np.float32(0.5)
_CUBIC = np.float32(0.044715)
_CUBIC_SLOPE = np.float32(3.0 * 0.044715)
_ROOT_2_OVER_PI = np.float32(math.sqrt(2.0 / math.pi))

OPERATORS = (
    *("add", "add_scaled", "add_constant", "sub", "sub_constant", "constant_minus"),
    *("mul", "mul_constant", "div", "div_constant", "constant_over", "sqrt"),
    *("lerp_low", "lerp_high", "addcmul", "addcmul_scaled", "addcdiv", "addcdiv_scaled"),
    *("sigmoid_slope", "tanh_slope", "silu_slope", "gelu_tanh_inner", "gelu_tanh_slope"),
    *("scaled_square", "mul_scaled", "gelu_slope", "copy"),
)
"""Each takes x and, as it needs them, tensors a and b and a constant c, which is first rounded to FP32."""


@inlined
def _value(which: Any, x: Any, a: Any, b: Any, c: Any) -> Any:
    """Operator number `which` of OPERATORS; the number is a constant of each kernel."""
    if which == 0:
        return x + a
    if which == 1:
        return x + a * c
    if which == 2:
        return x + c
    if which == 3:
        return x - a
    if which == 4:
        return x - c
    if which == 5:
        return c - x
    if which == 6:
        return x * a
    if which == 7:
        return x * c
    if which == 8:
        return x / a
    if which == 9:
        return x / c
    if which == 10:
        return c / x
    if which == 11:
        return np.sqrt(x)
    if which == 12:
        return x + (a - x) * c
    if which == 13:
        return a - (a - x) * c
    if which == 14:
        return x + a * b
    if which == 15:
        return x + (a * b) * c
    if which == 16:
        return x + a / b
    if which == 17:
        return x + (a / b) * c
    if which == 18:
        # x is the gradient and a the function's value.
        return x * ((_ONE - a) * a)
    if which == 19:
        return x * ((_ONE - a) * (_ONE + a))
    if which == 20:
        # b is σ(a).
        return x * (b * (a * (_ONE - b) + _ONE))
    if which == 21:
        return (x + (x * x * x) * _CUBIC) * _ROOT_2_OVER_PI
    if which == 22:
        # b is the tanh of operator 21 of a.
        slope = ((a * a) * _CUBIC_SLOPE + _ONE) * _ROOT_2_OVER_PI
        return x * ((b + _ONE) * _HALF + ((a * _HALF) * (_ONE - b * b)) * slope)
    if which == 23:
        return (x * x) * c
    if which == 24:
        return x * (a * c)
    if which == 25:
        # x is erfc(-y/√2), a is y times its density and b the gradient.
        return b * (x * _HALF + a)
    return a


def _kernel(which: int, in_place: bool) -> Any:
    def kernel(begin: Any, end: Any, x_at: Any, a_at: Any, b_at: Any, c: Any, out_at: Any) -> None:
        skipped, count = 4 * begin, end - begin
        x, a, b = floats(x_at + skipped, count), floats(a_at + skipped, count), floats(b_at + skipped, count)
        constant = np.float32(c)
        # One array read and written, not two that may overlap: LLVM vectorises this without a check.
        out = x if in_place else floats(out_at + skipped, count)
        for i in range(count):
            value = _value(which, x[i], a[i], b[i], constant)
            out[i] = value if value == value else _NAN

    return compiled(kernel)


IN_PLACE: dict[str, Callable[..., Any]] = {name: _kernel(which, True) for which, name in enumerate(OPERATORS)}
"""kernel(begin, end, x, a, b, c, unused): x is overwritten. Tensors are addresses, 0 where the operator takes none."""

FRESH: dict[str, Callable[..., Any]] = {name: _kernel(which, False) for which, name in enumerate(OPERATORS)}
"""kernel(begin, end, x, a, b, c, out): out is no operand."""


@compiled
def add_to_rows(begin: Any, end: Any, x_at: Any, row_at: Any, width: Any) -> None:
    """Add a row (width,) to each row of x (…, width) in [begin, end)."""
    x, row = floats(x_at, (end, width)), floats(row_at, width)
    for i in range(begin, end):
        for j in range(width):
            value = x[i, j] + row[j]
            x[i, j] = value if value == value else _NAN


@compiled
def canonicalise(begin: Any, end: Any, x_at: Any) -> None:
    """Give each NaN among the elements [begin, end) of x the bits 0x7FC00000; memory without one is read only."""
    count = end - begin
    x = floats(x_at + 4 * begin, count)
    found = 0
    for i in range(count):
        found += x[i] != x[i]
    if found:
        for i in range(count):
            if x[i] != x[i]:
                x[i] = _NAN
