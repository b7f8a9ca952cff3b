"""Compiled CPU twins of `_functions`: the same formulas in FP64, fused with Ziv's test, one pass over the data.

Formulas, constants and error bounds are explained in `_functions`. What a kernel leaves undecided it lists; the caller
passes those elements to the eager reference. numba's cache watches this file only, so every scalar function lives here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from monitor.numerics.engines.eager.exact.functions import EPSILON
from monitor.numerics.kernels import coefficients as c
from monitor.numerics.kernels.jit import compiled, inlined

__all__ = ["CIRCULAR_LIMIT", "POWER_KERNEL", "UNARY_KERNELS", "exp64", "log64"]

_MAGIC = 1.5 * 2.0**52
_LN2_HIGH, _LN2_LOW, _INVERSE_LN2 = c.LN2_HIGH, c.LN2_LOW, c.INVERSE_LN2
_EXPM1, _ATANH, _SINE, _COSINE, _ERF = c.EXPM1, c.ATANH, c.SINE, c.COSINE, c.ERF
# Two short polynomials in t²: LLVM unrolls, and so vectorises, only short ones.
_ERFCX_EVEN, _ERFCX_ODD = c.ERFCX[0::2], c.ERFCX[1::2]
_CENTRE, _ROOT_HALF, _ROOT_TWO_OVER_PI = c.ERFCX_CENTRE, c.ROOT_HALF, c.ROOT_TWO_OVER_PI
_TWO_OVER_PI, _TWO_OVER_ROOT_PI = c.TWO_OVER_PI, c.TWO_OVER_ROOT_PI
_PI_1, _PI_2, _PI_3 = c.PI_HALF_PARTS
_INFINITY, _NAN = np.inf, np.nan
_CHUNK = 1024

CIRCULAR_LIMIT = 2.0**20
"""Arguments of sin and cos from here on need Payne-Hanek and go to the reference."""


@inlined
def _horner(coefficients: Any, x: Any) -> Any:
    total = coefficients[-1]
    for i in range(len(coefficients) - 2, -1, -1):
        total = total * x + coefficients[i]
    return total


@inlined
def _exp_split(x: Any) -> Any:
    """(2^k, e^r - 1) for x clamped to ±200; a NaN stays in the second."""
    bounded = 200.0 if x > 200.0 else (-200.0 if x < -200.0 else x)
    shifted = bounded * _INVERSE_LN2 + _MAGIC
    count = shifted - _MAGIC
    scale = np.int64((np.float64(shifted).view(np.int64) << 52) + (1023 << 52)).view(np.float64)
    rest = (bounded - count * _LN2_HIGH) - count * _LN2_LOW
    return scale, rest * (1.0 + rest * _horner(_EXPM1, rest))


@inlined
def exp64(x: Any) -> Any:
    scale, fraction = _exp_split(x)
    return (1.0 + fraction) * scale


@inlined
def _expm1(x: Any) -> Any:
    scale, fraction = _exp_split(x)
    value = fraction if scale == 1.0 else scale * fraction + (scale - 1.0)
    return x if x == 0.0 else value


@inlined
def _atanh_series(s: Any) -> Any:
    square = s * s
    return s * (2.0 + square * _horner(_ATANH, square))


@inlined
def _log_positive(x: Any) -> Any:
    pattern = np.float64(x).view(np.int64)
    # The exponent is taken so that the mantissa lies in [√½, √2): 0x3FE6A09E is the head of √½.
    offset = pattern - (0x3FE6A09E << 32)
    exponent = offset >> 52
    mantissa = np.int64(pattern - (exponent << 52)).view(np.float64)
    count = np.int64((exponent + 2048) | (0x433 << 52)).view(np.float64) - (2.0**52 + 2048.0)
    series = _atanh_series((mantissa - 1.0) / (mantissa + 1.0))
    return count * _LN2_HIGH + (count * _LN2_LOW + series)


@inlined
def log64(x: Any) -> Any:
    value = _log_positive(x)
    value = -_INFINITY if x == 0.0 else value
    value = x if x == _INFINITY else value
    return value if x >= 0.0 else _NAN


@inlined
def _log1p(x: Any) -> Any:
    near = _atanh_series(x / (2.0 + x))
    far = log64(1.0 + x)
    return near if x > -0.29 and x < 0.41 else far


@inlined
def _tanh(x: Any) -> Any:
    grown = _expm1(2.0 * abs(x))
    return np.copysign(grown / (grown + 2.0), x)


@inlined
def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + exp64(-x))


@inlined
def _ends(x: Any, value: Any) -> Any:
    """`value` but for zeros, |x| < 2^-60 and -inf, as in `_functions`."""
    value = 0.5 * x + 2.0**-40 * abs(x) if abs(x) < 2.0**-60 else value
    value = -0.0 if x == -_INFINITY else value
    return x if x == 0.0 else value


@inlined
def _silu(x: Any) -> Any:
    return _ends(x, x / (1.0 + exp64(-x)))


@inlined
def _gelu_tanh(x: Any) -> Any:
    inner = _ROOT_TWO_OVER_PI * (x + 0.044715 * (x * x * x))
    return _ends(x, x / (1.0 + exp64(-2.0 * inner)))


@inlined
def _erfc_tail(magnitude: Any, square: Any) -> Any:
    finite = min(magnitude, 1e30)
    variable = (finite - _CENTRE) / (finite + _CENTRE)
    again = variable * variable
    series = _horner(_ERFCX_EVEN, again) + variable * _horner(_ERFCX_ODD, again)
    return exp64(-square) * (series / (1.0 + 2.0 * finite))


@inlined
def _erf_centre(x: Any) -> Any:
    return x * (_TWO_OVER_ROOT_PI * _horner(_ERF, x * x))


@inlined
def _erf(x: Any) -> Any:
    tail = np.copysign(1.0 - _erfc_tail(abs(x), x * x), x)
    return tail if abs(x) >= 0.5 else _erf_centre(x)


@inlined
def _erfc_general(x: Any, square: Any) -> Any:
    tail = _erfc_tail(abs(x), square)
    tail = tail if x > 0.0 else 2.0 - tail
    return tail if abs(x) >= 0.5 else 1.0 - _erf_centre(x)


@inlined
def _erfc(x: Any) -> Any:
    return _erfc_general(x, x * x)


@inlined
def _gelu(x: Any) -> Any:
    return _ends(x, 0.5 * x * _erfc_general(x * -_ROOT_HALF, 0.5 * (x * x)))


@inlined
def _circular(x: Any, turn: Any) -> Any:
    shifted = x * _TWO_OVER_PI + _MAGIC
    count = shifted - _MAGIC
    rest = ((x - count * _PI_1) - count * _PI_2) - count * _PI_3
    quadrant = np.float64(shifted).view(np.int64) + turn
    square = rest * rest
    sine = rest * (1.0 + square * _horner(_SINE, square))
    cosine = 1.0 + square * _horner(_COSINE, square)
    value = sine if quadrant & 1 == 0 else cosine
    value = value if quadrant & 2 == 0 else -value
    return value if abs(x) < _INFINITY else _NAN


@inlined
def _sin(x: Any) -> Any:
    return x if x == 0.0 else _circular(x, 0)


@inlined
def _power(x: Any, y: Any) -> Any:
    integer = np.floor(y) == y
    half = 0.5 * y
    odd = integer and np.floor(half) != half and abs(y) < _INFINITY
    logarithm = log64(abs(x))
    value = exp64(0.0 if abs(x) == 1.0 else y * logarithm)
    if abs(y) * abs(logarithm) == _INFINITY:
        value = _INFINITY if (y > 0.0) == (logarithm > 0.0) else 0.0
    value = np.copysign(value, x) if odd else value
    invalid = x < 0.0 and x > -_INFINITY and not integer
    value = _NAN if invalid or x != x or y != y else value
    return 1.0 if y == 0.0 or x == 1.0 else value


_NAMES = (
    *("exp", "expm1", "log", "log1p", "tanh", "sigmoid", "silu", "erf", "erfc", "gelu", "gelu_tanh"),
    *("sqrt", "rsqrt", "sin", "cos"),
)


@inlined
def _value(which: Any, x: Any) -> Any:
    """Function number `which` of _NAMES; a number in a kernel's closure, unlike a function, keeps its cache valid."""
    if which == 0:
        return exp64(x)
    if which == 1:
        return _expm1(x)
    if which == 2:
        return log64(x)
    if which == 3:
        return _log1p(x)
    if which == 4:
        return _tanh(x)
    if which == 5:
        return _sigmoid(x)
    if which == 6:
        return _silu(x)
    if which == 7:
        return _erf(x)
    if which == 8:
        return _erfc(x)
    if which == 9:
        return _gelu(x)
    if which == 10:
        return _gelu_tanh(x)
    if which == 11:
        return np.sqrt(x)
    if which == 12:
        return 1.0 / np.sqrt(x)
    if which == 13:
        return _sin(x)
    return _circular(x, 1)


def _unary_kernel(which: int, epsilon: float) -> Any:
    down, up = 1.0 - epsilon, 1.0 + epsilon

    def kernel(begin: Any, end: Any, x: Any, out: Any, limit: Any, found: Any) -> Any:
        count = 0
        for start in range(begin, end, _CHUNK):
            stop = min(start + _CHUNK, end)
            source, target = x[start:stop], out[start:stop]
            undecided = 0
            for i in range(stop - start):
                argument = np.float64(source[i])
                value = _value(which, argument)
                low, high = np.float32(value * down), np.float32(value * up)
                target[i] = high if value == value else np.float32(_NAN)
                size = abs(argument)
                undecided += (low < high) | (low > high) | ((size >= limit) & (size < _INFINITY))
            if undecided:
                for i in range(stop - start):
                    argument = np.float64(source[i])
                    value = _value(which, argument)
                    low, high = np.float32(value * down), np.float32(value * up)
                    size = abs(argument)
                    if (low < high) | (low > high) | ((size >= limit) & (size < _INFINITY)):
                        if count < found.shape[0]:
                            found[count] = start + i
                        count += 1
        return count

    return compiled(kernel)


def _power_kernel(epsilon: float) -> Any:
    down, up = 1.0 - epsilon, 1.0 + epsilon

    def kernel(begin: Any, end: Any, x: Any, y: Any, step: Any, out: Any, found: Any) -> Any:
        """`step` is 1 for a tensor of exponents and 0 for one exponent y[0]."""
        count = 0
        for i in range(begin, end):
            value = _power(np.float64(x[i]), np.float64(y[i * step]))
            low, high = np.float32(value * down), np.float32(value * up)
            out[i] = high if value == value else np.float32(_NAN)
            if (low < high) | (low > high):
                if count < found.shape[0]:
                    found[count] = i
                count += 1
        return count

    return compiled(kernel)


UNARY_KERNELS: dict[str, object] = {name: _unary_kernel(which, EPSILON[name]) for which, name in enumerate(_NAMES)}

POWER_KERNEL = _power_kernel(EPSILON["pow"])
