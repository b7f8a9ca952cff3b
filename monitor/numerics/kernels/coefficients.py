"""Constants of the FP64 kernels: Taylor and Chebyshev coefficients, and constants split so that products are exact."""

from __future__ import annotations

import math

__all__ = [
    "ATAN",
    "ATANH",
    "ATAN_QUARTERS",
    "COSINE",
    "ERF",
    "ERFCX",
    "ERFCX_CENTRE",
    "EXPM1",
    "INVERSE_LN2",
    "LN2_HIGH",
    "LN2_LOW",
    "LN10",
    "PI_HALF_PARTS",
    "ROOT_HALF",
    "ROOT_TWO_OVER_PI",
    "SINE",
    "TWO_OVER_PI",
    "TWO_OVER_PI_BITS",
    "TWO_OVER_ROOT_PI",
]

LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
INVERSE_LN2 = float.fromhex("0x1.71547652b82fep+0")

# π/2 in two parts of 33 bits and a rest, so that k times a part is exact for k < 2^20.
PI_HALF_PARTS = (
    float.fromhex("0x1.921fb54400000p+0"),
    float.fromhex("0x1.0b4611a600000p-34"),
    float.fromhex("0x1.3198a2e037073p-69"),
)
TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")
TWO_OVER_ROOT_PI = float.fromhex("0x1.20dd750429b6dp+0")
ROOT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
ROOT_TWO_OVER_PI = float.fromhex("0x1.9884533d43651p-1")

EXPM1 = tuple(1.0 / math.factorial(n) for n in range(2, 14))
"""(e^r - 1 - r)/r² in powers of r; the remainder is below 2^-57 for |r| ≤ 0.3466."""

ATANH = tuple(2.0 / (2 * n + 1) for n in range(1, 12))
"""(log((1+s)/(1-s)) - 2s)/s³ in powers of s²; the remainder is below 2^-58 for s² ≤ 0.02945."""

ATAN = tuple((-1.0) ** n / (2 * n + 1) for n in range(10))
"""atan(r)/r in powers of r²; the remainder is below 2^-60 for |r| ≤ 1/8."""

ATAN_QUARTERS = (0.0, 0.24497866312686414, 0.4636476090008061, 0.6435011087932844, 0.7853981633974483)
"""atan(k/4)."""

LN10 = 2.302585092994046

SINE = tuple((-1.0) ** n / math.factorial(2 * n + 1) for n in range(1, 9))
COSINE = tuple((-1.0) ** n / math.factorial(2 * n) for n in range(1, 10))
"""(sin r - r)/r³ and (cos r - 1)/r² in powers of r²; remainders below 2^-60 for |r| ≤ π/4."""

ERF = tuple((-1.0) ** n / (math.factorial(n) * (2 * n + 1)) for n in range(13))
"""erf(x)·√π/(2x) in powers of x²; the remainder is below 2^-60 for |x| ≤ 1/2."""

ERFCX_CENTRE = 3.75
ERFCX = (
    1.2375126308378275,
    -0.14024059858554697,
    0.0035854154854644293,
    0.0822767384901452,
    -0.10880393014174886,
    0.09230432116037748,
    -0.05869339858963677,
    0.028362277418956406,
    -0.009746579558029276,
    0.0017556258528952954,
    0.0002937136655913448,
    -0.0002901540805408417,
    5.164909889268241e-05,
    2.238423915508223e-05,
    -1.1444146237700524e-05,
    -9.73559896736775e-07,
    1.751637648849062e-06,
    -5.7218230603224086e-08,
    -2.5866850716155884e-07,
    2.3263508708859124e-08,
    3.8675334242222354e-08,
    -3.744210080962018e-09,
    -5.1739902140113095e-09,
    3.1114333809799254e-10,
    4.2514714447963895e-10,
)
"""(1 + 2x)·exp(x²)·erfc(x) in powers of t = (x - 3.75)/(x + 3.75), from a Chebyshev series cut after degree 24.

The variable is that of Shepherd and Laframboise (1981); relative error below 2^-51 for every x ≥ 0.
"""


TWO_OVER_PI_BITS = 0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDEBBC561B7246E3A
"""⌊2/π · 2^288⌋."""
