"""Correct rounding of the rare elements that FP64 leaves undecided, with integers and mpmath.

Ziv's loop: evaluate with a precision of p bits, round both ends of the error interval, double p until they agree.
It ends for every transcendental value; the algebraic cases that can hit a rounding boundary exactly are decided by
integer arithmetic first.
"""

from __future__ import annotations

import math
import struct
import threading
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import lru_cache, partial
from typing import Any

import mpmath

from firmware_sim.errors import DeviceError

__all__ = ["FUNCTIONS", "MP", "POLYGAMMA_ORDERS", "resolve", "round_fraction", "rounded_sum"]

_FIRST_PRECISION = 120
_LAST_PRECISION = 4000
_LOST_BITS = 20

MP: Any = mpmath.MPContext()
"""Functions with a precision of this module: mpmath's own precision belongs to the whole process."""
_MP_LOCK = threading.RLock()
"""Held while the precision is set: all threads share it."""

POLYGAMMA_ORDERS = range(1, 7)
"""Derivatives of ψ that have a function."""


def round_fraction(value: Fraction) -> float:
    """The FP32 number nearest to a rational, ties to even, as a Python float; infinity from 2^128(1 - 2^-25) on."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    step = Fraction(2) ** max(exponent - 23, -149)
    rounded = round(magnitude / step) * step
    result = float("inf") if rounded >= Fraction(2) ** 128 else float(rounded)
    return result if value > 0 else -result


def _sum_of_doubles(values: Iterable[float]) -> Fraction:
    """Exact sum of finite floats: what `math.fsum` rounds away is summed again until nothing is left."""
    parts = list(values)
    total = Fraction(0)
    while True:
        rounded = math.fsum(parts)
        if rounded == 0.0:
            return total
        total += Fraction(rounded)
        parts.append(-rounded)


def rounded_sum(values: Iterable[float], divisor: int = 1) -> float:
    """The FP32 number nearest to the exact sum of finite floats, divided by a whole number."""
    return round_fraction(_sum_of_doubles(values) / divisor)


def _as_fraction(value: Any) -> Fraction:
    sign, mantissa, exponent, _ = value._mpf_
    fraction = Fraction(int(mantissa)) * Fraction(2) ** int(exponent)
    return -fraction if sign else fraction


def _power_tie(base: Fraction, exponent: Fraction) -> Fraction | None:
    """base**exponent if it is rational, else None, for a positive base and a dyadic exponent.

    A rational power needs a base whose odd part is a perfect 2^j-th power; below 2^24 that means j ≤ 3, or odd part 1.
    """
    root = exponent.denominator
    numerator, denominator = base.numerator, base.denominator
    while root > 1:
        numerator_root, denominator_root = _exact_root(numerator), _exact_root(denominator)
        if numerator_root is None or denominator_root is None:
            return None
        numerator, denominator, root = numerator_root, denominator_root, root // 2
    if abs(exponent.numerator) > 4096:
        return None
    return Fraction(numerator, denominator) ** exponent.numerator


def _exact_root(value: int) -> int | None:
    root = int(mpmath.libmp.isqrt_fast(value)) if value > 1 else value
    return root if root * root == value else None


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + MP.exp(-x))


def _gelu(x: Any) -> Any:
    return x * MP.erfc(-x / MP.sqrt(2)) / 2


def _gelu_tanh(x: Any) -> Any:
    inner = MP.sqrt(2 / MP.pi) * (x + MP.mpf(44715) / 1_000_000 * x**3)
    return x * _sigmoid(2 * inner)


def _log_gamma(x: Any) -> Any:
    """log |Γ(x)|, by Γ(x)·Γ(1 − x) = π/sin πx on the left."""
    return MP.loggamma(x) if x > 0 else MP.log(MP.pi / abs(MP.sinpi(x))) - MP.loggamma(1 - x)


def _polygamma(order: int, x: Any) -> Any:
    """The derivative of ψ of this order; on the left of 0 by its reflection, whose terms are powers of a cotangent."""
    if x > 0:
        return MP.psi(order, x)
    powers = [0, 1]  # of the cotangent; each derivative of it is −(1 + cot²)
    for _ in range(order):
        slope = [k * each for k, each in enumerate(powers)][1:]
        powers = [-(a + b) for a, b in zip([*slope, 0, 0], [0, 0, *slope], strict=True)]
    turn = MP.polyval(powers[::-1], MP.cospi(x) / MP.sinpi(x)) * MP.pi ** (order + 1)
    return (-1) ** order * MP.psi(order, 1 - x) - turn


def _near_roots(function: Callable[[Any], Any], x: Any) -> Any:
    """With twice the precision: next to a root the leading bits cancel."""
    with MP.extraprec(MP.prec):
        return function(x)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": MP.exp,
    "expm1": MP.expm1,
    "log": MP.log,
    "log1p": MP.log1p,
    "tanh": MP.tanh,
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
    "erf": MP.erf,
    "erfc": MP.erfc,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "sqrt": MP.sqrt,
    "rsqrt": lambda x: 1 / MP.sqrt(x),
    "sin": MP.sin,
    "cos": MP.cos,
    "tan": MP.tan,
    "asin": MP.asin,
    "acos": MP.acos,
    "atan": MP.atan,
    "sinh": MP.sinh,
    "cosh": MP.cosh,
    "asinh": MP.asinh,
    "acosh": MP.acosh,
    "atanh": MP.atanh,
    "exp2": lambda x: MP.power(2, x),
    "log2": lambda x: MP.log(x, 2),
    "log10": MP.log10,
    "i0": lambda x: MP.besseli(0, x),
    "special_i1": lambda x: MP.besseli(1, x),
    "special_i0e": lambda x: MP.besseli(0, x) * MP.exp(-abs(x)),
    "special_i1e": lambda x: MP.besseli(1, x) * MP.exp(-abs(x)),
    "special_erfcx": lambda x: MP.exp(x * x) * MP.erfc(x),
    "erfinv": MP.erfinv,
    "lgamma": partial(_near_roots, _log_gamma),
    "digamma": partial(_near_roots, partial(_polygamma, 0)),
    **{f"polygamma_{n}": partial(_near_roots, partial(_polygamma, n)) for n in POLYGAMMA_ORDERS},
    "pow": lambda x, y: MP.power(x, y),
}


@lru_cache(maxsize=1 << 16)
def resolve(name: str, *arguments: float) -> float:
    """The correctly rounded FP32 value of a function of FUNCTIONS at finite arguments, as a Python float.

    Raises:
        DeviceError: the value could not be separated from a rounding boundary with 4,000 bits; no such FP32 input
            is known for any function here.
    """
    if name == "pow":
        base, exponent = arguments
        sign = -1 if base < 0 and exponent % 2 == 1 else 1
        exact = _power_tie(abs(Fraction(base)), Fraction(exponent))
        if exact is not None:
            return round_fraction(sign * exact)
        arguments = (abs(base), exponent)
    else:
        sign = 1
    if name == "exp2" and arguments[0] == math.floor(arguments[0]):
        return round_fraction(Fraction(2) ** int(arguments[0]))
    precision = _FIRST_PRECISION
    while precision <= _LAST_PRECISION:
        with _MP_LOCK, MP.workprec(precision):
            value = _as_fraction(FUNCTIONS[name](*(MP.mpf(a) for a in arguments)))
        slack = abs(value) / 2 ** (precision - _LOST_BITS)
        low, high = round_fraction(value - slack), round_fraction(value + slack)
        if struct.pack("<f", low) == struct.pack("<f", high):
            return sign * low
        precision *= 2
    raise DeviceError(f"{name}{arguments} lies too close to a rounding boundary to be decided")
