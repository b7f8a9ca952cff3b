"""FP64 evaluation of the unary functions in eager PyTorch, from IEEE +, -, ×, ÷, √ and integer operations only.

√ is taken in FP64 as well: `torch.sqrt` comes from a vector library on some processors, which rounds wrongly in FP32
(1 in 5 values under MKL's compatible mode) and may miss the last bit in FP64.

Each function returns FP64 values whose relative error is at most the bound in `EPSILON`; the bits of the FP64 value do
not matter, since Ziv's test decides the rounding and undecided elements are recomputed. So contraction to FMA or
another order of a polynomial on some device is harmless.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from monitor.numerics.kernels import coefficients as c
from monitor.numerics.kernels.bits import check_subnormals, exponent_and_significand, power_of_two, round_or_flag
from monitor.numerics.reference.resolution import POLYGAMMA_ORDERS, resolve

__all__ = ["EPSILON", "KERNELS", "POLYGAMMA_ORDERS", "power", "power_kernel", "resolve_elements", "unary"]

_WIDE = 2.0**-42
_NARROW = 2.0**-48

EPSILON: dict[str, float] = {
    "exp": _NARROW,
    "expm1": _NARROW,
    "log": _NARROW,
    "log1p": _NARROW,
    "tanh": _NARROW,
    "sigmoid": _NARROW,
    "silu": _NARROW,
    "erf": _NARROW,
    "erfc": _NARROW,
    "gelu": _NARROW,
    "gelu_tanh": _WIDE,
    "sqrt": _NARROW,
    "rsqrt": _NARROW,
    "sin": _NARROW,
    "cos": _NARROW,
    "tan": _NARROW,
    "asin": _NARROW,
    "acos": _NARROW,
    "atan": _NARROW,
    "sinh": _NARROW,
    "cosh": _NARROW,
    "asinh": _NARROW,
    "acosh": _NARROW,
    "atanh": _NARROW,
    "exp2": _NARROW,
    "log2": _NARROW,
    "log10": _NARROW,
    "i0": _WIDE,
    "special_i1": _WIDE,
    "special_i0e": _WIDE,
    "special_i1e": _WIDE,
    "special_erfcx": _NARROW,
    "erfinv": _WIDE,
    "lgamma": _WIDE,
    "digamma": _WIDE,
    **{f"polygamma_{n}": _WIDE for n in POLYGAMMA_ORDERS},
    "pow": _WIDE,
}
"""Relative error bound of each FP64 kernel.

A kernel is a few dozen operations, each within 2^-53, none with cancellation worse than 4: below 2^-48 with a margin of
at least 4 (measured, see the tests). An exponential of a rounded argument t adds |t|·2^-51 with |t| ≤ 104 wherever the
FP32 result is neither zero nor infinite, hence 2^-42 for the tanh form of gelu and for pow. The positive series of a
Bessel function adds three roundings for each of about 50 terms that count, and erfinv divides the error of erfc by no
less than 2^-1 in the middle and by more outside.
"""

_EXPONENT_LIMIT = 200.0
_TINY = 2.0**-60
_COUNT_LIMIT = 2.0**20


def _horner(coefficients: Sequence[float], x: Tensor) -> Tensor:
    total = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = total * x
        total = total + coefficient
    return total


def _expm1_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """(k, e^r - 1) with x = k·ln 2 + r and |r| ≤ 0.3466; |x| is clamped to 200, far outside FP32's exponents."""
    x = x.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT)
    count = torch.round(x * c.INVERSE_LN2)
    rest = (x - count * c.LN2_HIGH) - count * c.LN2_LOW
    return count.nan_to_num(0.0), rest * (1.0 + rest * _horner(c.EXPM1, rest))


def _exp(x: Tensor) -> Tensor:
    count, fraction = _expm1_parts(x)
    return (1.0 + fraction) * power_of_two(count)


def _expm1(x: Tensor) -> Tensor:
    count, fraction = _expm1_parts(x)
    scale = power_of_two(count)
    value = torch.where(count == 0, fraction, scale * fraction + (scale - 1.0))
    return torch.where(x == 0, x, value)


def _atanh_series(s: Tensor) -> Tensor:
    """log((1+s)/(1-s)) for |s| ≤ 0.1716."""
    square = s * s
    return s * (2.0 + square * _horner(c.ATANH, square))


def _log_positive(x: Tensor) -> Tensor:
    """log of positive finite normal FP64 numbers."""
    bits = x.view(torch.int64)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & 0xF_FFFF_FFFF_FFFF) | (1023 << 52)).view(torch.float64)
    large = mantissa > 2.0 * c.ROOT_HALF
    mantissa = torch.where(large, mantissa * 0.5, mantissa)
    count = torch.where(large, exponent + 1, exponent).to(torch.float64)
    series = _atanh_series((mantissa - 1.0) / (mantissa + 1.0))
    return count * c.LN2_HIGH + (count * c.LN2_LOW + series)


def _log(x: Tensor) -> Tensor:
    regular = (x > 0) & (x < torch.inf)
    value = _log_positive(torch.where(regular, x, 1.0))
    special = torch.where(x == 0, -torch.inf, torch.where(x == torch.inf, torch.inf, torch.nan))
    return torch.where(regular, value, special)


def _log1p(x: Tensor) -> Tensor:
    near = (x > -0.29) & (x < 0.41)
    small = torch.where(near, x, 0.0)
    return torch.where(near, _atanh_series(small / (2.0 + small)), _log(1.0 + x))


def _tanh(x: Tensor) -> Tensor:
    grown = _expm1(2.0 * x.abs())
    return torch.copysign(grown / (grown + 2.0), x)


def _sigmoid(x: Tensor) -> Tensor:
    return torch.reciprocal(1.0 + _exp(-x))


def _half_for_tiny(x: Tensor, value: Tensor) -> Tensor:
    """`value`, or x/2 moved up by a little where |x| < 2^-60.

    There x·σ(x) and x·Φ(x) exceed x/2 by less than |x|·2^-59, so that no FP32 number or midpoint lies between.
    """
    return torch.where(x.abs() < _TINY, 0.5 * x + 2.0**-40 * x.abs(), value)


def _restore_zero(x: Tensor, value: Tensor) -> Tensor:
    """Limits at -inf (-0) and the sign of a zero argument, for x·σ(x) and x·Φ(x)."""
    value = torch.where(x == -torch.inf, -0.0, value)
    return torch.where(x == 0, x, value)


def _silu(x: Tensor) -> Tensor:
    return _restore_zero(x, _half_for_tiny(x, x / (1.0 + _exp(-x))))


def _gelu_tanh(x: Tensor) -> Tensor:
    inner = c.ROOT_TWO_OVER_PI * (x + 0.044715 * (x * x * x))
    return _restore_zero(x, _half_for_tiny(x, x / (1.0 + _exp(-2.0 * inner))))


def _erfc_tail(magnitude: Tensor, square: Tensor) -> Tensor:
    """erfc(|x|) from |x| and x²; x² comes apart because gelu knows its own without error."""
    finite = magnitude.clamp(max=1e30)
    variable = (finite - c.ERFCX_CENTRE) / (finite + c.ERFCX_CENTRE)
    return _exp(-square) * (_horner(c.ERFCX, variable) / (1.0 + 2.0 * finite))


def _erf_centre(x: Tensor) -> Tensor:
    return x * (c.TWO_OVER_ROOT_PI * _horner(c.ERF, x * x))


def _erf(x: Tensor) -> Tensor:
    magnitude = x.abs()
    centre = _erf_centre(x.clamp(-0.5, 0.5))
    return torch.where(magnitude < 0.5, centre, torch.copysign(1.0 - _erfc_tail(magnitude, x * x), x))


def _erfc_general(x: Tensor, square: Tensor) -> Tensor:
    centre = 1.0 - _erf_centre(x.clamp(-0.5, 0.5))
    tail = _erfc_tail(x.abs(), square)
    return torch.where(x.abs() < 0.5, centre, torch.where(x > 0, tail, 2.0 - tail))


def _erfc(x: Tensor) -> Tensor:
    return torch.where(x == x, _erfc_general(x, x * x), x)


def _gelu(x: Tensor) -> Tensor:
    value = 0.5 * x * _erfc_general(x * -c.ROOT_HALF, 0.5 * (x * x))
    return _restore_zero(x, _half_for_tiny(x, torch.where(x == x, value, x)))


def _rsqrt(x: Tensor) -> Tensor:
    return torch.reciprocal(torch.sqrt(x))


def _reduce_small(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cody-Waite: (quadrant, r) with x = quadrant·π/2 + r, for |x| < 2^20."""
    count = torch.round(x * c.TWO_OVER_PI)
    first, second, third = c.PI_HALF_PARTS
    return count.to(torch.int64), ((x - count * first) - count * second) - count * third


def _window(exponent: int) -> tuple[int, ...]:
    """2/π·2^exponent modulo 4 as four 32-bit words, the first with two integer bits."""
    value = (c.TWO_OVER_PI_BITS >> (162 - exponent)) & ((1 << 128) - 1)
    return tuple((value >> shift) & 0xFFFF_FFFF for shift in (96, 64, 32, 0))


def _reduce_large(x: Tensor) -> tuple[Tensor, Tensor]:
    """Payne-Hanek for finite |x| ≥ 2^20: exact product of the 24-bit significand with 128 bits of 2/π, modulo 4.

    The error of the reduced fraction is below 2^-101; no FP32 number is closer than 2^-40 to a multiple of π/2.
    """
    exponent, significand = exponent_and_significand(x)
    table = torch.tensor([_window(e) for e in range(-3, 105)], dtype=torch.int64, device=x.device)
    words = table[exponent + 3]
    mask = 0xFFFF_FFFF
    p3 = significand * words[:, 3]
    p2 = significand * words[:, 2] + (p3 >> 32)
    p1 = significand * words[:, 1] + (p2 >> 32)
    p0 = significand * words[:, 0] + (p1 >> 32)
    high = ((p0 & mask) << 32) | (p1 & mask)
    quadrant = (high >> 62) + ((high >> 61) & 1)
    fraction = (high << 2).to(torch.float64) * 2.0**-64 + (p2 & mask).to(torch.float64) * 2.0**-94
    sign = torch.where(x < 0, -1, 1)
    return quadrant * sign, fraction * (0.5 * torch.pi) * sign


def _reduce(x: Tensor) -> tuple[Tensor, Tensor]:
    finite = torch.where(x.abs() < torch.inf, x, 0.0)
    small = finite.abs() < _COUNT_LIMIT
    quadrant, rest = _reduce_small(torch.where(small, finite, 0.0))
    large = torch.nonzero(~small.reshape(-1)).reshape(-1)
    if large.numel():
        big_quadrant, big_rest = _reduce_large(finite.reshape(-1)[large])
        quadrant = quadrant.reshape(-1).index_copy(0, large, big_quadrant).reshape(x.shape)
        rest = rest.reshape(-1).index_copy(0, large, big_rest).reshape(x.shape)
    return quadrant & 3, rest


def _sine_cosine(rest: Tensor) -> tuple[Tensor, Tensor]:
    square = rest * rest
    return rest * (1.0 + square * _horner(c.SINE, square)), 1.0 + square * _horner(c.COSINE, square)


def _circular(x: Tensor, turn: int) -> Tensor:
    """sin(x + turn·π/2)."""
    quadrant, rest = _reduce(x)
    sine, cosine = _sine_cosine(rest)
    quadrant = (quadrant + turn) & 3
    value = torch.where((quadrant & 1) == 0, sine, cosine)
    value = torch.where(quadrant >= 2, -value, value)
    return torch.where(x.abs() < torch.inf, value, torch.nan)


def _tan(x: Tensor) -> Tensor:
    quadrant, rest = _reduce(x)
    sine, cosine = _sine_cosine(rest)
    odd = (quadrant & 1) == 1
    value = torch.where(odd, -cosine, sine) / torch.where(odd, sine, cosine)
    return torch.where(x == 0, x, torch.where(x.abs() < torch.inf, value, torch.nan))


def _atan(x: Tensor) -> Tensor:
    """atan(x) = atan(c) + atan((x − c)/(1 + x·c)) with c the nearest quarter, of 1/x above 1."""
    magnitude = x.abs()
    steep = magnitude > 1.0
    small = torch.where(steep, 1.0 / magnitude, magnitude)
    quarter = torch.round(4.0 * small).nan_to_num(0.0)
    rest = (small - 0.25 * quarter) / (1.0 + 0.25 * quarter * small)
    table = torch.tensor(c.ATAN_QUARTERS, dtype=torch.float64, device=x.device)
    value = table[quarter.to(torch.int64)] + rest * _horner(c.ATAN, rest * rest)
    return torch.copysign(torch.where(steep, 0.5 * torch.pi - value, value), x)


def _asin(x: Tensor) -> Tensor:
    return torch.where(x == 0, x, _atan(x / torch.sqrt((1.0 - x) * (1.0 + x))))


def _acos(x: Tensor) -> Tensor:
    return 2.0 * _atan(torch.sqrt((1.0 - x) / (1.0 + x)))


def _sinh(x: Tensor) -> Tensor:
    grown = _expm1(x.abs())
    return torch.copysign(0.5 * (grown + grown / (grown + 1.0)), x)


def _cosh(x: Tensor) -> Tensor:
    grown = _exp(x.abs())
    return 0.5 * (grown + 1.0 / grown)


def _asinh(x: Tensor) -> Tensor:
    magnitude = x.abs()
    finite = magnitude.clamp(max=2.0**128)
    square = finite * finite
    value = _log1p(finite + square / (1.0 + torch.sqrt(1.0 + square)))
    return torch.copysign(torch.where(magnitude == torch.inf, torch.inf, value), x)


def _acosh(x: Tensor) -> Tensor:
    above = x.clamp(max=2.0**128) - 1.0
    value = _log1p(above + torch.sqrt(above * (above + 2.0)))
    return torch.where(x == torch.inf, x, torch.where(x < 1.0, torch.nan, value))


def _atanh(x: Tensor) -> Tensor:
    magnitude = x.abs()
    return torch.copysign(0.5 * _log1p(2.0 * magnitude / (1.0 - magnitude)), x)


def _exp2(x: Tensor) -> Tensor:
    x = x.clamp(-_EXPONENT_LIMIT, _EXPONENT_LIMIT)
    count = torch.round(x).nan_to_num(0.0)
    rest = (x - count) * (c.LN2_HIGH + c.LN2_LOW)
    return (1.0 + rest * (1.0 + rest * _horner(c.EXPM1, rest))) * power_of_two(count)


def _log2(x: Tensor) -> Tensor:
    """The exponent, and the significand's logarithm, in which a significand near 1 loses nothing."""
    regular = (x > 0) & (x < torch.inf)
    kept = torch.where(regular, x, 1.0)
    count = torch.round(_log_positive(kept) * c.INVERSE_LN2)
    value = count + _log_positive(kept * power_of_two(-count)) * c.INVERSE_LN2
    return torch.where(regular, value, _log(x))


def _log10(x: Tensor) -> Tensor:
    return _log(x) / c.LN10


_BESSEL_LIMIT = 100.0


def _bessel_series(square: Tensor, order: int) -> Tensor:
    """Σ square^k / (k! (k + order)!), times order!, for 4·square ≤ 10^4: all terms are positive."""
    total = torch.ones_like(square)
    for k in range(180, 0, -1):
        total = 1.0 + total * square / float(k * (k + order))
    return total


def _bessel_tail(x: Tensor, order: int) -> Tensor:
    """exp(−x)·I(x) for x ≥ 100 by Hankel's expansion, whose 20th term is below 2^-60 of the first."""
    total = torch.ones_like(x)
    for k in range(20, 0, -1):
        total = 1.0 + total * ((2 * k - 1) ** 2 - 4.0 * order * order) / (8.0 * k * x)
    return total / torch.sqrt((2.0 * torch.pi) * x)


def _bessel(order: int, scaled: bool) -> Callable[[Tensor], Tensor]:
    def apply(x: Tensor) -> Tensor:
        magnitude = x.abs()
        near = magnitude.clamp(max=_BESSEL_LIMIT)
        value = _bessel_series(0.25 * near * near, order) * (0.5 * near if order else 1.0)
        if scaled:
            far = _bessel_tail(magnitude.clamp(min=_BESSEL_LIMIT), order)
            value = torch.where(magnitude > _BESSEL_LIMIT, far, value * _exp(-near))
        if order:  # above x/2, or below it once scaled, by less than any FP32 number or midpoint shows
            value = torch.where(
                magnitude < _TINY, 0.5 * magnitude * (1.0 + (-(2.0**-40) if scaled else 2.0**-40)), value
            )
            value = torch.copysign(value, x)
        return torch.where(x == x, value, x)

    return apply


def _erfcx(x: Tensor) -> Tensor:
    finite = x.abs().clamp(max=1e60)
    variable = (finite - c.ERFCX_CENTRE) / (finite + c.ERFCX_CENTRE)
    tail = _horner(c.ERFCX, variable) / (1.0 + 2.0 * finite)
    return torch.where(x < 0, 2.0 * _exp(x * x) - tail, tail)


def _erfinv(x: Tensor) -> Tensor:
    """Newton's steps from Winitzki's approximation (2008), on erfc, and on erf where |x| < 1/2."""
    magnitude = x.abs()
    kept = torch.where(magnitude < 1.0, magnitude, 0.5)
    log = _log((1.0 - kept) * (1.0 + kept))
    shift = 4.33 + 0.5 * log
    rough = torch.sqrt(torch.sqrt(shift * shift - log / 0.147) - shift)
    value = torch.where(kept < 0.1, kept / c.TWO_OVER_ROOT_PI, rough)
    for _ in range(4):
        square = value * value
        central = _erf_centre(value.clamp(max=0.5)) - kept
        outer = (1.0 - kept) - _erfc_general(value, square)
        value = value - torch.where(value < 0.5, central, outer) / (c.TWO_OVER_ROOT_PI * _exp(-square))
    value = torch.where(magnitude == 1.0, torch.inf, torch.where(magnitude < 1.0, value, torch.nan))
    return torch.where(x == 0, x, torch.copysign(value, x))


_STIRLING_LIMIT = 8.5
"""From here on the asymptotic series of Γ and its derivatives (Abramowitz and Stegun 6.1.40, 6.3.18, 6.4.12) serve."""


_UNDECIDED = 1.0 + 2.0**-24
"""A midpoint of two FP32 numbers, which Ziv's test leaves undecided whatever the bound."""


def _with_poles(function: Callable[[Tensor], Tensor], pole: float) -> Callable[[Tensor], Tensor]:
    """Leaves negative arguments undecided: on that side are roots, next to which no relative bound holds."""

    def apply(x: Tensor) -> Tensor:
        left = torch.full_like(x, _UNDECIDED).masked_fill(torch.floor(x) == x, pole)
        return torch.where(x < 0, left, function(x))

    return apply


def _lgamma(x: Tensor) -> Tensor:
    """log Γ(x): from log Γ(2 + z) with x = z + n and |z| ≤ 1/2, and by Stirling's series above."""
    is_small = x < _STIRLING_LIMIT
    small, far = torch.where(is_small, x, 2.0), torch.where(is_small, _STIRLING_LIMIT, x)
    count = torch.floor(small + 0.5)
    rest = small - count
    product = torch.ones_like(rest)
    for each in range(2, 8):
        product = torch.where(count > each, product * (rest + each), product)
    near = rest * _horner(c.LOG_GAMMA, rest) + _log(product)
    near = torch.where(count < 2, near - _log1p(rest), near)
    near = torch.where(count < 1, near - _log(small), near)
    inverse = 1.0 / far
    series = _horner([b / (2 * k * (2 * k - 1)) for k, b in enumerate(c.BERNOULLI, 1)], inverse * inverse)
    value = (far - 0.5) * _log(far) - far + (c.HALF_LOG_TWO_PI + inverse * series)
    return torch.where(is_small, near, torch.where(x == torch.inf, x, value))


def _recurrence(x: Tensor, power: int) -> tuple[Tensor, Tensor]:
    """(y, s) with y = x + 8 where x is small and s = Σ_{j<8} (x + j)^-power, else (x, 0)."""
    is_small = x < _STIRLING_LIMIT
    total = x**-power  # which has the sign of a zero
    for each in range(1, 8):
        total = total + (x + each) ** -power
    return torch.where(is_small, x + 8.0, x), torch.where(is_small, total, 0.0)


def _digamma(x: Tensor) -> Tensor:
    """ψ(x), near its root from its Taylor series there."""
    high, low = c.DIGAMMA_ROOT
    rest = (x - high) - low
    is_near = rest.abs() < 0.25
    shifted, total = _recurrence(x, 1)
    inverse = 1.0 / shifted
    series = _horner([b / (2 * k) for k, b in enumerate(c.BERNOULLI, 1)], inverse * inverse)
    value = _log(shifted) - inverse * (0.5 + inverse * series) - total
    return torch.where(is_near, rest * _horner(c.DIGAMMA, torch.where(is_near, rest, 0.0)), value)


def _polygamma(order: int) -> Callable[[Tensor], Tensor]:
    """The derivative of ψ of this order, whose terms that count have one sign."""
    scale = math.factorial(order)
    terms = [b * math.factorial(2 * k + order - 1) / math.factorial(2 * k) for k, b in enumerate(c.BERNOULLI, 1)]

    def apply(x: Tensor) -> Tensor:
        shifted, total = _recurrence(x.abs(), order + 1)
        inverse = 1.0 / shifted
        tail = scale * 0.5 + inverse * _horner(terms, inverse * inverse)
        value = scale * total + inverse**order * (scale / order + inverse * tail)
        return value if order % 2 else -value

    return apply


def power_kernel(x: Tensor, y: Tensor) -> Tensor:
    """x**y in FP64 with the special cases of IEEE 754 `pow`, for FP32 values held in FP64."""
    integer = torch.floor(y) == y
    half = 0.5 * y
    odd = integer & (torch.floor(half) != half) & (y.abs() < torch.inf)
    logarithm = _log(x.abs())
    value = _exp(torch.where((y == 0) | (x.abs() == 1), 0.0, y * logarithm))
    unbounded = y.abs() * logarithm.abs() == torch.inf
    value = torch.where(unbounded, torch.where((y > 0) == (logarithm > 0), torch.inf, 0.0), value)
    value = torch.where(torch.signbit(x) & odd, -value, value)
    invalid = (x < 0) & (x > -torch.inf) & ~integer
    nan = (x != x) | (y != y) | invalid
    one = (y == 0) | (x == 1)
    return torch.where(one, 1.0, torch.where(nan, torch.nan, value))


KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": _exp,
    "expm1": _expm1,
    "log": _log,
    "log1p": _log1p,
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "erf": _erf,
    "erfc": _erfc,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "sqrt": torch.sqrt,
    "rsqrt": _rsqrt,
    "sin": lambda x: torch.where(x == 0, x, _circular(x, 0)),
    "cos": lambda x: _circular(x, 1),
    "tan": _tan,
    "asin": _asin,
    "acos": _acos,
    "atan": _atan,
    "sinh": _sinh,
    "cosh": _cosh,
    "asinh": _asinh,
    "acosh": _acosh,
    "atanh": _atanh,
    "exp2": _exp2,
    "log2": _log2,
    "log10": _log10,
    "i0": _bessel(0, False),
    "special_i1": _bessel(1, False),
    "special_i0e": _bessel(0, True),
    "special_i1e": _bessel(1, True),
    "special_erfcx": _erfcx,
    "erfinv": _erfinv,
    "lgamma": _with_poles(_lgamma, torch.inf),
    "digamma": _with_poles(_digamma, torch.nan),
    **{f"polygamma_{n}": _with_poles(_polygamma(n), torch.inf if n % 2 else -torch.inf) for n in POLYGAMMA_ORDERS},
}


def resolve_elements(name: str, result: Tensor, undecided: Tensor, *arguments: Tensor) -> Tensor:
    """`result` (1-D FP32) with the elements marked in `undecided` rounded correctly from their arguments (1-D FP64)."""
    positions = torch.nonzero(undecided).reshape(-1)
    if positions.numel() == 0:
        return result
    columns = [argument[positions].tolist() for argument in arguments]
    values = [resolve(name, *row) for row in zip(*columns, strict=True)]
    return result.index_copy(0, positions, torch.tensor(values, dtype=torch.float32, device=result.device))


def unary(name: str, x: Tensor) -> Tensor:
    """A correctly rounded function of KERNELS of FP32 numbers."""
    check_subnormals(x.device, x.numel())
    argument = x.reshape(-1).to(torch.float64)
    result, undecided = round_or_flag(KERNELS[name](argument), EPSILON[name])
    return resolve_elements(name, result, undecided, argument).reshape(x.shape)


def power(x: Tensor, y: Tensor) -> Tensor:
    """Correctly rounded x**y for FP32 x and y of one shape, or y of one element."""
    check_subnormals(x.device, x.numel())
    base = x.reshape(-1).to(torch.float64)
    exponent = y.reshape(-1).to(torch.float64).expand(base.shape)
    result, undecided = round_or_flag(power_kernel(base, exponent), EPSILON["pow"])
    return resolve_elements("pow", result, undecided, base, exponent).reshape(x.shape)
