"""Matrix products by int8 GEMMs, tile by tile: digits, four products, combination, each tile on one core.

The digits of one operand are kept whole; the other is split into digits a tile at a time, so that neither its digits
nor the int32 products ever leave the cache for long.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firmware_sim.errors import DeviceError
from monitor.numerics.engines.cpu.exact import matmul_kernels as kernels
from monitor.numerics.engines.cpu.exact.wide_path import rounded_products
from monitor.numerics.engines.int8_product import int8_product
from monitor.numerics.kernels.arrays import array
from monitor.numerics.kernels.jit import guarded
from monitor.numerics.kernels.scratch import scratch
from monitor.numerics.kernels.workers import run_tiles, workers
from monitor.numerics.reference.matmul import CHUNK

__all__ = ["Gathered", "Product", "Vectors", "int8_matmul", "multiply", "require_sum"]

_SPLIT_WORK = 24
"""Multiplications that splitting one number into digits is worth."""

_GRAIN = 64
_WIDTH = 256
_HEIGHT = 1024
"""Sides of a tile along the streamed and the kept operand: with its four int32 products it stays in the cache."""


class _Side:
    """One side of a product: `count` vectors of length K.

    Attributes:
        outcome: the scale factor of each, NaN where it holds a non-finite value (FP64); filled as digits are made.
        wide: which of them need the wide path, likewise.
        digits: of each number.
    """

    digits = 3

    def __init__(self, count: int, length: int, side: int, *, along: bool) -> None:
        """Side 0 is the rows of A, side 1 the columns of B; `along` tells whether a vector's digits lie together."""
        self.count, self.length, self.side = count, length, side
        self.outcome = np.empty(count, np.float64)
        self.wide = np.empty(count, np.bool_)
        self._along = along

    def edges(self, width: int, threads: int) -> list[tuple[int, int]]:
        """Ranges of about `width` vectors that cover all of them."""
        return _edges(self.count, width, threads)

    def tile(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """The vectors [begin, end), FP32 (n, K), and their digits as the GEMM's operand, in scratch memory.

        Digits are (n, 3K) for side 0 and (3K, n) for side 1.
        """
        raise NotImplementedError

    def _memory(self, count: int, name: str) -> Tensor:
        depth = self.digits * self.length
        return scratch(name, (count, depth) if self._along else (depth, count), torch.int8)

    def _turned(self, out: Tensor) -> Tensor:
        return out if self._along == (self.side == 0) else out.t()


class Vectors(_Side):
    """Rows of A or columns of B that are rows or columns of one matrix in memory."""

    def __init__(self, matrix: Tensor, side: int) -> None:
        """Takes FP32 or BF16 `matrix` (count, K) of any strides, its rows being the vectors; of BF16 its bits."""
        count, length = matrix.shape
        super().__init__(count, length, side, along=matrix.stride(1) == 1 or matrix.stride(0) != 1)
        self.rows = matrix
        source = (matrix if self._along else matrix.t()).contiguous()
        self._source: NDArray[Any] = array(source if source.dtype is torch.float32 else source.view(torch.uint16))

    def tile(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """As the class says."""
        out = self._memory(end - begin, "streamed digits")
        self._split(begin, end, out, begin)
        return self.rows[begin:end], self._turned(out)

    def all_digits(self) -> Tensor:
        """Digits of all vectors, made on all cores."""
        out = self._memory(self.count, "kept digits")
        work = _SPLIT_WORK * self.count * self.length
        edges = _edges(self.count, self.count, workers(work))
        run_tiles(len(edges), work, lambda i: self._split(*edges[i], out, 0))
        return self._turned(out)

    def _split(self, begin: int, end: int, out: Tensor, origin: int) -> None:
        kernel = kernels.digits_along if self._along else kernels.digits_across
        x = self._source
        arguments = (x, x.view(np.uint32), array(out), self.outcome, self.wide, self.side, CHUNK, origin)
        guarded(kernel, begin, end, arguments)


class Gathered(_Side):
    """Vectors that lie scattered in memory, such as the patches of an image, and are gathered a piece at a time."""

    def __init__(self, pieces: Sequence[Tensor], side: int, length: int, *, along: bool) -> None:
        """Takes FP32 tensors of n·K elements each: n vectors one after the other if `along`, else (K, …) across."""
        ends = list(itertools.accumulate(piece.numel() // length for piece in pieces))
        super().__init__(ends[-1], length, side, along=along)
        self._pieces = dict(zip(itertools.pairwise([0, *ends]), pieces, strict=True))

    def edges(self, width: int, threads: int) -> list[tuple[int, int]]:
        """The pieces' ranges."""
        return list(self._pieces)

    def tile(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """As the class says."""
        piece, count = self._pieces[begin, end], end - begin
        gathered = scratch("gathered", (count, self.length) if self._along else (self.length, count), torch.float32)
        gathered.view(piece.shape).copy_(piece)
        out, x, part = self._memory(count, "streamed digits"), array(gathered), slice(begin, end)
        kernel = kernels.digits_along if self._along else kernels.digits_across
        arguments = (x, x.view(np.uint32), array(out), self.outcome[part], self.wide[part], self.side, CHUNK, 0)
        guarded(kernel, 0, count, arguments)
        return gathered if self._along else gathered.t(), self._turned(out)


def _edges(count: int, width: int, threads: int) -> list[tuple[int, int]]:
    """Ranges of about `width` that cover [0, count), in multiples of 64 and a multiple of the threads in number."""
    pieces = -(-max(-(-count // width), 1) // threads) * threads
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
        yield a, b, int8_product(a, b, target)


def require_sum(left: Tensor, right: Tensor, product: Tensor) -> None:
    """Raises DeviceError unless product·1 = left·(right·1), in integers below 2^53."""
    expected = left.to(torch.float64) @ right.sum(dim=1, dtype=torch.int64).to(torch.float64)
    if not torch.equal(expected, product.sum(dim=1, dtype=torch.int64).to(torch.float64)):
        raise DeviceError(
            "the int8 matrix product of this processor returned a wrong sum for "
            f"{tuple(left.shape)} by {tuple(right.shape)}"
        )


def _multiply(
    left: Tensor, right: Tensor, rows: Any, columns: Any, out: NDArray[np.float32], corner: tuple[int, int], check: bool
) -> None:
    """Fills one tile of a result from the digits of both sides.

    Args:
        left, right: int8 digits (m, 3K) and (3K, n).
        rows, columns: scale factors (m,) and (n,).
        out: FP32 (B, M, N/B), C-contiguous; the tile begins at row and column `corner`.
        check: compare row sums of each GEMM with their true values.
    """
    k = left.shape[1] // 3
    m, n = left.shape[0], right.shape[1]
    total = np.zeros((m, n), np.int64) if k > CHUNK else None
    for start in range(0, k, CHUNK):
        arrays = []
        for a, b, product in _products(left, right, start, min(CHUNK, k - start)):
            if check:
                require_sum(a, b, product)
            arrays.append(array(product))
        if total is None:
            guarded(kernels.combine_int8, 0, m, (*arrays, rows, columns, out, *corner))
        else:
            guarded(kernels.add_int8, 0, m, (*arrays, total))
    if total is not None:
        guarded(kernels.combine_int64, 0, m, (total, rows, columns, out, *corner))


def _chosen(rows: Tensor, places: NDArray[np.int64]) -> Tensor:
    """Those rows, without a copy if they are all."""
    return rows if len(places) == len(rows) else rows[torch.from_numpy(places)]


class Product:
    """One product on its way: the kept side's digits, and what fills a strip of the result.

    Attributes:
        width, height: of a tile along the streamed and the kept operand.
    """

    width, height = _WIDTH, _HEIGHT

    def __init__(self, kept: Vectors, streamed: _Side, out: NDArray[np.float32], *, check: bool, wide: bool) -> None:
        self._kept, self._streamed = kept, streamed
        self._digits = kept.all_digits()
        self._out = out
        self._check = check
        self._use_wide_path = wide
        self._late: list[tuple[NDArray[np.int64], Tensor]] = []

    def run(self) -> None:
        """Fills the whole result."""
        kept, streamed = self._kept, self._streamed
        work = kept.count * streamed.count * kept.length
        width = self.width * (2 if 2 * kept.count <= self.height else 1)
        edges = streamed.edges(width, workers(work))
        run_tiles(len(edges), work, lambda i: self._fill(*edges[i]))
        self._finish()

    def _fill(self, begin: int, end: int) -> None:
        """Fills the columns [begin, end) of the result, or the rows if A is streamed, but for its wide vectors."""
        kept, streamed, part = self._kept, self._streamed, slice(begin, end)
        rows, some = streamed.tile(begin, end)
        outcome = streamed.outcome[part]
        if not self._use_wide_path:
            self._multiply(some, part)
            return
        if not kept.wide.all():
            self._multiply(some, part)
        if kept.wide.any():
            chosen = np.flatnonzero(kept.wide)
            some = _chosen(kept.rows, chosen)
            self._store(chosen, np.arange(begin, end), rounded_products(some.float(), rows.float(), outcome))
        late = np.flatnonzero(streamed.wide[part])
        if len(late) and not kept.wide.all():
            self._late.append((begin + late, rows[torch.from_numpy(late)]))

    def _finish(self) -> None:
        """Fills what belongs to the wide vectors of the streamed side, all together."""
        if not self._late:
            return
        self._late.sort(key=lambda late: int(late[0][0]))  # threads append in any order
        places = np.concatenate([place for place, _ in self._late])
        rows = torch.cat([row for _, row in self._late]).float()
        others = np.flatnonzero(~self._kept.wide)
        partners = _chosen(self._kept.rows, others).float()

        def fill(begin: int, end: int) -> None:
            block = rounded_products(rows[begin:end], partners, self._kept.outcome[others])
            self._store(others, places[begin:end], block.T)

        work = len(places) * len(others) * self._kept.length
        edges = _edges(len(places), _HEIGHT, workers(work))
        run_tiles(len(edges), work, lambda i: fill(*edges[i]))

    def _store(self, kept: NDArray[np.int64], streamed: NDArray[np.int64], block: NDArray[np.float32]) -> None:
        """Stores a block whose rows belong to the kept side; places are in rising order."""
        rows, columns, block = (kept, streamed, block) if self._streamed.side == 1 else (streamed, kept, block.T)
        if len(self._out) > 1:
            which, place = np.divmod(columns, self._out.shape[2])
            self._out[which, rows[:, None], place] = block
        elif columns[-1] - columns[0] + 1 == len(columns):
            self._out[0, rows, columns[0] : columns[-1] + 1] = block
        else:
            self._out[0, rows[:, None], columns] = block

    def _multiply(self, some: Tensor, streamed: slice) -> None:
        for start in range(0, self._kept.count, self.height):
            kept = slice(start, min(start + self.height, self._kept.count))
            if self._streamed.side == 1:
                self._fill_tile(self._digits[kept], some, kept, streamed)
            else:
                self._fill_tile(some, self._digits[:, kept], streamed, kept)

    def _fill_tile(self, left: Tensor, right: Tensor, rows: slice, columns: slice) -> None:
        """Fills the tile of these rows and columns from the digits of both sides."""
        sides = (self._kept, self._streamed) if self._streamed.side == 1 else (self._streamed, self._kept)
        factors = sides[0].outcome[rows], sides[1].outcome[columns]
        _multiply(left, right, *factors, self._out, (rows.start, columns.start), self._check)


def multiply(kept: Vectors, streamed: _Side, out: Tensor, *, check: bool, wide: bool = True) -> None:
    """Fills out (B, M, N/B), C-contiguous FP32, with the product of the two sides, by the specification of `matmul`.

    Column j of the product is the column j mod N/B of matrix j div N/B.

    Args:
        kept: the side whose digits are held whole; best the shorter one.
        streamed: the side of which each tile's digits are made when the tile's turn comes.
        check: compare the row sums of all GEMMs with their true values; DeviceError where they differ.
        wide: False leaves the wide path out, against the specification.
    """
    Product(kept, streamed, array(out), check=check, wide=wide).run()


def int8_matmul(a: Tensor, b: Tensor, out: Tensor, *, check: bool, wide: bool) -> None:
    """Fills out (M, N), C-contiguous, with the product of FP32 a (M, K) and b (K, N); arguments as for `multiply`."""
    left, right = Vectors(a, 0), Vectors(b.t(), 1)
    kept, streamed = (left, right) if right.count >= left.count else (right, left)
    multiply(kept, streamed, out[None], check=check, wide=wide)
