"""Tiles of results on the CPU: widened operands with their bounds, and elements near a midpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from monitor.numerics.engines.cpu.rounded import operand_kernels as _operand_kernels
from monitor.numerics.engines.cpu.rounded.settle_kernels import POWERS, settle_tile
from monitor.numerics.engines.results import Integers, Near, Piece, Reals, Rounding, Settled
from monitor.numerics.kernels.arrays import array
from monitor.numerics.kernels.scratch import scratch

__all__ = ["Bounds", "Operand", "flat", "settle", "settle_whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """β of a tile: left[r]·right[r ÷ rows_per_right, j], and the spans that may show it to be 0."""

    left: Reals
    left_spans: Integers
    right: Reals
    right_spans: Integers
    rows_per_right: int


def flat(x: Tensor) -> npt.NDArray[Any]:
    """The memory of a contiguous tensor."""
    return array(x.detach()).reshape(-1)


def settle(
    v: Reals, rows: int, width: int, bounds: Bounds, rounding: Rounding, out: npt.NDArray[np.float32],
    *, v_base: int = 0, v_stride: int = 0, v_jump: int = 0, out_base: int = 0, out_stride: int = 0, out_jump: int = 0,
) -> Piece:  # fmt: skip
    """Round a tile of flat ``v`` into flat ``out``; strides default to the width, jumps to what a group's rows take."""
    v_stride, out_stride = v_stride or width, out_stride or width
    found: Piece = settle_tile(
        v,
        v.view(np.int64),
        v_base,
        v_stride,
        v_jump or bounds.rows_per_right * v_stride,
        rows,
        width,
        bounds.left,
        bounds.left_spans,
        bounds.right,
        bounds.right_spans,
        bounds.rows_per_right,
        rounding.exact_bits,
        rounding.relative,
        rounding.multiple,
        rounding.grid_bits,
        POWERS,
        out,
        out_base,
        out_stride,
        out_jump or bounds.rows_per_right * out_stride,
    )
    return found


def settle_whole(v: Tensor, bounds: Bounds, rounding: Rounding) -> Settled:
    """Round a contiguous FP64 result that lies in memory already."""
    out = torch.empty(v.shape, dtype=torch.float32)
    if v.numel() == 0:
        return Settled(out=out, near=Near.joined(()))
    width = bounds.right.shape[1]
    piece = settle(flat(v), v.numel() // width, width, bounds, rounding, flat(out))
    return Settled(out=out, near=Near.joined([piece]))


class Operand:
    """Vectors along K of a batch of FP32 matrices, seen as (batch, count, K) and laid out along either dimension."""

    def __init__(self, x: Tensor) -> None:
        self.batch, self.count, self.terms = x.shape
        self._by_rows = x.stride(-1) == 1 or not x.mT.is_contiguous()
        stored = (x if self._by_rows else x.mT).detach().contiguous()
        self._values = array(stored)
        if self._by_rows:
            self._values = self._values.reshape(self.batch * self.count, self.terms)
        self._bits = self._values.view(np.int32)

    def widened(self, batches: tuple[int, int], vectors: tuple[int, int], name: str) -> tuple[Tensor, Reals, Integers]:
        """FP64 copy in scratch memory, with a norm's upper bound and the span of each vector.

        Args:
            batches: first matrix and the one after the last; ``vectors`` may be a part only of a single matrix.
            vectors: first vector and the one after the last.
            name: of the scratch memory.

        Returns:
            (matrices, vectors, K) FP64; norms and spans, (matrices, vectors).
        """
        matrices, count = batches[1] - batches[0], vectors[1] - vectors[0]
        norms, spans = np.empty((matrices, count)), np.empty((matrices, count), dtype=np.int32)
        if self._by_rows:
            wide = scratch(name, (matrices, count, self.terms), torch.float64)
            first = batches[0] * self.count + vectors[0]
            rows = array(wide).reshape(-1, self.terms)
            _operand_kernels.widen_rows(
                first, first + len(rows), self._values, self._bits, POWERS, rows, norms.reshape(-1), spans.reshape(-1)
            )
            return wide, norms, spans
        wide = scratch(name, (matrices, self.terms, count), torch.float64)
        _operand_kernels.widen_columns(
            *batches, self._values, self._bits, vectors[0], POWERS, array(wide), norms, spans
        )
        return wide.mT, norms, spans
