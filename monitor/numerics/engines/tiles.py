"""What an engine offers that rounds FP64 results tile by tile, before they leave the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from monitor.numerics.engines.results import Rounding, Settled
from monitor.numerics.geometry import ConvolutionShape

__all__ = ["Tiles"]


class Tiles(Protocol):
    """Operators over FP32 operands, computed in FP64 and rounded; ``factor`` times the norms is β."""

    def multiply(self, a: Tensor, b: Tensor, factor: float, rounding: Rounding) -> Settled:
        """(m, k) × (k, n), or a batch of them."""

    def apply(self, function: Callable[[Tensor], Tensor], x: Tensor, rounding: Rounding) -> Settled:
        """A function of FP64 numbers; β = rounding.relative·|result|."""

    def has(self, shape: ConvolutionShape) -> bool:
        """Whether it has convolutions of this shape."""

    def forward(self, x: Tensor, weight: Tensor, shape: ConvolutionShape, factor: float, rounding: Rounding) -> Settled:
        """Cross-correlation."""

    def grad_input(
        self,
        grad: Tensor,
        x_shape: tuple[int, ...],
        weight: Tensor,
        shape: ConvolutionShape,
        factor: float,
        rounding: Rounding,
    ) -> Settled:
        """Its gradient in the input."""

    def grad_weight(
        self,
        grad: Tensor,
        x: Tensor,
        weight_shape: tuple[int, ...],
        shape: ConvolutionShape,
        factor: float,
        rounding: Rounding,
    ) -> Settled:
        """Its gradient in the weight."""
