"""Compiled kernels of 2-D convolutions: patches as FP64 columns, their transpose, and norms of what a filter sees.

A geometry is (kh, kw, stride, stride, padding, padding, dilation, dilation). Sums of squares are exact integers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from monitor.numerics.engines.cpu.rounded.operand_kernels import (
    NO_BITS,
    bound_of,
    largest_and_lowest,
    norm_scale,
    root_above,
    span_of,
    square_sum,
)
from monitor.numerics.kernels.jit import compiled, inlined

__all__ = ["add_patches", "channel_bounds", "patch_bounds", "patches", "reach_bounds"]

_INFINITY = np.int32(0x7F800000)


@inlined
def _inside(k: Any, stride: Any, pad: Any, dilation: Any, size: Any, places: Any) -> Any:
    """First place and the one after the last at which offset ``k`` of a filter lies on the input."""
    shift = k * dilation - pad
    first = max(0, -(shift // stride))
    return min(first, places), max(min(places, (size - 1 - shift) // stride + 1), min(first, places))


@compiled
def patches(x: Any, samples: Any, channels: Any, lines: Any, width: Any, geometry: Any, columns: Any) -> None:
    """Patches of FP32 ``x`` (n, c, h, w) as FP64 columns (channels·kh·kw, samples·lines·width).

    samples, channels and lines (of the output) are pairs (begin, end); width is the output's.
    """
    kh, kw, sh, sw, ph, pw, dh, dw = geometry
    height, wide = x.shape[2], x.shape[3]
    count = (lines[1] - lines[0]) * width
    for channel in range(channels[0], channels[1]):
        for i in range(kh):
            for j in range(kw):
                row = columns[((channel - channels[0]) * kh + i) * kw + j]
                first, last = _inside(j, sw, pw, dw, wide, width)
                for sample in range(samples[0], samples[1]):
                    for line in range(lines[0], lines[1]):
                        at = (sample - samples[0]) * count + (line - lines[0]) * width
                        target = row[at : at + width]
                        y = line * sh + i * dh - ph
                        if y < 0 or y >= height:
                            target[:] = 0.0
                            continue
                        source = x[sample, channel, y]
                        target[:first] = 0.0
                        target[last:] = 0.0
                        shift = j * dw - pw
                        if sw == 1:
                            here, there = source[first + shift : last + shift], target[first:last]
                            for k in range(len(there)):
                                there[k] = here[k]
                        else:
                            for k in range(first, last):
                                target[k] = source[k * sw + shift]


@compiled
def add_patches(columns: Any, at_column: Any, lines: Any, width: Any, geometry: Any, x: Any) -> None:
    """Transpose of ``patches`` for one sample: FP64 columns from ``at_column`` on added into zeroed ``x`` (c, h, w)."""
    kh, kw, sh, sw, ph, pw, dh, dw = geometry
    x[:] = 0.0
    for channel in range(x.shape[0]):
        for i in range(kh):
            for j in range(kw):
                row = columns[(channel * kh + i) * kw + j]
                first, last = _inside(j, sw, pw, dw, x.shape[2], width)
                shift = j * dw - pw
                for line in range(lines):
                    y = line * sh + i * dh - ph
                    if y < 0 or y >= x.shape[1]:
                        continue
                    target = x[channel, y]
                    at = at_column + line * width
                    if sw == 1:
                        here, there = row[at + first : at + last], target[first + shift : last + shift]
                        for k in range(len(there)):
                            there[k] += here[k]
                    else:
                        for k in range(first, last):
                            target[k * sw + shift] += row[at + k]


@compiled
def sample_squares(sample: Any, x: Any, bits: Any, groups: Any, powers: Any, squares: Any) -> Any:
    """Rounded-up squares of one sample of FP32 ``x`` (n, c, places), added over the channels of each group.

    Returns:
        The scale by which the root of ``squares`` (groups, places) is to be multiplied, and the sample's span.
    """
    largest, lowest = np.int32(0), NO_BITS
    for channel in range(x.shape[1]):
        high, low = largest_and_lowest(bits[sample, channel])
        largest, lowest = max(largest, high), min(lowest, low)
    squares[:] = 0.0
    if largest >= _INFINITY:
        return 1.0, span_of(largest, lowest)
    e = norm_scale(largest)
    factor = powers[14 - e + 1022]
    per_group = x.shape[1] // groups
    for channel in range(x.shape[1]):
        source, target = x[sample, channel], squares[channel // per_group]
        for k in range(len(source)):
            unit = math.ceil(abs(np.float64(source[k])) * factor)
            target[k] += unit * unit
    return powers[e - 14 + 1022], span_of(largest, lowest)


@compiled
def patch_norms(
    squares: Any, scale: Any, height: Any, wide: Any, lines: Any, width: Any, geometry: Any, norms: Any
) -> None:
    """Norms of the patches (groups, lines·width) of a sample with those squares (groups, height·wide)."""
    kh, kw, sh, sw, ph, pw, dh, dw = geometry
    norms[:] = 0.0
    for group in range(squares.shape[0]):
        for i in range(kh):
            for j in range(kw):
                first, last = _inside(j, sw, pw, dw, wide, width)
                for line in range(lines):
                    y = line * sh + i * dh - ph
                    if 0 <= y < height:
                        for k in range(first, last):
                            norms[group, line * width + k] += squares[group, y * wide + k * sw + j * dw - pw]
        for k in range(lines * width):
            norms[group, k] = root_above(norms[group, k]) * scale


@compiled
def reach_norms(
    squares: Any, scale: Any, height: Any, wide: Any, lines: Any, width: Any, geometry: Any, norms: Any
) -> None:
    """Norms (groups, height·wide) of the results (groups, lines·width) that each input element reaches."""
    kh, kw, sh, sw, ph, pw, dh, dw = geometry
    norms[:] = 0.0
    for group in range(squares.shape[0]):
        for i in range(kh):
            for j in range(kw):
                first, last = _inside(j, sw, pw, dw, wide, width)
                for line in range(lines):
                    y = line * sh + i * dh - ph
                    if 0 <= y < height:
                        for k in range(first, last):
                            norms[group, y * wide + k * sw + j * dw - pw] += squares[group, line * width + k]
        for k in range(height * wide):
            norms[group, k] = root_above(norms[group, k]) * scale


@compiled
def patch_bounds(
    begin: Any, end: Any, x: Any, bits: Any, groups: Any, powers: Any, sizes: Any, geometry: Any, norms: Any, spans: Any
) -> None:
    """Norms (n, groups, lines·width) of patches of samples begin … end of FP32 ``x`` (n, c, places), and spans."""
    squares = np.empty((groups, x.shape[2]))
    for sample in range(begin, end):
        scale, spans[sample] = sample_squares(sample, x, bits, groups, powers, squares)
        patch_norms(squares, scale, sizes[0], sizes[1], sizes[2], sizes[3], geometry, norms[sample])


@compiled
def reach_bounds(
    begin: Any, end: Any, x: Any, bits: Any, groups: Any, powers: Any, sizes: Any, geometry: Any, norms: Any, spans: Any
) -> None:
    """As ``patch_bounds``, of what each input element reaches: norms (n, groups, height·wide)."""
    squares = np.empty((groups, x.shape[2]))
    for sample in range(begin, end):
        scale, spans[sample] = sample_squares(sample, x, bits, groups, powers, squares)
        reach_norms(squares, scale, sizes[0], sizes[1], sizes[2], sizes[3], geometry, norms[sample])


@compiled
def channel_bounds(begin: Any, end: Any, x: Any, bits: Any, powers: Any, norms: Any, spans: Any) -> None:
    """Norms and spans of channels begin … end of FP32 ``x`` (n, c, places) over samples and places."""
    for channel in range(begin, end):
        largest, lowest = np.int32(0), NO_BITS
        for sample in range(x.shape[0]):
            high, low = largest_and_lowest(bits[sample, channel])
            largest, lowest = max(largest, high), min(lowest, low)
        total = 0.0
        if largest < _INFINITY:
            factor = powers[14 - norm_scale(largest) + 1022]
            for sample in range(x.shape[0]):
                total += square_sum(x[sample, channel], factor)
        norms[channel] = bound_of(total, largest, powers)
        spans[channel] = span_of(largest, lowest)
