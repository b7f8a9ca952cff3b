"""The BF16 product by int8 GEMMs, tile by tile, as FP32's: two digits a side, three or four products."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from monitor.numerics.engines.capability import int8_serves
from monitor.numerics.engines.cpu.exact import bf16_kernels as kernels
from monitor.numerics.engines.cpu.exact.int8 import Product, Vectors, require_sum
from monitor.numerics.engines.cpu.exact.matmul import is_sampled
from monitor.numerics.engines.eager.exact.bf16 import apart_product, eager_bf16_matmul, places_apart
from monitor.numerics.engines.int8_product import int8_product
from monitor.numerics.kernels.arrays import array
from monitor.numerics.kernels.jit import guarded
from monitor.numerics.kernels.scratch import scratch
from monitor.numerics.reference.bf16 import THIN
from monitor.numerics.reference.matmul import CHUNK

__all__ = ["Halves", "cpu_bf16_matmul"]


class Halves(Vectors):
    """Rows of A or columns of B as two digits.

    Attributes:
        factors: scale factors, as ``outcome``, and densities (2, count).
    """

    digits = 2

    def __init__(self, matrix: Tensor, side: int, whole: Tensor) -> None:
        """Takes BF16 `matrix` (count, K), and `whole`, which it was before places were set apart."""
        super().__init__(matrix, side)
        self.rows = whole
        self.factors = np.empty((2, self.count), np.float64)
        self.outcome = self.factors[0]

    def _split(self, begin: int, end: int, out: Tensor, origin: int) -> None:
        kernel = kernels.digits_along if self._along else kernels.digits_across
        arguments = (self._source, array(out), *self.factors, self.wide, self.side, CHUNK, origin)
        guarded(kernel, begin, end, arguments)


class _Bf16Product(Product):
    """As FP32's, with what is set apart added in FP64. Large tiles: a GEMM packs its operands anew for each."""

    width = height = 2048

    def __init__(self, kept: Halves, streamed: Halves, out: NDArray[np.float32], apart: Any, *, check: bool) -> None:
        super().__init__(kept, streamed, out, check=check, wide=True)
        sides = (kept, streamed) if streamed.side == 1 else (streamed, kept)
        self._factors = [side.factors for side in sides]
        self._apart = apart

    def _fill_tile(self, left: Tensor, right: Tensor, rows: slice, columns: slice) -> None:
        factors = [side[:, part] for side, part in zip(self._factors, (rows, columns), strict=True)]
        has_low = bool(factors[0][1].min() * factors[1][1].min() < THIN)
        shape = (left.shape[0], right.shape[1])
        k, extra = left.shape[1] // 2, np.empty((0, 0))
        if self._apart is not None:
            above, below = self._apart
            extra = array(torch.mm(above[rows], below[:, columns], out=scratch("set apart", shape, torch.float64)))
        total = extra
        if has_low or k > CHUNK or self._apart is not None:
            total = array(scratch("value", shape, torch.float64))
        for start in range(0, k, CHUNK):
            products = self._products(left, right, start, min(CHUNK, k - start), has_low)
            piece = start == 0, start + CHUNK >= k
            arguments = (*products, total, piece, *factors, extra, self._out[0], (rows.start, columns.start))
            guarded(kernels.combine, 0, shape[0], arguments)

    def _products(self, left: Tensor, right: Tensor, start: int, width: int, has_low: bool) -> list[NDArray[np.int32]]:
        """Digit products of one piece of K by falling power of 255; the last is empty where it is not needed."""
        found = []
        spans = ((0, 1, 1), (0, 2, 0), (1, 2, 0)) if has_low else ((0, 1, 1), (0, 2, 0))
        for power, (first, last, begin) in enumerate(spans):
            a = left[:, 2 * start + first * width : 2 * start + last * width]
            b = right[2 * start + begin * width : 2 * start + (begin + last - first) * width]
            product = int8_product(a, b, scratch(f"power {power}", (left.shape[0], right.shape[1]), torch.int32))
            if self._check:
                require_sum(a, b, product)
            found.append(array(product))
        return found if has_low else [*found, np.empty((0, 0), np.int32)]


def _peaks(x: Tensor, over: int) -> Tensor:
    """Largest magnitude bits of each row (over 1) or column (over 0) of BF16 x."""
    lies = x.stride(1) == 1 or x.stride(0) != 1
    source = array((x if lies else x.t()).contiguous().view(torch.uint16))
    found = [np.zeros(size, np.uint16) for size in source.shape]
    guarded(kernels.peaks, 0, len(source), (source, *found))
    return torch.from_numpy(found[(over == 1) != lies].view(np.int16))


def _fill(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Fills FP32 out (M, N)."""
    places, apart, kept, kept_b = places_apart(_peaks(a, 0), _peaks(b, 1)), None, a, b
    if len(places):
        apart = apart_product(a, b, places)
        kept, kept_b = a.index_fill(1, places, 0.0), b.index_fill(0, places, 0.0)
    left, right = Halves(kept, 0, a), Halves(kept_b.t(), 1, b.t())
    sides = (left, right) if right.count >= left.count else (right, left)
    _Bf16Product(*sides, array(out)[None], apart, check=is_sampled(a, b)).run()


def cpu_bf16_matmul(a: Tensor, b: Tensor) -> Tensor:
    """FP32 (B, M, N) by the specification of ``exact.bf16_matmul``, for BF16 (B, M, K) and (B, K, N), no size 0."""
    if not int8_serves(a.device):
        return eager_bf16_matmul(a, b)
    out = torch.empty((*a.shape[:2], b.shape[2]), dtype=torch.float32)
    for left, right, result in zip(a, b, out, strict=True):
        _fill(left, right, result)
    return out
