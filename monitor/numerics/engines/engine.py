"""What an engine is: the primitives of the numerics for one kind of device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from monitor.numerics.engines.results import Settled
from monitor.numerics.geometry import ConvolutionShape

__all__ = ["Engine", "Tiles"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Operators over FP32 operands, computed in FP64 and rounded tile by tile, before results leave the cache.

    The last argument of each is the ``Rounding``; the one before, but for ``apply``, is β in units of the norms.

    Attributes:
        multiply: a (m, k) × b (k, n), or a batch of them.
        apply: a function of FP64 numbers, and x; β = rounding.relative·|result|.
        has: whether there are convolutions of that shape.
        forward: cross-correlation of x and weight, given the shape.
        grad_input: from grad, x's shape, weight and the shape.
        grad_weight: from grad, x, weight's shape and the shape.
    """

    multiply: Callable[..., Settled]
    apply: Callable[..., Settled]
    has: Callable[[ConvolutionShape], bool]
    forward: Callable[..., Settled]
    grad_input: Callable[..., Settled]
    grad_weight: Callable[..., Settled]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Primitives over FP32 tensors whose shapes and types callers have checked. All engines give the same bits.

    Attributes:
        matmul: a (B, M, K) × b (B, K, N), no size 0, as ``exact.matmul`` says.
        bf16_matmul: the same for BF16 a and b, as ``exact.bf16_matmul`` says.
        correlate: (n, o, oh, ow) of a ``Correlation``.
        weight_sums: gradient of a correlation in its weight, from grad, x with its borders, the weight's shape, stride
            and dilation.
        sum: of blocks (O, N, I) over N, each divided by a whole number before the one rounding: O·I numbers.
        scatter_rows: so many rows, each the sum of the rows of a source (n, D) whose slot (n,) it is.
        unary: a function of ``exact.UNARY_FUNCTIONS`` by name.
        power: x**y, for y of x's shape or of one element.
        bits: words of a Philox stream, int64, from key, counter, count and device.
        order_free_total: FP64 sums over dimensions, which are kept with length 1, as ``rounding.sums`` says.
        clamps: torch's own clamp keeps a number that equals a limit, and so the sign of a zero.
        tiles: for ``rounded``; None where FP64 results are rounded whole.
    """

    matmul: Callable[[Tensor, Tensor], Tensor]
    bf16_matmul: Callable[[Tensor, Tensor], Tensor]
    correlate: Callable[..., Tensor]
    weight_sums: Callable[..., Tensor]
    sum: Callable[[Tensor, int], Tensor]
    scatter_rows: Callable[[int, Tensor, Tensor], Tensor]
    unary: Callable[[str, Tensor], Tensor]
    power: Callable[[Tensor, Tensor], Tensor]
    bits: Callable[[int, int, int, torch.device], Tensor]
    order_free_total: Callable[[Tensor, list[int]], Tensor]
    clamps: bool = False
    tiles: Tiles | None = None
