"""The ``exact`` backend: order-free kernels, so that no log is needed. Convolutions become matrix products."""

from __future__ import annotations

import torch
from torch import Tensor

from . import exact
from ._backend import ConvolutionShape
from .statistics import Statistics

__all__ = ["ExactBackend"]

_TILE_ELEMENTS = 1 << 24


def _patches(x: Tensor, kernel: tuple[int, ...], shape: ConvolutionShape) -> Tensor:
    """(n, c·kh·kw, places) patches: data movement only."""
    if tuple(kernel) == (1, 1) and shape.stride == (1, 1) and shape.padding == (0, 0):
        return x.reshape(x.shape[0], x.shape[1], -1)
    patches: Tensor = torch.ops.aten.im2col.default(
        x, list(kernel), list(shape.dilation), list(shape.padding), list(shape.stride)
    )
    return patches


def _out_size(x: Tensor, kernel: tuple[int, ...], shape: ConvolutionShape) -> list[int]:
    return [
        (size + 2 * pad - step * (k - 1) - 1) // stride + 1
        for size, k, pad, step, stride in zip(
            x.shape[2:], kernel, shape.padding, shape.dilation, shape.stride, strict=True
        )
    ]


def _one_group(shape: ConvolutionShape) -> ConvolutionShape:
    return ConvolutionShape(stride=shape.stride, padding=shape.padding, dilation=shape.dilation, groups=1)


def _correlate(x: Tensor, weight: Tensor, shape: ConvolutionShape) -> Tensor:
    """One group: rows are patches, columns are filters; tiles of samples bound the memory and change no bit."""
    kernel = tuple(weight.shape[2:])
    out_size = _out_size(x, kernel, shape)
    filters = weight.reshape(weight.shape[0], -1).t()
    per_sample = max(filters.shape[0] * out_size[0] * out_size[1], 1)
    tiles = []
    for part in torch.split(x, max(_TILE_ELEMENTS // per_sample, 1)):
        patches = _patches(part, kernel, shape).transpose(1, 2)
        rows = patches.reshape(-1, filters.shape[0])
        product = exact.matmul(rows, filters).reshape(part.shape[0], -1, weight.shape[0])
        tiles.append(product.transpose(1, 2).reshape(part.shape[0], weight.shape[0], *out_size))
    return torch.cat(tiles)


def _grad_input(grad: Tensor, x_shape: tuple[int, ...], weight: Tensor, shape: ConvolutionShape) -> Tensor:
    """One group: the spread-out, padded gradient correlated with the turned filters; one rounding a result."""
    kernel = tuple(weight.shape[2:])
    n, channels = grad.shape[:2]
    spread_size = [(size - 1) * stride + 1 for size, stride in zip(grad.shape[2:], shape.stride, strict=True)]
    spread = grad.new_zeros((n, channels, *spread_size))
    spread[:, :, :: shape.stride[0], :: shape.stride[1]] = grad
    before = [d * (k - 1) - p for d, k, p in zip(shape.dilation, kernel, shape.padding, strict=True)]
    after = [
        size + d * (k - 1) - left - have
        for size, d, k, left, have in zip(x_shape[2:], shape.dilation, kernel, before, spread_size, strict=True)
    ]
    padded = torch.constant_pad_nd(spread, [before[1], after[1], before[0], after[0]])
    turned = weight.flip(2, 3).transpose(0, 1)
    plain = ConvolutionShape(stride=(1, 1), padding=(0, 0), dilation=shape.dilation, groups=1)
    return _correlate(padded, turned, plain)


def _grad_weight(grad: Tensor, x: Tensor, weight_shape: tuple[int, ...], shape: ConvolutionShape) -> Tensor:
    """One group: a product over samples and places; tiles of input channels bound the memory and change no bit."""
    kernel = tuple(weight_shape[2:])
    left = grad.transpose(0, 1).reshape(grad.shape[1], -1)
    per_channel = max(left.shape[1] * kernel[0] * kernel[1], 1)
    tiles = []
    for part in torch.split(x, max(_TILE_ELEMENTS // per_channel, 1), dim=1):
        columns = _patches(part, kernel, shape).transpose(1, 2)
        tiles.append(exact.matmul(left, columns.reshape(left.shape[1], -1)))
    return torch.cat(tiles, dim=1).reshape(weight_shape)


class ExactBackend:
    """Pure functions of ``monitor.numerics.exact``; the same bits on every device without a log."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._operator = ""

    def begin_call(self, index: int, operator: str) -> None:
        """Counts that follow belong to this operator."""
        self._operator = operator

    def _counted(self, out: Tensor) -> Tensor:
        self._statistics.rounded(self._operator, out.numel(), 0)
        return out

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Integer products of scaled operands (DESIGN 4.1)."""
        return self._counted(exact.matmul(a, b))

    def sum(self, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
        """Correctly rounded."""
        return self._counted(exact.sum(x, dims, keepdim))

    def scatter_rows(self, rows: int, index: Tensor, source: Tensor) -> Tensor:
        """Correctly rounded."""
        return self._counted(exact.scatter_rows(rows, index, source))

    def unary(self, name: str, x: Tensor) -> Tensor:
        """Correctly rounded."""
        return self._counted(exact.unary(name, x))

    def power(self, x: Tensor, y: float) -> Tensor:
        """Correctly rounded."""
        return self._counted(exact.power(x, y))

    def convolution(self, x: Tensor, weight: Tensor, shape: ConvolutionShape) -> Tensor:
        """Matrix product of patches and filters for each group."""
        one = _one_group(shape)
        pairs = zip(x.chunk(shape.groups, 1), weight.chunk(shape.groups), strict=True)
        return self._counted(torch.cat([_correlate(part, filters, one) for part, filters in pairs], dim=1))

    def convolution_grad_input(
        self, grad: Tensor, x_shape: tuple[int, ...], weight: Tensor, shape: ConvolutionShape
    ) -> Tensor:
        """Matrix product of spread-out gradients and turned filters for each group."""
        one = _one_group(shape)
        pairs = zip(grad.chunk(shape.groups, 1), weight.chunk(shape.groups), strict=True)
        return self._counted(torch.cat([_grad_input(part, x_shape, filters, one) for part, filters in pairs], dim=1))

    def convolution_grad_weight(
        self, grad: Tensor, x: Tensor, weight_shape: tuple[int, ...], shape: ConvolutionShape
    ) -> Tensor:
        """Matrix product of gradients and patches for each group."""
        one = _one_group(shape)
        group_shape = (weight_shape[0] // shape.groups, *weight_shape[1:])
        pairs = zip(grad.chunk(shape.groups, 1), x.chunk(shape.groups, 1), strict=True)
        return self._counted(torch.cat([_grad_weight(g, part, group_shape, one) for g, part in pairs]))

    def random_bits(self, seed: int, count: int, like: Tensor) -> Tensor:
        """Philox4x32-10."""
        return exact.philox.bits(seed, 0, count, like.device)
