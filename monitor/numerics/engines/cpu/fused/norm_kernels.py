"""Compiled layer and batch normalisation: the roundings of ``operators.normalisation`` in one pass over each row.

A kernel returns how many sums it left undecided; unless that is 0 the caller discards the outputs and takes the
operator apart instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from monitor.numerics.engines.cpu.exact.sum_kernels import rounded, settle, sum_of
from monitor.numerics.kernels.jit import compiled, inlined
from monitor.numerics.kernels.pointers import floats

__all__ = [
    "batch_norm_channels",
    "batch_norm_slope_channels",
    "layer_norm_rows",
    "layer_norm_slope_columns",
    "layer_norm_slope_rows",
]

_NAN = np.float32(np.nan)
_ONE = np.float32(1.0)


@inlined
def _canonical(x: Any) -> Any:
    return x if x == x else _NAN


@inlined
def _centre_and_scale(values: Any, squares: Any, eps: Any) -> Any:
    """(mean, variance, 1/√(variance + eps), undecided sums) of a row; `squares` is room for its length."""
    n = values.shape[0]
    total, first = sum_of(values, 1.0)
    centre = total / np.float32(n)
    for j in range(n):
        rest = values[j] - centre
        squares[j] = rest * rest
    total, second = sum_of(squares, 1.0)
    variance = total / np.float32(n)
    return centre, variance, _ONE / np.sqrt(variance + eps), int(first) + int(second)


@compiled
def layer_norm_rows(
    begin: Any,
    end: Any,
    x_at: Any,
    width: Any,
    weight_at: Any,
    bias_at: Any,
    eps: Any,
    out_at: Any,
    centre_at: Any,
    scale_at: Any,
) -> Any:
    """Rows [begin, end) of x (rows, width); weight and bias (width,) may be absent, at address 0."""
    rows = end - begin
    skipped = 4 * begin * width
    x, out = floats(x_at + skipped, (rows, width)), floats(out_at + skipped, (rows, width))
    centres, scales = floats(centre_at + 4 * begin, rows), floats(scale_at + 4 * begin, rows)
    weight, bias = floats(weight_at, width), floats(bias_at, width)
    squares = np.empty(width, np.float32)
    undecided = 0
    for i in range(rows):
        row, target = x[i], out[i]
        centre, _, scale, unknown = _centre_and_scale(row, squares, np.float32(eps))
        undecided += unknown
        for j in range(width):
            target[j] = (row[j] - centre) * scale
        if weight_at != 0:
            for j in range(width):
                target[j] = target[j] * weight[j]
        if bias_at != 0:
            for j in range(width):
                target[j] = target[j] + bias[j]
        for j in range(width):
            target[j] = _canonical(target[j])
        centres[i], scales[i] = _canonical(centre), _canonical(scale)
    return undecided


@compiled
def layer_norm_slope_rows(
    begin: Any,
    end: Any,
    grad_at: Any,
    x_at: Any,
    width: Any,
    centre_at: Any,
    scale_at: Any,
    weight_at: Any,
    out_at: Any,
) -> Any:
    """Gradient of rows [begin, end) of the input."""
    rows = end - begin
    skipped = 4 * begin * width
    grad, x = floats(grad_at + skipped, (rows, width)), floats(x_at + skipped, (rows, width))
    out, weight = floats(out_at + skipped, (rows, width)), floats(weight_at, width)
    centres, scales = floats(centre_at + 4 * begin, rows), floats(scale_at + 4 * begin, rows)
    hat, inner, product = np.empty(width, np.float32), np.empty(width, np.float32), np.empty(width, np.float32)
    count = np.float32(width)
    undecided = 0
    for i in range(rows):
        centre, scale = centres[i], scales[i]
        incoming, row, target = grad[i], x[i], out[i]
        if weight_at != 0:
            for j in range(width):
                inner[j] = incoming[j] * weight[j]
        else:
            for j in range(width):
                inner[j] = incoming[j]
        for j in range(width):
            hat[j] = (row[j] - centre) * scale
            product[j] = inner[j] * hat[j]
        total, unknown = sum_of(inner, 1.0)
        undecided += unknown
        first = total / count
        total, unknown = sum_of(product, 1.0)
        undecided += unknown
        second = total / count
        for j in range(width):
            target[j] = _canonical(((inner[j] - first) - hat[j] * second) * scale)
    return undecided


@compiled
def layer_norm_slope_columns(
    begin: Any,
    end: Any,
    grad_at: Any,
    x_at: Any,
    rows: Any,
    width: Any,
    centre_at: Any,
    scale_at: Any,
    weight_out_at: Any,
    bias_out_at: Any,
) -> Any:
    """Gradients of columns [begin, end) of weight and bias."""
    size = end - begin
    grad, x = floats(grad_at, (rows, width)), floats(x_at, (rows, width))
    centres, scales = floats(centre_at, rows), floats(scale_at, rows)
    weight_out, bias_out = floats(weight_out_at + 4 * begin, size), floats(bias_out_at + 4 * begin, size)
    totals, sizes = np.zeros((2, size)), np.zeros((2, size))
    for i in range(rows):
        centre, scale = centres[i], scales[i]
        incoming, row = grad[i, begin:end], x[i, begin:end]
        for j in range(size):
            product = np.float64(incoming[j] * ((row[j] - centre) * scale))
            totals[0, j] += product
            sizes[0, j] += abs(product)
        for j in range(size):
            value = np.float64(incoming[j])
            totals[1, j] += value
            sizes[1, j] += abs(value)
    undecided = 0
    terms = np.empty(rows, np.float32)
    for j in range(size):
        value, unknown = rounded(totals[0, j], sizes[0, j], rows, 1.0)
        if unknown:
            for i in range(rows):
                terms[i] = grad[i, begin + j] * ((x[i, begin + j] - centres[i]) * scales[i])
            value, unknown = settle(terms, 1.0)
        undecided += unknown
        weight_out[j] = value
        value, unknown = rounded(totals[1, j], sizes[1, j], rows, 1.0)
        if unknown:
            for i in range(rows):
                terms[i] = grad[i, begin + j]
            value, unknown = settle(terms, 1.0)
        undecided += unknown
        bias_out[j] = value
    return undecided


@compiled
def batch_norm_channels(
    begin: Any,
    end: Any,
    x_at: Any,
    samples: Any,
    channels: Any,
    places: Any,
    weight_at: Any,
    bias_at: Any,
    eps: Any,
    out_at: Any,
    centre_at: Any,
    variance_at: Any,
    scale_at: Any,
) -> Any:
    """Channels [begin, end) of x (samples, channels, places), with the statistics of this batch."""
    shape = (samples, channels, places)
    x, out = floats(x_at, shape), floats(out_at, shape)
    centres, variances, scales = floats(centre_at, channels), floats(variance_at, channels), floats(scale_at, channels)
    weight, bias = floats(weight_at, channels), floats(bias_at, channels)
    values, squares = np.empty(samples * places, np.float32), np.empty(samples * places, np.float32)
    undecided = 0
    for c in range(begin, end):
        for n in range(samples):
            values[n * places : (n + 1) * places] = x[n, c]
        centre, variance, scale, unknown = _centre_and_scale(values, squares, np.float32(eps))
        undecided += unknown
        centres[c], variances[c], scales[c] = _canonical(centre), _canonical(variance), _canonical(scale)
        for n in range(samples):
            row, target = x[n, c], out[n, c]
            for j in range(places):
                target[j] = (row[j] - centre) * scale
            if weight_at != 0:
                factor = weight[c]
                for j in range(places):
                    target[j] = target[j] * factor
            if bias_at != 0:
                shift = bias[c]
                for j in range(places):
                    target[j] = target[j] + shift
            for j in range(places):
                target[j] = _canonical(target[j])
    return undecided


@compiled
def batch_norm_slope_channels(
    begin: Any,
    end: Any,
    grad_at: Any,
    x_at: Any,
    samples: Any,
    channels: Any,
    places: Any,
    centre_at: Any,
    scale_at: Any,
    factor_at: Any,
    out_at: Any,
    weight_out_at: Any,
    bias_out_at: Any,
) -> Any:
    """Gradients of channels [begin, end) of the input, of the weight and of the bias.

    `factor` is the inverse deviation times the weight; a gradient of the input at address 0 is left out.
    """
    shape = (samples, channels, places)
    grad, x, out = floats(grad_at, shape), floats(x_at, shape), floats(out_at, shape)
    centres, scales, factors = floats(centre_at, channels), floats(scale_at, channels), floats(factor_at, channels)
    weight_out, bias_out = floats(weight_out_at, channels), floats(bias_out_at, channels)
    size = samples * places
    incoming, product = np.empty(size, np.float32), np.empty(size, np.float32)
    count = np.float32(size)
    undecided = 0
    for c in range(begin, end):
        centre, scale, factor = centres[c], scales[c], factors[c]
        for n in range(samples):
            incoming[n * places : (n + 1) * places] = grad[n, c]
            row, given, part = x[n, c], grad[n, c], product[n * places : (n + 1) * places]
            for j in range(places):
                part[j] = given[j] * ((row[j] - centre) * scale)
        total, unknown = sum_of(incoming, 1.0)
        undecided += unknown
        projected, unknown = sum_of(product, 1.0)
        undecided += unknown
        weight_out[c], bias_out[c] = projected, total
        if out_at != 0:
            first, second = total / count, projected / count
            for n in range(samples):
                row, given, target = x[n, c], grad[n, c], out[n, c]
                for j in range(places):
                    rest = (given[j] - first) - ((row[j] - centre) * scale) * second
                    target[j] = _canonical(rest * factor)
    return undecided
