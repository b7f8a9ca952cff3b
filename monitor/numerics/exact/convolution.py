"""2-D convolutions as order-free matrix products of filters and patches: sums are exact, so their order is free too.

Rows and columns of the products are scaled as `matmul` says: a patch and a filter each have a scale of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from monitor.numerics.engines.capability import int8_serves
from monitor.numerics.engines.cpu.exact.int8 import Gathered, Vectors, multiply
from monitor.numerics.engines.cpu.exact.matmul import is_sampled
from monitor.numerics.engines.eager.exact.matmul import INT8_WORK
from monitor.numerics.exact.matmul import matmul
from monitor.numerics.kernels.workers import workers

__all__ = ["correlate", "grad_input", "grad_weight"]

_TILE_ELEMENTS = 1 << 24
_PATCHES = 512
_GATHERED_ELEMENTS = 1 << 20

Pair = Sequence[int]
Borders = tuple[int, int, int, int]


def _bordered(x: Tensor, borders: Borders) -> Tensor:
    """Zeros above, below, left and right of (n, c, h, w); a negative border cuts off, zeros as well."""
    if not any(borders):
        return x
    top, bottom, left, right = (max(border, 0) for border in borders)
    x = torch.constant_pad_nd(x, [left, right, top, bottom])
    top, bottom, left, right = (max(-border, 0) for border in borders)
    return x[:, :, top : x.shape[2] - bottom, left : x.shape[3] - right]


def _canvas(x: Tensor, borders: Borders) -> Tensor:
    """``_bordered`` as (n, h, w, c), contiguous."""
    if min(borders) < 0:
        x, borders = _bordered(x, borders), (0, 0, 0, 0)
    top, bottom, left, right = borders
    samples, channels, height, width = x.shape
    canvas = x.new_zeros((samples, height + top + bottom, width + left + right, channels))
    canvas[:, top : top + height, left : left + width] = x.permute(0, 2, 3, 1)
    return canvas


def _serves_int8(x: Tensor, work: int) -> bool:
    return x.device.type == "cpu" and work >= INT8_WORK and int8_serves(x.device)


def _im2col(x: Tensor, kernel: Pair, stride: Pair, dilation: Pair) -> Tensor:
    """(n, c·kh·kw, places) patches: data movement only."""
    patches: Tensor = torch.ops.aten.im2col.default(x, list(kernel), list(dilation), [0, 0], list(stride))
    return patches


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


def correlate(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """Cross-correlation of FP32 x (n, c, h, w) and weight (o, c, kh, kw), as (n, o, oh, ow)."""
    borders = (padding[0], padding[0], padding[1], padding[1])
    return _correlate(x, weight, stride, borders, dilation)


def _correlate(x: Tensor, weight: Tensor, stride: Pair, borders: Borders, dilation: Pair) -> Tensor:
    kernel, filters, samples = weight.shape[2:], weight.shape[0], x.shape[0]
    room = (x.shape[2] + borders[0] + borders[1], x.shape[3] + borders[2] + borders[3])
    out_size = [
        (size - gap * (k - 1) - 1) // step + 1
        for size, k, step, gap in zip(room, kernel, stride, dilation, strict=True)
    ]
    pointwise = tuple(kernel) == (1, 1) and not any(borders)
    image = x[:, :, :: stride[0], :: stride[1]].transpose(0, 1) if pointwise else x
    work = weight.numel() * samples * math.prod(out_size)
    if _serves_int8(x, work):
        parts = _parts(samples, out_size[0], out_size[1], workers(work))
        if pointwise:
            kept, pieces = weight.reshape(filters, -1), [image[:, *part] for part in parts]
        else:
            windows = _windows(_canvas(x, borders), kernel, stride, dilation, out_size)
            kept, pieces = weight.permute(0, 2, 3, 1).reshape(filters, -1), [windows[part] for part in parts]
        out = torch.empty((samples, filters, *out_size), dtype=torch.float32)
        streamed = Gathered(pieces, 1, kept.shape[1], along=not pointwise)
        multiply(Vectors(kept, 0), streamed, out.view(samples, filters, -1), check=is_sampled(x, weight))
        return out
    if pointwise:
        out = matmul(weight.reshape(filters, -1), image.reshape(image.shape[0], -1))
        return out.reshape(filters, samples, *out_size).transpose(0, 1).contiguous()
    return _correlate_tiled(_bordered(x, borders), weight, stride, dilation, out_size)


def _correlate_tiled(x: Tensor, weight: Tensor, stride: Pair, dilation: Pair, out_size: Pair) -> Tensor:
    """For any device: tiles of samples bound the memory and change no bit."""
    filters = weight.reshape(weight.shape[0], -1).t()
    per_sample = max(filters.shape[0] * math.prod(out_size), 1)
    tiles = []
    for part in torch.split(x, max(_TILE_ELEMENTS // per_sample, 1)):
        patches = _im2col(part, weight.shape[2:], stride, dilation).transpose(1, 2)
        product = matmul(patches.reshape(-1, filters.shape[0]), filters).reshape(part.shape[0], -1, weight.shape[0])
        tiles.append(product.transpose(1, 2).reshape(part.shape[0], weight.shape[0], *out_size))
    return torch.cat(tiles)


def grad_input(
    grad: Tensor, x_shape: Sequence[int], weight: Tensor, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Gradient of `correlate` in x: the spread-out gradient correlated with the turned filters."""
    kernel = weight.shape[2:]
    turned = weight.flip(2, 3).transpose(0, 1)
    if tuple(kernel) == (1, 1) and not any(padding):
        product = _correlate(grad, turned, (1, 1), (0, 0, 0, 0), (1, 1))
        return product if tuple(stride) == (1, 1) else _spread(product, stride, x_shape[2:])
    size = [(size - 1) * step + 1 for size, step in zip(grad.shape[2:], stride, strict=True)]
    before = [gap * (k - 1) - pad for gap, k, pad in zip(dilation, kernel, padding, strict=True)]
    after = [
        whole + gap * (k - 1) - first - have
        for whole, gap, k, first, have in zip(x_shape[2:], dilation, kernel, before, size, strict=True)
    ]
    spread = grad if tuple(stride) == (1, 1) else _spread(grad, stride, size)
    return _correlate(spread, turned, (1, 1), (before[0], after[0], before[1], after[1]), dilation)


def _spread(x: Tensor, stride: Pair, size: Pair) -> Tensor:
    """x (n, c, h, w) at every stride-th place of zeros (n, c, *size)."""
    out = x.new_zeros((*x.shape[:2], *size))
    out[:, :, :: stride[0], :: stride[1]] = x
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


def grad_weight(
    grad: Tensor, x: Tensor, weight_shape: Sequence[int], stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Gradient of `correlate` in the weight: a product over samples and places."""
    filters, channels, *kernel = weight_shape
    left = grad.transpose(0, 1).reshape(filters, -1)
    if tuple(kernel) == (1, 1) and not any(padding):
        image = x[:, :, :: stride[0], :: stride[1]][:, :, : grad.shape[2], : grad.shape[3]]
        return matmul(left, image.transpose(0, 1).reshape(channels, -1).t()).reshape(tuple(weight_shape))
    padded = _bordered(x, (padding[0], padding[0], padding[1], padding[1]))
    if _serves_int8(x, math.prod(weight_shape) * left.shape[1]):
        pieces = _tap_pieces(padded, kernel, stride, dilation, grad.shape[2:])
        out = torch.empty((1, filters, math.prod(kernel) * channels), dtype=torch.float32)
        streamed = Gathered(pieces, 1, left.shape[1], along=True)
        multiply(Vectors(left, 0), streamed, out, check=is_sampled(x, grad))
        return out.reshape(filters, *kernel, channels).permute(0, 3, 1, 2).contiguous()
    per_channel = max(left.shape[1] * math.prod(kernel), 1)
    tiles = []
    for part in torch.split(padded, max(_TILE_ELEMENTS // per_channel, 1), dim=1):
        columns = _im2col(part, kernel, stride, dilation).transpose(1, 2)
        tiles.append(matmul(left, columns.reshape(left.shape[1], -1)))
    return torch.cat(tiles, dim=1).reshape(tuple(weight_shape))
