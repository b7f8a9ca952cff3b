"""Matrix products by int8 GEMMs, tile by tile: digits, four products, combination, each tile on one core.

The digits of one operand are kept whole; the other is split into digits a tile at a time, so that neither its digits
nor the int32 products ever leave the cache for long.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firmware_sim.errors import DeviceError
from monitor.numerics.exact import _matmul_kernels as kernels
from monitor.numerics.exact._jit import guarded
from monitor.numerics.exact._scratch import scratch
from monitor.numerics.exact._wide import round_products
from monitor.numerics.exact._workers import run_tasks, worker_count
from monitor.numerics.exact.matmul_reference import CHUNK

__all__ = ["Vectors", "int8_matmul", "multiply", "tile_edges"]

_GRAIN = 64
_WIDTH = 256
_HEIGHT = 1024
"""Sides of a tile along the streamed and the kept operand: with its four int32 products it stays in the cache."""


class Vectors:
    """Rows of A (side 0) or columns of B (side 1), each of length K, and their digits.

    Attributes:
        outcome: the scale factor of each, NaN where it holds a non-finite value (FP64); filled as digits are made.
        wide: which of them need the wide path, likewise.
    """

    __slots__ = ("_along", "_source", "count", "length", "matrix", "outcome", "side", "wide")

    def __init__(self, matrix: Tensor, side: int) -> None:
        """Takes FP32 `matrix` (count, K) of any strides, its rows being the vectors."""
        self.side = side
        self.matrix = matrix
        self.count, self.length = matrix.shape
        self._along = matrix.stride(1) == 1 or matrix.stride(0) != 1
        self._source: NDArray[np.float32] = (matrix if self._along else matrix.t()).contiguous().numpy()
        self.outcome = np.empty(self.count, np.float64)
        self.wide = np.empty(self.count, np.bool_)

    def digits(self, begin: int, end: int, *, name: str) -> Tensor:
        """Digits of some vectors as the GEMM's operand: (n, 3K) for side 0, (3K, n) for side 1, in scratch memory."""
        out = self._memory(end - begin, name)
        self._split(begin, end, out, begin)
        return self._turned(out)

    def all_digits(self) -> Tensor:
        """Digits of all vectors, made on all cores."""
        out = self._memory(self.count, "kept digits")
        edges = tile_edges(self.count, self.count)
        run_tasks([partial(self._split, begin, end, out, 0) for begin, end in edges])
        return self._turned(out)

    def _memory(self, count: int, name: str) -> Tensor:
        return scratch(name, (count, 3 * self.length) if self._along else (3 * self.length, count), torch.int8)

    def _turned(self, out: Tensor) -> Tensor:
        return out if self._along == (self.side == 0) else out.t()

    def _split(self, begin: int, end: int, out: Tensor, origin: int) -> None:
        kernel = kernels.digits_along if self._along else kernels.digits_across
        x = self._source
        arguments = (x, x.view(np.uint32), out.numpy(), self.outcome, self.wide, self.side, CHUNK, origin)
        guarded(kernel, begin, end, arguments)


def tile_edges(count: int, width: int) -> list[tuple[int, int]]:
    """Ranges of about `width` that cover [0, count), in multiples of 64 and a multiple of the cores in number."""
    cores = worker_count()
    pieces = -(-max(-(-count // width), 1) // cores) * cores
    step = -(-count // (pieces * _GRAIN)) * _GRAIN
    return [(begin, min(begin + step, count)) for begin in range(0, count, step)]


def _products(left: Tensor, right: Tensor, start: int, width: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The four sums of digit products of one piece of K by falling power of 256, with their operands.

    With A = [A0 A1 A2] and B = [B2 B1 B0] along K, each power is one product of strided views.
    """
    for power, (first, last, begin) in enumerate(((0, 1, 2), (0, 2, 1), (0, 3, 0), (1, 3, 0))):
        a = left[:, 3 * start + first * width : 3 * start + last * width]
        b = right[3 * start + begin * width : 3 * start + (begin + last - first) * width]
        target = scratch(f"power {power}", (left.shape[0], right.shape[1]), torch.int32)
        yield a, b, torch._int_mm(a, b, out=target)


def _require_sum(left: Tensor, right: Tensor, product: Tensor) -> None:
    """Raises DeviceError unless product·1 = left·(right·1), in integers below 2^53."""
    expected = left.to(torch.float64) @ right.sum(dim=1, dtype=torch.int64).to(torch.float64)
    if not torch.equal(expected, product.sum(dim=1, dtype=torch.int64).to(torch.float64)):
        raise DeviceError(
            "the int8 matrix product of this processor returned a wrong sum for "
            f"{tuple(left.shape)} by {tuple(right.shape)}"
        )


def multiply(
    left: Tensor, right: Tensor, rows: Any, columns: Any, out: NDArray[np.float32], corner: tuple[int, int], check: bool
) -> None:
    """Fills one tile of a result from the digits of both sides.

    Args:
        left, right: int8 digits (m, 3K) and (3K, n).
        rows, columns: scale factors (m,) and (n,).
        out: FP32 (M, N), C-contiguous; the tile begins at `corner`.
        check: compare row sums of each GEMM with their true values.
    """
    k = left.shape[1] // 3
    m, n = left.shape[0], right.shape[1]
    total = np.zeros((m, n), np.int64) if k > CHUNK else None
    for start in range(0, k, CHUNK):
        arrays = []
        for a, b, product in _products(left, right, start, min(CHUNK, k - start)):
            if check:
                _require_sum(a, b, product)
            arrays.append(product.numpy())
        if total is None:
            guarded(kernels.combine_int8, 0, m, (*arrays, rows, columns, out, *corner))
        else:
            guarded(kernels.add_int8, 0, m, (*arrays, total))
    if total is not None:
        guarded(kernels.combine_int64, 0, m, (total, rows, columns, out, *corner))


class _Product:
    """One product on its way: the kept side's digits, and what fills a strip of the result."""

    def __init__(self, a: Tensor, b: Tensor, out: NDArray[np.float32], *, check: bool, wide: bool) -> None:
        left, right = Vectors(a, 0), Vectors(b.t(), 1)
        self.kept, self.streamed = (left, right) if right.count >= left.count else (right, left)
        self.digits = self.kept.all_digits()
        self.out = out
        self.check = check
        self.wide = wide

    def fill(self, begin: int, end: int) -> None:
        """Fills the columns [begin, end) of the result, or the rows if A is streamed."""
        kept, streamed, part = self.kept, self.streamed, slice(begin, end)
        some = streamed.digits(begin, end, name="streamed digits")
        outcome, flags = streamed.outcome[part], streamed.wide[part]
        view = self.out[:, part] if streamed.side == 1 else self.out[part]
        if self.wide and kept.wide.all():
            view[...] = 0.0 * (outcome if streamed.side == 1 else outcome[:, None])  # NaN where it is to stay
        else:
            self._multiply(some, outcome, begin)
        if self.wide and (kept.wide.any() or flags.any()):
            sides = [(kept.matrix, kept.wide), (streamed.matrix[part], flags)]
            (a, wide_rows), (b, wide_columns) = sides if streamed.side == 1 else reversed(sides)
            round_products(a, b.t(), wide_rows, wide_columns, view)

    def _multiply(self, some: Tensor, outcome: Any, begin: int) -> None:
        for start in range(0, self.kept.count, _HEIGHT):
            part = slice(start, start + _HEIGHT)
            factors = self.kept.outcome[part]
            if self.streamed.side == 1:
                multiply(self.digits[part], some, factors, outcome, self.out, (start, begin), self.check)
            else:
                multiply(some, self.digits[:, part], outcome, factors, self.out, (begin, start), self.check)


def int8_matmul(a: Tensor, b: Tensor, out: Tensor, *, check: bool, wide: bool) -> None:
    """Fills out (M, N), C-contiguous, with the product of FP32 a (M, K) and b (K, N)."""
    product = _Product(a, b, out.numpy(), check=check, wide=wide)
    width = _WIDTH * (2 if 2 * product.kept.count <= _HEIGHT else 1)
    run_tasks([partial(product.fill, *edges) for edges in tile_edges(product.streamed.count, width)])
