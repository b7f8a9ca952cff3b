"""What a rounded operator gives back: FP32 values, and the elements that another device may round otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = ["Integers", "Near", "Piece", "Reals", "Rounding", "Settled"]

Reals = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int32]
Piece = tuple[Any, Any, Any]
"""Of one tile: positions, whether they went up, and rows of value, β and distance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """Elements with a midpoint in reach.

    They are rising flat positions, True where the magnitude went up, values, β, and distances from the midpoint.
    """

    positions: npt.NDArray[np.int64]
    upward: npt.NDArray[np.bool_]
    values: Reals
    betas: Reals
    distances: Reals

    @classmethod
    def joined(cls, pieces: Iterable[Piece]) -> Near:
        """The elements of all tiles in rising order."""
        listed = [piece for piece in pieces if len(piece[0])]
        if not listed:
            return _NOTHING
        positions, upward, numbers = listed[0]
        if len(listed) > 1:
            positions, upward, numbers = (np.concatenate(column) for column in zip(*listed, strict=True))
            order = np.argsort(positions)
            positions, upward, numbers = positions[order], upward[order], numbers[order]
        values, betas, distances = numbers.T
        return cls(positions=positions, upward=upward, values=values, betas=betas, distances=distances)


_NOTHING = Near(
    positions=np.empty(0, np.int64),
    upward=np.empty(0, np.bool_),
    values=np.empty(0),
    betas=np.empty(0),
    distances=np.empty(0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A rounded result and its elements with a midpoint in reach."""

    out: Tensor
    near: Near


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """Grid and reach: elements whose midpoint lies within ``multiple``·β are listed.

    Attributes:
        exact_bits: a sum of products is exact where the spans of row and column add up to at most this.
    """

    multiple: float
    grid_bits: int
    exact_bits: int = -1
    relative: float = 0.0
