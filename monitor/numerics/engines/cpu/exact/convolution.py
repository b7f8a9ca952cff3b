"""Large correlations by int8 GEMMs: patches are gathered and split into digits a tile at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from monitor.numerics.engines.capability import INT8_WORK, int8_serves
from monitor.numerics.engines.cpu.exact.int8 import Gathered, Vectors, multiply
from monitor.numerics.engines.cpu.exact.matmul import cpu_matmul, is_sampled
from monitor.numerics.engines.eager.exact import convolution as eager
from monitor.numerics.engines.eager.exact.convolution import Borders, Correlation, Pair, bordered
from monitor.numerics.kernels.workers import workers

__all__ = ["correlate", "weight_sums"]

_PATCHES = 512
_GATHERED_ELEMENTS = 1 << 20


def _canvas(x: Tensor, borders: Borders) -> Tensor:
    """``bordered`` as (n, h, w, c), contiguous."""
    if min(borders) < 0:
        x, borders = bordered(x, borders), (0, 0, 0, 0)
    top, bottom, left, right = borders
    samples, channels, height, width = x.shape
    canvas = x.new_zeros((samples, height + top + bottom, width + left + right, channels))
    canvas[:, top : top + height, left : left + width] = x.permute(0, 2, 3, 1)
    return canvas


def _windows(x: Tensor, kernel: Pair, stride: Pair, dilation: Pair, out_size: Pair) -> Tensor:
    """View (n, oh, ow, kh, kw, c) of padded x (n, h, w, c)."""
    n, line, place, channel = x.stride()
    size = (x.shape[0], *out_size, *kernel, x.shape[3])
    steps = (n, stride[0] * line, stride[1] * place, dilation[0] * line, dilation[1] * place, channel)
    return x.as_strided(size, steps)


def _parts(samples: int, lines: int, places: int, threads: int) -> list[tuple[slice, slice, slice]]:
    """Samples, lines and places of about a tile's width: some samples whole, some lines of one, or some of a line."""
    whole = slice(None)
    if lines * places <= _PATCHES:
        each = min(_PATCHES // (lines * places), -(-samples // threads))
        return [(slice(sample, sample + each), whole, whole) for sample in range(0, samples, each)]
    height = max(_PATCHES // places, 1)
    width = min(places, _PATCHES)
    return [
        (slice(sample, sample + 1), slice(line, line + height), slice(place, place + width))
        for sample in range(samples)
        for line in range(0, lines, height)
        for place in range(0, places, width)
    ]


def _takes_int8(x: Tensor, work: int) -> bool:
    return work >= INT8_WORK and int8_serves(x.device)


def correlate(task: Correlation) -> Tensor:
    """(n, o, oh, ow)."""
    if not _takes_int8(task.x, task.work):
        return eager.correlate(task, cpu_matmul)
    samples, filters, out_size = task.x.shape[0], task.weight.shape[0], task.out_size
    parts = _parts(samples, *out_size, workers(task.work))
    if task.pointwise:
        kept, image = task.weight.reshape(filters, -1), task.image
        pieces = [image[:, *part] for part in parts]
    else:
        kept, canvas = task.weight.permute(0, 2, 3, 1).reshape(filters, -1), _canvas(task.x, task.borders)
        windows = _windows(canvas, task.weight.shape[2:], task.stride, task.dilation, out_size)
        pieces = [windows[part] for part in parts]
    out = torch.empty((samples, filters, *out_size), dtype=torch.float32)
    streamed = Gathered(pieces, 1, kept.shape[1], along=not task.pointwise)
    multiply(Vectors(kept, 0), streamed, out.view(samples, filters, -1), check=is_sampled(task.x, task.weight))
    return out


def _tap_pieces(x: Tensor, kernel: Pair, stride: Pair, dilation: Pair, out_size: Pair) -> list[Tensor]:
    """For each place in the kernel and some channels of padded x (n, c, h, w): what lies below it, (c, n, oh, ow)."""
    sample, channel, line, place = x.stride()
    size = (*kernel, x.shape[1], x.shape[0], *out_size)
    steps = (dilation[0] * line, dilation[1] * place, channel, sample, stride[0] * line, stride[1] * place)
    taps = x.as_strided(size, steps, x.storage_offset())
    width = max(_GATHERED_ELEMENTS // max(x.shape[0] * math.prod(out_size), 1), 1)
    width = max(width // 64 * 64, min(width, 32))
    return [piece for ky in range(kernel[0]) for kx in range(kernel[1]) for piece in torch.split(taps[ky, kx], width)]


def weight_sums(grad: Tensor, x: Tensor, weight_shape: Sequence[int], stride: Pair, dilation: Pair) -> Tensor:
    """Gradient of a correlation in its weight, from bordered x."""
    filters, channels, *kernel = weight_shape
    if not _takes_int8(x, math.prod(weight_shape) * grad[:, 0].numel()):
        return eager.weight_sums(grad, x, weight_shape, stride, dilation, cpu_matmul)
    left = grad.transpose(0, 1).reshape(filters, -1)
    pieces = _tap_pieces(x, kernel, stride, dilation, grad.shape[2:])
    out = torch.empty((1, filters, math.prod(kernel) * channels), dtype=torch.float32)
    streamed = Gathered(pieces, 1, left.shape[1], along=True)
    multiply(Vectors(left, 0), streamed, out, check=is_sampled(x, grad))
    return out.reshape(filters, *kernel, channels).permute(0, 3, 1, 2).contiguous()
