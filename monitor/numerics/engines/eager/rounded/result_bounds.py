"""Error bounds of whole results, kept as factors so that a result's size is never spent on them.

The factor c(K) of a bound is ``monitor.numerics.rounding.bounds.Bound.of_products``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from monitor.numerics.engines.eager.rounded.norms import norms, spans

__all__ = ["ProductBound", "RelativeBound", "exact_bits_of", "product_bound"]


def exact_bits_of(terms: int, compute: str) -> int:
    """Sum of two spans up to which every sum of ``terms`` products is exact in any order, or −1 where none is.

    With spans s and t all products are integers below 2^(s+t) times one power of two, so every partial sum is an
    integer below terms·2^(s+t), which FP64 holds up to 2^53. In FP32 such products may underflow.
    """
    return 53 - (terms - 1).bit_length() if compute == "float64" else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductBound:
    """β of row r and column j of a result seen as (rows, width): left[r mod len]·right[r ÷ rows_per_right, j].

    β is 0 where left_spans[r mod len] + right_spans[r ÷ rows_per_right, j] ≤ exact_bits: the result is exact.

    Attributes:
        left: FP64, 1-D.
        right: FP64, (groups of rows, width).
        left_spans: integers in the shape of ``left``.
        right_spans: integers in the shape of ``right``.
        rows_per_right: rows of the result for each row of ``right``.
    """

    left: Tensor
    right: Tensor
    left_spans: Tensor
    right_spans: Tensor
    rows_per_right: int
    exact_bits: int

    def at(self, positions: Tensor, values: Tensor) -> Tensor:
        """β at flat positions; the values there are not needed."""
        width = self.right.shape[1]
        rows = torch.div(positions, width, rounding_mode="floor")
        row, column = rows % len(self.left), positions % width
        group = torch.div(rows, self.rows_per_right, rounding_mode="floor")
        beta = self.left[row] * self.right[group, column]
        exact = self.left_spans[row] + self.right_spans[group, column] <= self.exact_bits
        return beta.masked_fill_(exact, 0.0)

    def dense(self, v: Tensor) -> Tensor:
        """β in the shape of ``v``."""
        return self.at(torch.arange(v.numel(), device=v.device), v).reshape(v.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeBound:
    """β = factor·|v|, which never sets the grid: it differs between devices by a relative ``factor`` of itself."""

    factor: float

    def at(self, positions: Tensor, values: Tensor) -> Tensor:
        """β of the values at flat positions."""
        return values.abs() * self.factor

    def dense(self, v: Tensor) -> Tensor:
        """β in the shape of ``v``."""
        return v.abs() * self.factor


def product_bound(a: Tensor, b: Tensor, factor: float, exact_bits: int) -> ProductBound:
    """β = factor·‖row‖·‖column‖ of a product (m, k) × (k, n), or of a batch of them."""
    columns, column_spans = norms(b, -2), spans(b, [-2])
    return ProductBound(
        left=(norms(a, -1) * factor).reshape(-1),
        right=columns.reshape(-1, columns.shape[-1]),
        left_spans=spans(a, [-1]).reshape(-1),
        right_spans=column_spans.reshape(-1, columns.shape[-1]),
        rows_per_right=max(a.shape[-2], 1),
        exact_bits=exact_bits,
    )
