"""2-D convolutions as order-free matrix products of filters and patches: sums are exact, so their order is free too.

Rows and columns of the products are scaled as `matmul` says: a patch and a filter each have a scale of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from monitor.numerics.exact._cpu_engine import INT8_WORK, int8_serves, is_sampled
from monitor.numerics.exact._int8_engine import Gathered, Vectors, multiply
from monitor.numerics.exact.matmul import matmul

__all__ = ["correlate", "grad_input", "grad_weight"]

_TILE_ELEMENTS = 1 << 24
_PATCHES = 256
_GATHERED_ELEMENTS = 1 << 20

Pair = Sequence[int]


def _out_size(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> list[int]:
    return [
        (size + 2 * pad - step * (k - 1) - 1) // stride + 1
        for size, k, pad, step, stride in zip(x.shape[2:], kernel, padding, dilation, stride, strict=True)
    ]


def _pad(x: Tensor, padding: Pair) -> Tensor:
    """Zeros around the last two dimensions."""
    return torch.constant_pad_nd(x, [padding[1], padding[1], padding[0], padding[0]]) if any(padding) else x


def _serves_int8(x: Tensor, work: int) -> bool:
    return x.device.type == "cpu" and work >= INT8_WORK and int8_serves()


def _planes(x: Tensor) -> Tensor:
    """(n, c, h, w) as (c, n·h·w), contiguous."""
    return x.transpose(0, 1).reshape(x.shape[1], -1).contiguous()


def _pointwise(kernel: Pair, padding: Pair) -> bool:
    return tuple(kernel) == (1, 1) and not any(padding)


def _im2col(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """(n, c·kh·kw, places) patches: data movement only."""
    patches: Tensor = torch.ops.aten.im2col.default(x, list(kernel), list(dilation), list(padding), list(stride))
    return patches


def _windows(x: Tensor, kernel: Pair, stride: Pair, dilation: Pair, out_size: Pair) -> Tensor:
    """View (n, oh, ow, kh, kw, c) of padded x (n, h, w, c)."""
    n, line, place, channel = x.stride()
    size = (x.shape[0], *out_size, *kernel, x.shape[3])
    steps = (n, stride[0] * line, stride[1] * place, dilation[0] * line, dilation[1] * place, channel)
    return x.as_strided(size, steps)


def _patch_pieces(windows: Tensor) -> list[Tensor]:
    """Pieces of about as many patches as a tile is wide: some lines of one sample, or some samples."""
    samples, lines, places = windows.shape[:3]
    if lines * places <= _PATCHES:
        return list(torch.split(windows, max(_PATCHES // (lines * places), 1)))
    height = max(_PATCHES // places, 1)
    return [piece for sample in range(samples) for piece in torch.split(windows[sample], height)]


def correlate(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """Cross-correlation of FP32 x (n, c, h, w) and weight (o, c, kh, kw), as (n, o, oh, ow)."""
    kernel, filters = weight.shape[2:], weight.shape[0]
    out_size = _out_size(x, kernel, stride, padding, dilation)
    places = x.shape[0] * math.prod(out_size)
    if _pointwise(kernel, padding):
        planes = _planes(x[:, :, :: stride[0], :: stride[1]])
        out = matmul(weight.reshape(filters, -1), planes)
    elif _serves_int8(x, weight.numel() * places):
        windows = _windows(_pad(x, padding).permute(0, 2, 3, 1).contiguous(), kernel, stride, dilation, out_size)
        out = torch.empty((filters, places), dtype=torch.float32)
        kept = Vectors(weight.permute(0, 2, 3, 1).reshape(filters, -1), 0)
        streamed = Gathered(_patch_pieces(windows), 1, kept.length)
        multiply(kept, streamed, out, check=is_sampled(x, weight))
    else:
        return _correlate_tiled(x, weight, stride, padding, dilation, out_size)
    return out.reshape(filters, x.shape[0], *out_size).transpose(0, 1).contiguous()


def _correlate_tiled(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair, out_size: Pair) -> Tensor:
    """For any device: tiles of samples bound the memory and change no bit."""
    filters = weight.reshape(weight.shape[0], -1).t()
    per_sample = max(filters.shape[0] * math.prod(out_size), 1)
    tiles = []
    for part in torch.split(x, max(_TILE_ELEMENTS // per_sample, 1)):
        patches = _im2col(part, weight.shape[2:], stride, padding, dilation).transpose(1, 2)
        product = matmul(patches.reshape(-1, filters.shape[0]), filters).reshape(part.shape[0], -1, weight.shape[0])
        tiles.append(product.transpose(1, 2).reshape(part.shape[0], weight.shape[0], *out_size))
    return torch.cat(tiles)


def grad_input(
    grad: Tensor, x_shape: Sequence[int], weight: Tensor, stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Gradient of `correlate` in x: the spread-out gradient correlated with the turned filters."""
    kernel = weight.shape[2:]
    turned = weight.flip(2, 3).transpose(0, 1)
    if _pointwise(kernel, padding):
        product = correlate(grad, turned, (1, 1), (0, 0), (1, 1))
        if tuple(stride) == (1, 1):
            return product
        out = grad.new_zeros((*product.shape[:2], *x_shape[2:]))
        out[:, :, :: stride[0], :: stride[1]] = product
        return out
    spread_size = [(size - 1) * step + 1 for size, step in zip(grad.shape[2:], stride, strict=True)]
    spread = grad.new_zeros((*grad.shape[:2], *spread_size))
    spread[:, :, :: stride[0], :: stride[1]] = grad
    before = [d * (k - 1) - p for d, k, p in zip(dilation, kernel, padding, strict=True)]
    after = [
        size + d * (k - 1) - left - have
        for size, d, k, left, have in zip(x_shape[2:], dilation, kernel, before, spread_size, strict=True)
    ]
    padded = torch.constant_pad_nd(spread, [before[1], after[1], before[0], after[0]])
    return correlate(padded, turned, (1, 1), (0, 0), dilation)


def _tap_pieces(x: Tensor, kernel: Pair, stride: Pair, dilation: Pair, out_size: Pair) -> list[Tensor]:
    """For each place in the kernel and some channels of padded x (c, n, h, w): what lies below it, (c, n, oh, ow)."""
    channel, sample, line, place = x.stride()
    size = (*kernel, *x.shape[:2], *out_size)
    steps = (dilation[0] * line, dilation[1] * place, channel, sample, stride[0] * line, stride[1] * place)
    taps = x.as_strided(size, steps)
    width = max(_GATHERED_ELEMENTS // max(x.shape[1] * math.prod(out_size), 1), 1)
    width = max(width // 64 * 64, min(width, 32))
    return [piece for ky in range(kernel[0]) for kx in range(kernel[1]) for piece in torch.split(taps[ky, kx], width)]


def grad_weight(
    grad: Tensor, x: Tensor, weight_shape: Sequence[int], stride: Pair, padding: Pair, dilation: Pair
) -> Tensor:
    """Gradient of `correlate` in the weight: a product over samples and places."""
    filters, channels, *kernel = weight_shape
    left = _planes(grad)
    if _pointwise(kernel, padding):
        planes = _planes(x[:, :, :: stride[0], :: stride[1]][:, :, : grad.shape[2], : grad.shape[3]])
        return matmul(left, planes.t()).reshape(tuple(weight_shape))
    if _serves_int8(x, math.prod(weight_shape) * left.shape[1]):
        padded = _pad(x, padding).transpose(0, 1).contiguous()
        pieces = _tap_pieces(padded, kernel, stride, dilation, grad.shape[2:])
        out = torch.empty((filters, math.prod(kernel) * channels), dtype=torch.float32)
        multiply(Vectors(left, 0), Gathered(pieces, 1, left.shape[1]), out, check=is_sampled(x, grad))
        return out.reshape(filters, *kernel, channels).permute(0, 3, 1, 2).contiguous()
    per_channel = max(left.shape[1] * math.prod(kernel), 1)
    tiles = []
    for part in torch.split(x, max(_TILE_ELEMENTS // per_channel, 1), dim=1):
        columns = _im2col(part, kernel, stride, padding, dilation).transpose(1, 2)
        tiles.append(matmul(left, columns.reshape(left.shape[1], -1)))
    return torch.cat(tiles, dim=1).reshape(tuple(weight_shape))
