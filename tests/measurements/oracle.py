"""An oracle for the sweep: x87 extended precision from the C library, and closed forms where a function is flat.

It shares no formula with the kernels: exp, log, sin and their kin come from the C library's long double functions, erfc
from its Taylor series and continued fraction in that precision. What 2^-58 does not decide goes to mpmath.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firmware_sim.errors import DeviceError
from monitor.numerics.reference.resolution import resolve

__all__ = ["ODD", "ORACLES", "expected", "expected_power", "require_extended_precision"]

_SLACK = np.longdouble(2.0) ** -58
_TERMS = 110

Extended = NDArray[Any]


def require_extended_precision() -> None:
    """Raises DeviceError where long double is not the 64-bit-significand format of x87."""
    if np.finfo(np.longdouble).nmant != 63:
        raise DeviceError("the sweep's oracle needs x87 extended precision, which this processor or C library lacks")


def _pi() -> Any:
    """π in extended precision, from its FP64 head and tail."""
    return np.longdouble(np.pi) + np.longdouble(1.2246467991473532e-16)


def _erfc_series(x: Extended) -> Extended:
    """1 - erf(x) for |x| < 2.5 by erf(x) = 2/√π·e^(-x²)·Σ 2^n·x^(2n+1)/(2n+1)!!, whose terms have one sign."""
    return 1 - _erf_series(x)


def _erf_series(x: Extended) -> Extended:
    term, total, square = x.copy(), x.copy(), 2 * x * x
    for n in range(1, _TERMS):
        term = term * (square / (2 * n + 1))
        total = total + term
        if n % 8 == 0 and np.all(np.abs(term) <= np.abs(total) * 2.0**-66):
            break
    result: Extended = total * np.exp(-x * x) * (2 / np.sqrt(_pi()))
    return result


def _erfc_fraction(x: Extended) -> Extended:
    """erfc(x) for x ≥ 1 by its continued fraction, evaluated from the far end."""
    depth = 24 + int(260 / float(x.min()) ** 2)
    tail = x.copy()
    for n in range(depth, 0, -1):
        tail = x + (np.longdouble(n) / 2) / tail
    result: Extended = np.exp(-x * x) / (tail * np.sqrt(_pi()))
    return result


def _erfc(x: Extended) -> Extended:
    result = np.empty_like(x)
    far, near = x >= 1.0, np.abs(x) < 1.0
    left = x <= -1.0
    if far.any():
        result[far] = _erfc_fraction(x[far])
    if near.any():
        result[near] = _erfc_series(x[near])
    if left.any():
        result[left] = 2 - _erfc_fraction(-x[left])
    return result


def _erf(x: Extended) -> Extended:
    return np.where(
        np.abs(x) < 1.0, _erf_series(np.clip(x, -1, 1)), np.copysign(1 - _erfc(np.maximum(np.abs(x), 1)), x)
    )


def _gelu_tanh(x: Extended) -> Extended:
    root = np.sqrt(2 / _pi())
    inner = root * (x + np.longdouble(44715) / 1_000_000 * x * x * x)
    result: Extended = x / (1 + np.exp(-2 * inner))
    return result


ORACLES: dict[str, Callable[[Extended], Extended]] = {
    "exp": np.exp,
    "expm1": np.expm1,
    "log": np.log,
    "log1p": np.log1p,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "erf": _erf,
    "erfc": _erfc,
    "gelu": lambda x: x * _erfc(-x * np.sqrt(np.longdouble(0.5))) / 2,
    "gelu_tanh": _gelu_tanh,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tan": np.tan,
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "sinh": np.sinh,
    "cosh": np.cosh,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "exp2": np.exp2,
    "log2": np.log2,
    "log10": np.log10,
}

_LOST: dict[str, float] = {"gelu_tanh": 2.0**-50, "gelu": 2.0**-52, "erfc": 2.0**-52, "erf": 2.0**-54}
"""Relative error bounds of the oracle's own formulas where they exceed 2^-58."""

ODD = ("tanh", "erf", "sin", "tan", "atan", "sinh", "asinh")
"""Functions without NaN whose negative half follows from the positive one by flipping the sign bit."""


def _half_and_a_little(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x/2 plus a positive amount far below one FP32 step: only halves of odd subnormal numbers are rounded."""
    steps = (x.view(np.uint32) & np.uint32(0x7FFF_FFFF)).astype(np.int64)
    halved = np.where(x > 0, (steps + 1) >> 1, steps >> 1).astype(np.uint32) | (x.view(np.uint32) & np.uint32(1 << 31))
    return np.where(np.abs(x) < 2.0**-125, halved.view(np.float32), x * np.float32(0.5)).astype(np.float32, copy=False)


def _flat(name: str, low: float, high: float, x: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """The correctly rounded values where [low, high] (one sign, low < high as numbers) lies in a flat part, else None.

    Each rule bounds the distance to a constant or to x by less than half the gap to the next FP32 number.
    """
    size = max(abs(low), abs(high))
    least = min(abs(low), abs(high))
    if size < 2.0**-60 and name in ("silu", "gelu", "gelu_tanh"):
        return _half_and_a_little(x)
    one, zero, infinity = np.ones_like(x), np.zeros_like(x), np.full_like(x, np.inf)
    if size < 2.0**-26 and name in ("exp", "cos", "erfc"):
        return one
    if size < 2.0**-26 and name == "sigmoid":
        return np.full_like(x, 0.5)
    if size < 2.0**-26 and name in ("expm1", "log1p", "tanh", "sin"):
        return x
    if low > 104 and name in ("exp", "expm1"):
        return infinity
    if high < -104:
        constants = {"exp": 0.0, "expm1": -1.0, "sigmoid": 0.0, "tanh": -1.0, "erf": -1.0, "erfc": 2.0}
        if name in constants:
            return np.full_like(x, constants[name])
        if name in ("log", "log1p", "sqrt", "rsqrt"):
            return np.full_like(x, np.nan)
    if high < -200 and name in ("silu", "gelu", "gelu_tanh"):
        return -zero
    if low > 104:
        if name in ("sigmoid", "tanh", "erf"):
            return one
        if name == "erfc":
            return zero
        if name in ("silu", "gelu", "gelu_tanh"):
            return x
    if high < -1.0 and name == "log1p":
        return np.full_like(x, np.nan)
    if high < 0.0 and name in ("log", "sqrt", "rsqrt"):
        return np.full_like(x, np.nan)
    if least > 10.1 and name == "erfc":
        return zero if low > 0 else np.full_like(x, 2.0)
    if least > 10.1 and name in ("erf", "tanh"):
        return np.copysign(one, x)
    return None


def expected(name: str, x: NDArray[np.float32]) -> tuple[NDArray[np.float32], int]:
    """(correctly rounded values, number of them that mpmath had to decide) for finite non-zero x of one sign."""
    flat = _flat(name, float(x.min()), float(x.max()), x)
    if flat is not None:
        return flat, 0
    with np.errstate(all="ignore"):
        value = ORACLES[name](x.astype(np.longdouble))
        slack = max(_SLACK, np.longdouble(_LOST.get(name, 0.0)))
        low, high = (value * (1 - slack)).astype(np.float32), (value * (1 + slack)).astype(np.float32)
    unclear = np.flatnonzero((low != high) & (value == value))
    for i in unclear:
        high[i] = resolve(name, float(x[i]))
    return high, len(unclear)


def expected_power(x: NDArray[np.float32], y: NDArray[np.float32]) -> tuple[NDArray[np.uint32], int]:
    """(bits of the correctly rounded x**y, number that mpmath had to decide); the C library's `powl` otherwise."""
    with np.errstate(all="ignore"):
        value = np.power(x.astype(np.longdouble), y.astype(np.longdouble))
        low, high = (value * (1 - _SLACK)).astype(np.float32), (value * (1 + _SLACK)).astype(np.float32)
    unclear = np.flatnonzero((low.view(np.uint32) != high.view(np.uint32)) & (value == value))
    for i in unclear:
        high[i] = resolve("pow", float(x[i]), float(y[i]))
    return np.where(np.isnan(high), np.uint32(0x7FC0_0000), high.view(np.uint32)), len(unclear)
