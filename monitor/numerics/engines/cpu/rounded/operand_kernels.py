"""Compiled kernels that widen operands to FP64 and, in the same pass over memory, bound their norms and their bits.

A vector's span is the number of bits from its largest magnitude's highest to its lowest set bit; see ``spans``.
No operation is contracted or reordered except where its partial sums are exact.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from monitor.numerics.kernels.jit import compiled, inlined, reordered

__all__ = ["NO_BITS", "bound_of", "largest_and_lowest", "square_sum", "widen_columns", "widen_rows"]

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_FRACTION, _HIDDEN = np.int32(0x7FFFFF), np.int32(0x800000)
NO_BITS = np.int32(1 << 20)
"""Lowest set bit of a vector of zeros."""
_STRIP = 128
_ROUND_UP = 1.0 + 2.0**-20


@inlined
def lowest_bit(magnitude_bits: Any) -> Any:
    """Exponent of the lowest set bit of an FP32 magnitude, plus 149; NO_BITS for zero."""
    biased = magnitude_bits >> 23
    significand = (magnitude_bits & _FRACTION) | (_HIDDEN if biased > 0 else np.int32(0))
    isolated = np.float32(np.int32(significand & -significand))
    place = (isolated.view(np.int32) >> 23) - np.int32(127) + max(biased, np.int32(1)) - np.int32(1)
    return NO_BITS if magnitude_bits == 0 else np.int32(place)


@inlined
def norm_scale(largest_bits: Any) -> Any:
    """Exponent e of the largest magnitude, at least −160, from FP32 bits."""
    biased = largest_bits >> 23
    if biased > 0:
        return biased - 127
    if largest_bits == 0:
        return -160
    return math.frexp(np.float64(largest_bits))[1] - 1 - 149


@inlined
def span_of(largest_bits: Any, lowest: Any) -> Any:
    """Bits from the highest of the largest magnitude down to the lowest set bit; 0 for zeros."""
    return np.int32(0) if largest_bits == 0 else np.int32(norm_scale(largest_bits) + 149 - lowest + 1)


@inlined
def root_above(total: Any) -> Any:
    """``norms.root_above`` of one number: the processor's own square root is correctly rounded."""
    above = np.float64(np.float32(total * _ROUND_UP))
    return np.float64(np.float32(math.sqrt(above))) * _ROUND_UP


@inlined
def bound_of(total: Any, largest_bits: Any, powers: Any) -> Any:
    """Norm from the sum of squares of rounded-up magnitudes; 0 where a number is not finite."""
    if largest_bits >= _INFINITY:
        return 0.0
    return root_above(total) * powers[norm_scale(largest_bits) - 14 + 1022]


@inlined
def largest_and_lowest(bits: Any) -> Any:
    """Largest FP32 magnitude as bits, and the lowest set bit, of a flat array of bits."""
    largest, lowest = np.int32(0), NO_BITS
    for k in range(len(bits)):
        magnitude = bits[k] & _MAGNITUDE
        largest = max(largest, magnitude)
        lowest = min(lowest, lowest_bit(magnitude))
    return largest, lowest


@reordered
def square_sum(x: Any, scale: Any) -> Any:
    """Σ ⌈|x|·scale⌉² of integers that stay exact in FP64 in any order."""
    total = 0.0
    for k in range(len(x)):
        unit = math.ceil(abs(np.float64(x[k])) * scale)
        total += unit * unit
    return total


@compiled
def widen_rows(begin: Any, end: Any, x: Any, bits: Any, powers: Any, wide: Any, norms: Any, spans: Any) -> None:
    """Rows begin … end of FP32 ``x`` (with its int32 view) as rows of FP64 ``wide``, with their norms and spans."""
    for row in range(begin, end):
        largest, lowest = largest_and_lowest(bits[row])
        source, target = x[row], wide[row - begin]
        for k in range(len(source)):
            target[k] = source[k]
        total = 0.0
        if largest < _INFINITY:
            total = square_sum(source, powers[14 - norm_scale(largest) + 1022])
        norms[row - begin] = bound_of(total, largest, powers)
        spans[row - begin] = span_of(largest, lowest)


@compiled
def widen_columns(
    begin: Any, end: Any, x: Any, bits: Any, first: Any, powers: Any, wide: Any, norms: Any, spans: Any
) -> None:
    """Columns first … first + wide.shape[2] of matrices begin … end of FP32 ``x`` (batch, k, n), as ``widen_rows``."""
    width = wide.shape[2]
    largest, lowest = np.empty(_STRIP, dtype=np.int32), np.empty(_STRIP, dtype=np.int32)
    factor, total = np.empty(_STRIP), np.empty(_STRIP)
    for batch in range(begin, end):
        for strip in range(0, width, _STRIP):
            count = min(_STRIP, width - strip)
            largest[:], lowest[:], total[:] = 0, NO_BITS, 0.0
            for k in range(x.shape[1]):
                source = x[batch, k, first + strip : first + strip + count]
                source_bits = bits[batch, k, first + strip : first + strip + count]
                target = wide[batch - begin, k, strip : strip + count]
                for j in range(count):
                    target[j] = source[j]
                    magnitude = source_bits[j] & _MAGNITUDE
                    largest[j] = max(largest[j], magnitude)
                    lowest[j] = min(lowest[j], lowest_bit(magnitude))
            for j in range(count):
                factor[j] = powers[14 - norm_scale(min(largest[j], _INFINITY - np.int32(1))) + 1022]
            for k in range(x.shape[1]):
                target = wide[batch - begin, k, strip : strip + count]
                for j in range(count):
                    unit = math.ceil(abs(target[j]) * factor[j])
                    total[j] += unit * unit
            for j in range(count):
                norms[batch - begin, strip + j] = bound_of(total[j], largest[j], powers)
                spans[batch - begin, strip + j] = span_of(largest[j], lowest[j])
