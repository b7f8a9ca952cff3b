"""The specification of `matmul` in Python integers: slow and obviously right, one element at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from monitor.numerics.kernels.bits import CANONICAL_NAN
from monitor.numerics.reference.resolution import round_fraction

__all__ = ["CHUNK", "LARGEST", "is_wide", "matmul_by_integers", "quantise_row"]

LARGEST = 0x7F7F7F
"""Largest magnitude of three balanced base-256 digits: 127·256² + 127·256 + 127."""

CHUNK = 32_768
"""Longest piece of K whose digit products every engine sums exactly: 0x7F7F·0x7F7F7F·2^15 + 128·0x7F7F·2^15 < 2^53."""


def quantise_row(row: list[float]) -> tuple[list[int], int]:
    """(q, s): the largest integer s with |RNE(x·2^s)| ≤ LARGEST for every x, and q = RNE(x·2^s); zeros give s = 0."""
    largest = max((abs(Fraction(x)) for x in row), default=Fraction(0))
    if largest == 0:
        return [0] * len(row), 0
    shift = 22 - math.frexp(float(largest))[1] + 2
    while round(largest * Fraction(2) ** shift) > LARGEST:
        shift -= 1
    scale = Fraction(2) ** shift
    return [round(Fraction(x) * scale) for x in row], shift


def is_wide(q: list[int], row: list[float]) -> bool:
    """Whether more than seven eighths of a row's non-zero elements are below a sixth of its largest, by their q."""
    largest = max((abs(v) for v in q), default=0)
    small = sum(1 for v, x in zip(q, row, strict=True) if x != 0 and abs(v) * 6 < largest)
    return 8 * small > 7 * sum(1 for x in row if x != 0)


def _low_digit(q: int) -> int:
    return (q + 128) % 256 - 128


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the left operand or a column of the right one, with what its elements alone decide."""

    values: list[float]
    is_finite: bool
    q: list[int]
    shift: int
    is_wide: bool


def _read(values: list[float]) -> _Row:
    if not all(map(math.isfinite, values)):
        return _Row(values, False, [], 0, False)
    q, shift = quantise_row(values)
    return _Row(values, True, q, shift, is_wide(q, values))


def _element(a: _Row, b: _Row) -> float:
    if not (a.is_finite and b.is_finite):
        return math.nan
    if a.is_wide or b.is_wide:
        pairs = zip(a.values, b.values, strict=True)
        return round_fraction(sum((Fraction(x) * Fraction(y) for x, y in pairs), Fraction(0)))
    total = sum(x * y - _low_digit(x) * _low_digit(y) for x, y in zip(a.q, b.q, strict=True))
    value = Fraction(float(total // 256)) * Fraction(2) ** (8 - a.shift - b.shift)
    return round_fraction(value)


def matmul_by_integers(a: Tensor, b: Tensor) -> Tensor:
    """`matmul` of 2-D FP32 tensors on the CPU."""
    rows, columns = list(map(_read, a.tolist())), list(map(_read, b.t().tolist()))
    result = torch.tensor([[_element(row, column) for column in columns] for row in rows], dtype=torch.float32)
    nan = torch.full(result.shape, CANONICAL_NAN, dtype=torch.int32).view(torch.float32)
    return torch.where(result != result, nan, result).reshape(a.shape[0], b.shape[1])
