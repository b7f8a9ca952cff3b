"""What a rounded operator gives back: FP32 values, and the elements that another device may round otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

__all__ = ["Integers", "Near", "Reals", "Rounding", "Settled"]

Reals = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Near:
    """Elements with a midpoint in reach: rising flat positions, True where the magnitude went up, values and β."""

    positions: npt.NDArray[np.int64]
    upward: npt.NDArray[np.bool_]
    values: Reals
    betas: Reals

    @classmethod
    def joined(cls, pieces: Iterable[tuple[Any, Any, Any, Any]]) -> Near:
        """The elements of all tiles in rising order."""
        listed = [piece for piece in pieces if len(piece[0])]
        if not listed:
            return cls(
                positions=np.empty(0, np.int64), upward=np.empty(0, np.bool_), values=np.empty(0), betas=np.empty(0)
            )
        positions, upward, values, betas = (np.concatenate(column) for column in zip(*listed, strict=True))
        order = np.argsort(positions)
        return cls(positions=positions[order], upward=upward[order], values=values[order], betas=betas[order])


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
