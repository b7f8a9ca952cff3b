"""The engine for any device: eager PyTorch alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from monitor.numerics.engines.eager.exact import convolution, functions, philox, sums
from monitor.numerics.engines.eager.exact.convolution import Correlation
from monitor.numerics.engines.eager.exact.matmul import eager_matmul
from monitor.numerics.engines.eager.rounded.sums import order_free_total
from monitor.numerics.engines.tiles import Tiles

__all__ = ["EagerEngine"]


class EagerEngine:
    """Primitives of the numerics. Another engine overrides what it has faster means for, and never a bit.

    All tensors are FP32 unless stated. Callers have checked shapes and types.

    Attributes:
        clamps: torch's own clamp keeps a number that equals a limit, and so the sign of a zero.
        tiles: rounds FP64 results tile by tile; None where they are rounded whole.
    """

    clamps: bool = False
    tiles: Tiles | None = None

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """(B, M, K) × (B, K, N), no size 0, as ``exact.matmul`` says."""
        return eager_matmul(a, b)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """(M, K) × (K, N), of any size."""
        if not a.numel() or not b.numel():
            return a.new_zeros((a.shape[0], b.shape[1]))
        return self.matmul(a[None], b[None])[0]

    def correlate(self, task: Correlation) -> Tensor:
        """(n, o, oh, ow)."""
        return convolution.correlate(task, self.product)

    def weight_sums(
        self, grad: Tensor, x: Tensor, weight_shape: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
    ) -> Tensor:
        """Gradient of a correlation in its weight, from x with its borders."""
        return convolution.weight_sums(grad, x, weight_shape, stride, dilation, self.product)

    def sum(self, blocks: Tensor, divisor: int) -> Tensor:
        """Sums of (O, N, I) over N, each divided by ``divisor`` before the one rounding: O·I numbers."""
        return sums.sum_rows(blocks.transpose(1, 2).reshape(-1, blocks.shape[1]), divisor)

    def accumulate(self, base: Tensor | None, rows: int, slots: Tensor, source: Tensor) -> Tensor:
        """(rows, D) ``base``, or zeros, plus ``source`` (n, D) at the rows ``slots`` (n,), rounded once."""
        start = source.new_zeros((rows, source.shape[1])) if base is None else base
        return sums.accumulate(start, slots, source)

    def unary(self, name: str, x: Tensor) -> Tensor:
        """A correctly rounded function of ``exact.UNARY_FUNCTIONS``."""
        return functions.unary(name, x)

    def power(self, x: Tensor, y: Tensor) -> Tensor:
        """Correctly rounded x**y, for y of x's shape or of one element."""
        return functions.power(x, y)

    def bits(self, key: int, counter: int, count: int, device: torch.device) -> Tensor:
        """Words of a Philox stream, int64."""
        return philox.bits(key, counter, count, device)

    def normal(self, words: Tensor) -> Tensor:
        """Normal numbers from an even number of words."""
        return philox.normal(words)

    def order_free_total(self, x: Tensor, dims: list[int]) -> Tensor:
        """FP64 sums over ``dims``, which are kept with length 1, as ``rounding.sums`` says."""
        return order_free_total(x, dims)
