"""Error bounds of whole results, kept as factors so that a result's size is never spent on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ProductBound", "RelativeBound"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductBound:
    """β of row r and column j of a result seen as (rows, width): left[r mod len]·right[r ÷ rows_per_right, j].

    Attributes:
        left: FP64, 1-D.
        right: FP64, (groups of rows, width).
        rows_per_right: rows of the result for each row of ``right``.
    """

    left: Tensor
    right: Tensor
    rows_per_right: int

    def at(self, positions: Tensor, values: Tensor) -> Tensor:
        """β at flat positions; the values there are not needed."""
        width = self.right.shape[1]
        row = torch.div(positions, width, rounding_mode="floor")
        group = torch.div(row, self.rows_per_right, rounding_mode="floor")
        return self.left[row % len(self.left)] * self.right[group, positions % width]

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
