"""The specification of the BF16 product in Python integers: slow and obviously right, one element at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from monitor.numerics.kernels.bits import CANONICAL_NAN
from monitor.numerics.reference.resolution import round_fraction

__all__ = [
    "APART",
    "APART_BITS",
    "BASE",
    "DENSE",
    "GAP",
    "LARGEST",
    "MOST_APART",
    "MOST_TERMS",
    "SPARSE",
    "THIN",
    "bf16_matmul_by_integers",
]

BASE = 255
LARGEST = 127 * BASE + 127
"""Largest magnitude of two balanced base-255 digits; of an odd base, so that -q has the digits of q negated."""

GAP = 4 * 128
"""A place is set apart where its largest bits exceed those of all but a few places by this: sixteenfold."""
APART = 64
"""At most one place in so many is set apart for either side, and at most MOST_APART."""
MOST_APART = 512
APART_BITS = 21
"""What is set apart is rounded to so many bits: 2·512 products add without error in FP64."""

MOST_TERMS = 1 << 22
"""V is below LARGEST²·2^22 < 2^53, which FP64 holds."""

DENSE = 16 * 128 * 128
"""Density of a vector of zeros, and of a wide one: above all others."""
SPARSE = 16 * 3
"""A vector is wide where its density lies below."""
THIN = 256 * 50_000
"""Low digits are multiplied with one another where the densities of row and column give less than this."""


def bits_of(x: float) -> int:
    """Magnitude bits of a BF16 number."""
    return int(torch.tensor(x, dtype=torch.bfloat16).view(torch.int16).item()) & 0x7FFF


def apart(rows: list[list[float]], columns: list[list[float]]) -> list[int]:
    """Places of K whose largest element, over all rows or over all columns, is out of proportion to the others'."""
    found: set[int] = set()
    if not all(math.isfinite(x) for vector in rows + columns for x in vector):
        return []
    for vectors in (rows, columns):
        peaks = [max(bits_of(x) for x in place) for place in zip(*vectors, strict=True)]
        usual = sorted(peaks, reverse=True)[min(len(peaks) // APART, MOST_APART)]
        found |= {k for k, peak in enumerate(peaks) if peak - usual >= GAP}
    return sorted(found)


def quantise(vector: list[float]) -> tuple[list[int], int]:
    """(q, s): the largest integer s with |RNE(x·2^s)| ≤ LARGEST for every x, and q = RNE(x·2^s); zeros give s = 0."""
    largest = max((abs(Fraction(x)) for x in vector), default=Fraction(0))
    if largest == 0:
        return [0] * len(vector), 0
    shift = 16 - math.frexp(float(largest))[1]
    while round(largest * Fraction(2) ** shift) > LARGEST:
        shift -= 1
    scale = Fraction(2) ** shift
    return [round(Fraction(x) * scale) for x in vector], shift


def digits(q: int) -> tuple[int, int]:
    """(h, l) with q = 255·h + l and |l| ≤ 127."""
    low = (q + 127) % BASE - 127
    return (q - low) // BASE, low


def density(vector: list[float], q: list[int]) -> int:
    """Sixteen times the mean square of the high digits over the elements that are not zero, rounded down."""
    filled = sum(x != 0 for x in vector)
    return 16 * sum(digits(v)[0] ** 2 for v in q) // filled if filled else DENSE


def _apart_values(vector: list[float]) -> list[Fraction]:
    """Elements on a grid that is 2^-21 of the next power of two above the largest."""
    exponent = math.frexp(max((abs(x) for x in vector), default=0.0))[1]
    grid = Fraction(2) ** (exponent - APART_BITS)
    return [round(Fraction(x) / grid) * grid for x in vector]


@dataclass(frozen=True, slots=True)
class _Vector:
    """A row of the left operand or a column of the right one, with what its elements and the chosen places decide."""

    values: list[float]
    is_finite: bool
    q: list[int]
    shift: int
    density: int
    apart: list[Fraction]


def _read(values: list[float], chosen: list[int]) -> _Vector:
    if not all(map(math.isfinite, values)):
        return _Vector(values, False, [], 0, 0, [])
    others = [0.0 if k in chosen else value for k, value in enumerate(values)]
    q, shift = quantise(others)
    return _Vector(values, True, q, shift, density(others, q), _apart_values([values[k] for k in chosen]))


def _element(a: _Vector, b: _Vector) -> float:
    if not (a.is_finite and b.is_finite):
        return math.nan
    if min(a.density, b.density) < SPARSE:
        pairs = zip(a.values, b.values, strict=True)
        return round_fraction(sum((Fraction(u) * Fraction(v) for u, v in pairs), Fraction(0)))
    total = sum(u * v for u, v in zip(a.q, b.q, strict=True))
    if a.density * b.density >= THIN:
        total -= sum(digits(u)[1] * digits(v)[1] for u, v in zip(a.q, b.q, strict=True))
    value = Fraction(float(total)) * Fraction(2) ** (-a.shift - b.shift)
    other = sum((u * v for u, v in zip(a.apart, b.apart, strict=True)), Fraction(0))
    return round_fraction(Fraction(float(value) + float(other)))


def bf16_matmul_by_integers(a: Tensor, b: Tensor) -> Tensor:
    """`bf16_matmul` of 2-D BF16 tensors on the CPU, in FP32."""
    rows, columns = a.tolist(), b.t().tolist()
    chosen = apart(rows, columns)
    left, right = ([_read(vector, chosen) for vector in side] for side in (rows, columns))
    listed = [[_element(row, column) for column in right] for row in left]
    result = torch.tensor(listed, dtype=torch.float32)
    nan = torch.full(result.shape, CANONICAL_NAN, dtype=torch.int32).view(torch.float32)
    return torch.where(result != result, nan, result).reshape(a.shape[0], b.shape[1])
