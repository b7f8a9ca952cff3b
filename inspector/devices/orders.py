"""Orders in which real devices add, for an emulated one: matrix products, sums, and cuts of integer products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, starmap
from itertools import product as pairs
from typing import Any, Protocol

import torch
from torch import Tensor

from inspector.devices import _order_kernels as kernels
from monitor.numerics.kernels.workers import run_pieces

__all__ = ["EMULATED", "Order", "added", "slices"]


class Order(Protocol):
    """An order in which a device adds. Operands lie on the CPU and are not empty."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """(B, M, K) × (B, K, N) → (B, M, N), all FP32 or all FP64."""

    def total(self, x: Tensor) -> Tensor:
        """Sums of the rows of (R, n), in their type."""

    def cuts(self, k: int) -> list[int]:
        """Where K is cut for integer products, from 0 to k."""


def slices(cuts: list[int]) -> list[slice]:
    return list(starmap(slice, pairwise(cuts)))


def _even_cuts(n: int, parts: int) -> list[int]:
    parts = min(parts, n)
    return [n * i // parts for i in range(parts + 1)]


def added(parts: Sequence[Tensor]) -> Tensor:
    result = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


class _SplitK:
    """K in four parts, each the vendor's product; their results are added by rising k."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return added([torch.bmm(a[:, :, part], b[:, part]) for part in slices(self.cuts(a.shape[2]))])

    def total(self, x: Tensor) -> Tensor:
        return added([x[:, part].sum(1) for part in slices(self.cuts(x.shape[1]))])

    def cuts(self, k: int) -> list[int]:
        return _even_cuts(k, 4)


class _Tiles:
    """Tiles of 96 × 256 results and 96 of K, each the vendor's product; their results are added by falling k."""

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        out = a.new_empty((a.shape[0], a.shape[1], b.shape[2]))
        along_k = slices(self.cuts(a.shape[2]))[::-1]
        for row, column in pairs(range(0, a.shape[1], 96), range(0, b.shape[2], 256)):
            rows, columns = slice(row, row + 96), slice(column, column + 256)
            out[:, rows, columns] = added([torch.bmm(a[:, rows, part], b[:, part, columns]) for part in along_k])
        return out

    def total(self, x: Tensor) -> Tensor:
        return added([x[:, part].sum(1) for part in slices(self.cuts(x.shape[1]))[::-1]])

    def cuts(self, k: int) -> list[int]:
        return [*range(0, k, 96), k]


class _Compiled:
    """Loops of our own over rows."""

    def __init__(self, dot: dict[torch.dtype, Any], total: dict[torch.dtype, Any], chunk: int) -> None:
        self._dot = dot
        self._total = total
        self._chunk = chunk

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        a, b = a.contiguous(), b.contiguous()
        out = a.new_zeros((a.shape[0], a.shape[1], b.shape[2]))
        for one in range(a.shape[0]):
            arrays = [matrix[one].numpy() for matrix in (a, b, out)]
            run_pieces(self._dot[a.dtype], a.shape[1], out[one].numel() * a.shape[2], *arrays)
        return out

    def total(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = x.new_empty(x.shape[0])
        run_pieces(self._total[x.dtype], x.shape[0], x.numel(), x.numpy(), out.numpy())
        return out

    def cuts(self, k: int) -> list[int]:
        return [*range(0, k, self._chunk), k]


def _one_by_one() -> Order:
    """By rising k, multiplication and addition rounded separately: no FMA, no vectors along K."""
    dot = {torch.float32: kernels.running_dot, torch.float64: kernels.running_dot}
    total = {torch.float32: kernels.running_total, torch.float64: kernels.running_total}
    return _Compiled(dot, total, chunk=192)


def _tensor_core() -> Order:
    """Chunks of 8 along K. FP32: exact products and sums cut to 24 bits after each chunk; FP64: to nearest.

    NVIDIA's tensor cores add a few exact products at a time and truncate (Fasi et al. 2021); in FP64 they round to
    nearest.
    """
    dot = {torch.float32: kernels.chunked_dot, torch.float64: kernels.chunk_products}
    total = {torch.float32: kernels.chunked_total, torch.float64: kernels.chunk_sums}
    return _Compiled(dot, total, chunk=128)


EMULATED: dict[str, Callable[[], Order]] = {
    "split-k": _SplitK,
    "tiles": _Tiles,
    "no-fma": _one_by_one,
    "tensor-core": _tensor_core,
}
