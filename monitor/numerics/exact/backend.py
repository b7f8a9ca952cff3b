"""The ``exact`` backend: order-free kernels, so that no log is needed. Convolutions become matrix products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from monitor.numerics import exact
from monitor.numerics.geometry import ConvolutionShape
from monitor.numerics.statistics import Statistics

__all__ = ["ExactBackend"]


def _window(shape: ConvolutionShape) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """What one group of a convolution needs to know."""
    return shape.stride, shape.padding, shape.dilation


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


class ExactBackend:
    """Pure functions of ``monitor.numerics.exact``; the same bits on every device without a log."""

    def __init__(self, statistics: Statistics, keys: Callable[[], int] | None = None) -> None:
        self.keys = keys
        self._statistics = statistics
        self._operator = ""

    def begin_call(self, index: int, operator: str) -> None:
        """Counts that follow belong to this operator."""
        self._operator = operator

    def count(self, elements: int) -> None:
        """Elements that a fused kernel of the current operator has rounded."""
        if elements:
            self._statistics.rounded(self._operator, elements, 0)

    def uncounted(self) -> ExactBackend:
        """The same functions without the counts, for what a fused kernel counts itself."""
        return ExactBackend(Statistics())

    def _counted(self, out: Tensor) -> Tensor:
        self._statistics.rounded(self._operator, out.numel(), 0)
        return out

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Integer products of scaled operands, as ``exact.matmul`` says."""
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

    def power(self, x: Tensor, y: Tensor | float) -> Tensor:
        """Correctly rounded."""
        return self._counted(exact.power(x, y))

    def convolution(self, x: Tensor, weight: Tensor, shape: ConvolutionShape) -> Tensor:
        """Matrix product of patches and filters for each group."""
        pairs = zip(x.chunk(shape.groups, 1), weight.chunk(shape.groups), strict=True)
        parts = [exact.convolution.correlate(part, filters, *_window(shape)) for part, filters in pairs]
        return self._counted(_joined(parts, 1))

    def convolution_grad_input(
        self, grad: Tensor, x_shape: tuple[int, ...], weight: Tensor, shape: ConvolutionShape
    ) -> Tensor:
        """Matrix product of spread-out gradients and turned filters for each group."""
        pairs = zip(grad.chunk(shape.groups, 1), weight.chunk(shape.groups), strict=True)
        parts = [exact.convolution.grad_input(part, x_shape, filters, *_window(shape)) for part, filters in pairs]
        return self._counted(_joined(parts, 1))

    def convolution_grad_weight(
        self, grad: Tensor, x: Tensor, weight_shape: tuple[int, ...], shape: ConvolutionShape
    ) -> Tensor:
        """Matrix product of gradients and patches for each group."""
        group_shape = (weight_shape[0] // shape.groups, *weight_shape[1:])
        pairs = zip(grad.chunk(shape.groups, 1), x.chunk(shape.groups, 1), strict=True)
        parts = [exact.convolution.grad_weight(g, part, group_shape, *_window(shape)) for g, part in pairs]
        return self._counted(_joined(parts, 0))

    def random_bits(self, seed: int, count: int, like: Tensor) -> Tensor:
        """Philox4x32-10."""
        return exact.philox.bits(seed, 0, count, like.device)
