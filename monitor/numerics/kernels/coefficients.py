"""Constants of the FP64 kernels: Taylor and Chebyshev coefficients, and constants split so that products are exact."""

from __future__ import annotations

import math

__all__ = [
    "ATAN",
    "ATANH",
    "ATAN_QUARTERS",
    "BERNOULLI",
    "COSINE",
    "DIGAMMA",
    "DIGAMMA_ROOT",
    "ERF",
    "ERFCX",
    "ERFCX_CENTRE",
    "EXPM1",
    "HALF_LOG_TWO_PI",
    "INVERSE_LN2",
    "LN2_HIGH",
    "LN2_LOW",
    "LN10",
    "LOG_GAMMA",
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

_LOG_GAMMA = """
0.42278433509846713 0.3224670334241132 -0.0673523010531981 0.020580808427784546 -0.007385551028673986
0.0028905103307415234 -0.001192753911703261 0.0005096695247430425 -0.00022315475845357939 9.945751278180853e-05
-4.492623673813314e-05 2.050721277567069e-05 -9.439488275268397e-06 4.374866789907488e-06 -2.039215753801366e-06
9.55141213040742e-07 -4.492469198764566e-07 2.1207184805554665e-07 -1.0043224823968099e-07 4.7698101693639804e-08
-2.2711094608943164e-08 1.0838659214896955e-08 -5.183475041970047e-09 2.4836745438024785e-09 -1.1921401405860912e-09
5.731367241678862e-10 -2.7595228851242334e-10
"""
LOG_GAMMA = tuple(map(float, _LOG_GAMMA.split()))
"""log Γ(2 + z)/z in powers of z (Abramowitz and Stegun 6.1.33); the remainder is below 2^-56 for |z| ≤ 1/2."""

DIGAMMA_ROOT = (float.fromhex("0x1.762d86356be3fp+0"), float.fromhex("0x1.b86a722197829p-54"))
"""Where ψ is 0, in two parts."""

_DIGAMMA = """
0.9676722454476212 -0.4427631689835921 0.258499760955651 -0.16394270544240652 0.10782405069126237 -0.07219956125645471
0.04880428816414311 -0.03316112647484736 0.022597648232218104 -0.01542476590494896 0.010538791616612175
-0.007204534386356869 0.004926781395729853 -0.003369801655439328 0.002305126326734928 -0.0015769367714301972
0.0010788252019162967 -0.0007380709389960052 0.000504953265834602 -0.0003454680251063077 0.00023635601564027053
-0.00016170622091974803
"""
DIGAMMA = tuple(map(float, _DIGAMMA.split()))
"""ψ(root + t)/t in powers of t; the remainder is below 2^-57 for |t| ≤ 1/4."""

_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798, -174611 / 330)
BERNOULLI = (*_BERNOULLI, 854513 / 138, -236364091 / 2730, 8553103 / 6)
"""B_2, B_4, … B_26."""

HALF_LOG_TWO_PI = 0.9189385332046727


TWO_OVER_PI_BITS = 0xA2F9836E4E441529FC2757D1F534DDC0DB6295993C439041FE5163ABDEBBC561B7246E3A
"""⌊2/π · 2^288⌋."""
