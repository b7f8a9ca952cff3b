"""Correlations as matrix products of filters and patches, tile by tile, on any device."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from monitor.numerics.engines.eager.exact.matmul import eager_matmul
from monitor.numerics.geometry import places

__all__ = ["Borders", "Correlation", "Pair", "bordered", "correlate", "weight_sums"]

_TILE_ELEMENTS = 1 << 24
"""Of the patches of a tile, which bounds the memory and changes no bit."""

Pair = Sequence[int]
Borders = tuple[int, int, int, int]
Batched = Callable[[Tensor, Tensor], Tensor]


def bordered(x: Tensor, borders: Borders) -> Tensor:
    """Zeros above, below, left and right of (n, c, h, w); a negative border cuts off, zeros as well."""
    if not any(borders):
        return x
    top, bottom, left, right = (max(border, 0) for border in borders)
    x = torch.constant_pad_nd(x, [left, right, top, bottom])
    top, bottom, left, right = (max(-border, 0) for border in borders)
    return x[:, :, top : x.shape[2] - bottom, left : x.shape[3] - right]


@dataclass(frozen=True, kw_only=True)
class Correlation:
    """Cross-correlation of FP32 x (n, c, h, w) within borders of zeros and weight (o, c, kh, kw)."""

    x: Tensor
    weight: Tensor
    stride: Pair
    borders: Borders
    dilation: Pair

    @functools.cached_property
    def out_size(self) -> tuple[int, int]:
        """Height and width of the result."""
        top, bottom, left, right = self.borders
        each = zip(self.x.shape[2:], self.weight.shape[2:], self.stride, self.dilation, strict=True)
        height, width = (places(*axis, zeros) for axis, zeros in zip(each, (top + bottom, left + right), strict=True))
        return height, width

    @property
    def work(self) -> int:
        """Multiplications."""
        return self.weight.numel() * self.x.shape[0] * math.prod(self.out_size)

    @property
    def pointwise(self) -> bool:
        """Each result sees one place of the input."""
        return tuple(self.weight.shape[2:]) == (1, 1) and not any(self.borders)

    @property
    def image(self) -> Tensor:
        """What the filters of a pointwise one see, (c, n, oh, ow)."""
        return self.x[:, :, :: self.stride[0], :: self.stride[1]].transpose(0, 1)


def _im2col(x: Tensor, kernel: Pair, stride: Pair, dilation: Pair) -> Tensor:
    """(n, c·kh·kw, places) patches: data movement only."""
    patches: Tensor = torch.ops.aten.im2col.default(x, list(kernel), list(dilation), [0, 0], list(stride))
    return patches


def _product(a: Tensor, b: Tensor, matmul: Batched) -> Tensor:
    """(M, K) × (K, N) of any size."""
    return matmul(a[None], b[None])[0] if a.numel() and b.numel() else a.new_zeros((a.shape[0], b.shape[1]))


def correlate(task: Correlation, matmul: Batched = eager_matmul) -> Tensor:
    """(n, o, oh, ow), by an engine's product of batches of matrices."""
    count, filters, out_size = task.x.shape[0], task.weight.reshape(task.weight.shape[0], -1), task.out_size
    if task.pointwise:
        out = _product(filters, task.image.reshape(task.x.shape[1], -1), matmul)
        return out.reshape(len(filters), count, *out_size).transpose(0, 1).contiguous()
    x, turned = bordered(task.x, task.borders), filters.t()
    per_sample = max(turned.shape[0] * math.prod(out_size), 1)
    tiles = []
    for part in torch.split(x, max(_TILE_ELEMENTS // per_sample, 1)):
        patches = _im2col(part, task.weight.shape[2:], task.stride, task.dilation).transpose(1, 2)
        product = _product(patches.reshape(-1, turned.shape[0]), turned, matmul)
        product = product.reshape(part.shape[0], -1, len(filters)).transpose(1, 2)
        tiles.append(product.reshape(part.shape[0], len(filters), *out_size))
    return torch.cat(tiles)


def weight_sums(
    grad: Tensor,
    x: Tensor,
    weight_shape: Sequence[int],
    stride: Pair,
    dilation: Pair,
    matmul: Batched = eager_matmul,
) -> Tensor:
    """Gradient of a correlation in its weight, from bordered x: a product over samples and places."""
    filters, _, *kernel = weight_shape
    left = grad.transpose(0, 1).reshape(filters, -1)
    reach = [
        (size - 1) * step + gap * (k - 1) + 1
        for size, step, gap, k in zip(grad.shape[2:], stride, dilation, kernel, strict=True)
    ]
    x = x[:, :, : reach[0], : reach[1]]  # what an output's padding adds behind is seen by no place of the gradient
    per_channel = max(left.shape[1] * math.prod(kernel), 1)
    tiles = []
    for part in torch.split(x, max(_TILE_ELEMENTS // per_channel, 1), dim=1):
        columns = _im2col(part, kernel, stride, dilation).transpose(1, 2)
        tiles.append(_product(left, columns.reshape(left.shape[1], -1), matmul))
    return torch.cat(tiles, dim=1).reshape(tuple(weight_shape))
