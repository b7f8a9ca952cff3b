"""The engine for processors: compiled kernels, int8 and FP64 GEMMs, several threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from monitor.numerics.engines.capability import INT8_WORK, int8_serves
from monitor.numerics.engines.cpu import rounded
from monitor.numerics.engines.cpu.exact import convolution, functions, philox, sums
from monitor.numerics.engines.cpu.exact.matmul import cpu_matmul
from monitor.numerics.engines.cpu.rounded.sums import order_free_sum_64
from monitor.numerics.engines.eager.engine import EagerEngine
from monitor.numerics.engines.eager.exact.convolution import Correlation
from monitor.numerics.engines.tiles import Tiles

__all__ = ["CpuEngine"]


class CpuEngine(EagerEngine):
    """What kernels leave undecided, or decline, the eager engine computes."""

    clamps = True
    tiles = cast(Tiles, rounded)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """As there."""
        return cpu_matmul(a, b)

    def correlate(self, task: Correlation) -> Tensor:
        """As there."""
        return convolution.correlate(task) if _takes_int8(task.x, task.work) else super().correlate(task)

    def weight_sums(
        self, grad: Tensor, x: Tensor, weight_shape: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
    ) -> Tensor:
        """As there."""
        if _takes_int8(x, math.prod(weight_shape) * grad[:, 0].numel()):
            return convolution.weight_sums(grad, x, weight_shape, stride, dilation)
        return super().weight_sums(grad, x, weight_shape, stride, dilation)

    def sum(self, blocks: Tensor, divisor: int) -> Tensor:
        """As there."""
        return sums.sum_blocks(blocks.contiguous(), divisor)

    def accumulate(self, base: Tensor | None, rows: int, slots: Tensor, source: Tensor) -> Tensor:
        """As there."""
        return sums.accumulate(base, rows, slots, source)

    def unary(self, name: str, x: Tensor) -> Tensor:
        """As there."""
        return functions.unary(name, x)

    def power(self, x: Tensor, y: Tensor) -> Tensor:
        """As there."""
        return functions.power(x, y)

    def bits(self, key: int, counter: int, count: int, device: torch.device) -> Tensor:
        """As there."""
        return philox.bits(key, counter, count)

    def normal(self, words: Tensor) -> Tensor:
        """As there."""
        return functions.normal(words)

    def order_free_total(self, x: Tensor, dims: list[int]) -> Tensor:
        """As there."""
        found = order_free_sum_64(x, dims) if x.dtype == torch.float32 else None
        return super().order_free_total(x, dims) if found is None else found


def _takes_int8(x: Tensor, work: int) -> bool:
    return work >= INT8_WORK and int8_serves(x.device)
