"""Matrix products on the CPU: compiled quantisation around int8 or FP64 GEMMs, the bits of the specification."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from firmware_sim.errors import DeviceError
from monitor.numerics.exact import _matmul_kernels as kernels
from monitor.numerics.exact._jit import run_pieces
from monitor.numerics.exact._known_answers import fp64_gemm_is_exact, int8_gemm_is_exact
from monitor.numerics.exact._scratch import scratch
from monitor.numerics.exact._wide import round_products
from monitor.numerics.exact.matmul_reference import CHUNK

__all__ = ["cpu_matmul", "int8_serves"]

_INT8_WORK = 1 << 22
"""Multiplications from which four int8 products and their digits beat one FP64 product."""

_TILE_ELEMENTS = 1 << 22
_CHECK_EVERY = 64
_calls: dict[tuple[int, int, int, bool, bool], int] = {}


@lru_cache(maxsize=1)
def int8_serves() -> bool:
    """Whether this process's int8 GEMM passes its known-answer test."""
    return int8_gemm_is_exact(torch.device("cpu"))


@lru_cache(maxsize=1)
def _require_fp64() -> None:
    if not fp64_gemm_is_exact(torch.device("cpu")):
        raise DeviceError("the FP64 matrix product of this processor does not add integers exactly")


class _Operand:
    """One side of a product: scaled rows (side 0, rows of A) or columns (side 1, columns of B), with their outcome."""

    __slots__ = ("outcome", "parts", "side", "transposed", "wide")

    def __init__(self, matrices: Tensor, side: int, *, int8: bool) -> None:
        """Splits `matrices` (B, rows, K) for side 0 or (B, K, columns) for side 1; B is 1 for int8.

        `parts` holds the digits or halves laid side by side along K.
        """
        self.side = side
        scaled_first = matrices if side == 0 else matrices.transpose(-1, -2)
        batch, count, k = scaled_first.shape
        by_rows = scaled_first.stride(-1) == 1 or scaled_first.stride(-2) != 1
        source = (scaled_first if by_rows else scaled_first.transpose(-1, -2)).contiguous()
        outcome = np.empty((batch, count), np.float64)
        wide = np.empty((batch, count), np.bool_)
        parts = 3 if int8 else 2
        shape = (batch, count, parts * k) if by_rows else (batch, parts * k, count)
        out = scratch(f"operand {side}", shape, torch.int8 if int8 else torch.float64)
        x, result = source.numpy(), out.numpy()
        work = x.size * 4
        if by_rows:
            kernel = kernels.digits_by_rows if int8 else kernels.halves_by_rows
            x, result = x.reshape(batch * count, k), result.reshape(batch * count, parts * k)
            flat = (outcome.reshape(-1), wide.reshape(-1))
            run_pieces(kernel, batch * count, work, x, x.view(np.uint32), result, *flat, side)
        elif int8:
            x, result, flat = x[0], result[0], (outcome[0], wide[0])
            run_pieces(kernels.digits_by_columns, count, work, x, x.view(np.uint32), result, *flat, side)
        else:
            arguments = (x, x.view(np.uint32), result, outcome, wide, side)
            run_pieces(kernels.halves_by_columns, batch, work, *arguments)
        self.parts = out if by_rows == (side == 0) else out.transpose(-1, -2)
        self.transposed = by_rows != (side == 0)
        self.outcome = outcome
        self.wide = wide


def _checked(left: Tensor, right: Tensor, product: Tensor) -> None:
    """Raises DeviceError unless product·1 = left·(right·1), in integers below 2^53."""
    expected = left.to(torch.float64) @ right.sum(dim=1, dtype=torch.int64).to(torch.float64)
    if not torch.equal(expected, product.sum(dim=1, dtype=torch.int64).to(torch.float64)):
        raise DeviceError(
            "the int8 matrix product of this processor returned a wrong sum for "
            f"{tuple(left.shape)} by {tuple(right.shape)}"
        )


def _sampled(a: _Operand, b: _Operand, shape: tuple[int, int, int]) -> bool:
    """Whether this call is checked: the first of each shape and layout, then every 64th."""
    key = (*shape, a.transposed, b.transposed)
    count = _calls.get(key, 0)
    _calls[key] = count + 1
    return count % _CHECK_EVERY == 0


def _int8_products(a: Tensor, b: Tensor, k: int, start: int, stop: int) -> Iterator[Tensor]:
    """The four sums of digit products for k in [start, stop), by falling power of 256, in int32.

    With A = [A0 A1 A2] and B = [B2 B1 B0] along K, each power is one product of strided views where K fits.
    """
    for power in range(4):
        pairs = [(i, power - i) for i in range(3) if 0 <= power - i < 3]
        if stop - start == k:
            first, last = pairs[0][0], pairs[-1][0]
            begin = (2 - (power - first)) * k
            target = scratch(f"power {power}", (a.shape[0], b.shape[1]), torch.int32)
            left, right = a[:, first * k : (last + 1) * k], b[begin : begin + (last - first + 1) * k]
            yield torch._int_mm(left, right, out=target)
        else:
            pieces = [
                torch._int_mm(a[:, i * k + start : i * k + stop], b[(2 - j) * k + start : (2 - j) * k + stop])
                for i, j in pairs
            ]
            yield torch.stack(pieces).sum(dim=0, dtype=torch.int32) if len(pieces) > 1 else pieces[0]


def _int8_matmul(a: _Operand, b: _Operand, out: Tensor, k: int) -> None:
    """Fills out (M, N)."""
    left, right = a.parts[0], b.parts[0]
    m, n = out.shape
    check = _sampled(a, b, (m, n, k))
    tile = max(1, min(m, _TILE_ELEMENTS // n))
    for row in range(0, m, tile):
        rows = slice(row, min(row + tile, m))
        target, piece = out[rows].numpy(), left[rows]
        if k <= CHUNK:
            products = list(_int8_products(piece, right, k, 0, k))
            if check:
                _check_products(piece, right, products, k)
            arrays = [p.numpy() for p in products]
            factors = (a.outcome[0, rows], b.outcome[0])
            run_pieces(kernels.combine_int8, target.shape[0], target.size * 4, *arrays, *factors, target)
        else:
            total = np.zeros(target.shape, np.int64)
            for start in range(0, k, CHUNK):
                arrays = [p.numpy() for p in _int8_products(piece, right, k, start, min(start + CHUNK, k))]
                run_pieces(kernels.combine_int64, target.shape[0], target.size * 4, *arrays, total)
            value = total.astype(np.float64)[None]
            run_pieces(kernels.combine_fp64, 1, 0, value, a.outcome[:, rows], b.outcome, target[None])


def _check_products(left: Tensor, right: Tensor, products: list[Tensor], k: int) -> None:
    spans = ((0, 1, 2), (0, 2, 1), (0, 3, 0), (1, 3, 0))
    for (first, last, begin), product in zip(spans, products, strict=True):
        width = last - first
        _checked(left[:, first * k : last * k], right[begin * k : (begin + width) * k], product)


def _fp64_matmul(a: _Operand, b: _Operand, out: Tensor, k: int) -> None:
    """Fills out (B, M, N)."""
    _require_fp64()
    if k <= CHUNK:
        value = torch.bmm(a.parts, b.parts, out=scratch("value", tuple(out.shape), torch.float64))
    else:
        total = torch.zeros(out.shape, dtype=torch.int64)
        for offset in (0, k):
            for start in range(0, k, CHUNK):
                span = slice(offset + start, offset + min(start + CHUNK, k))
                total += torch.bmm(a.parts[:, :, span], b.parts[:, span]).to(torch.int64)
        value = total.to(torch.float64)
    run_pieces(kernels.combine_fp64, out.shape[0], out.numel() * 2, value.numpy(), a.outcome, b.outcome, out.numpy())


def cpu_matmul(a: Tensor, b: Tensor, *, engine: str = "auto", wide: bool = True) -> Tensor:
    """The product by the specification of `matmul`, for CPU FP32 (B, M, K) and (B, K, N) with no empty dimension.

    Args:
        engine: "int8" or "fp64" to force one (int8 for B = 1 only); "auto" takes int8 for large single products where
            its known-answer test passed.
        wide: False leaves the wide path out, against the specification: for measuring what it is worth.
    """
    batch, m, k = a.shape
    n = b.shape[-1]
    if batch > 1 and engine == "auto" and m * n * k >= _INT8_WORK and int8_serves():
        return torch.cat([cpu_matmul(a[i : i + 1], b[i : i + 1], wide=wide) for i in range(batch)])
    int8 = engine == "int8" or (engine == "auto" and batch == 1 and m * n * k >= _INT8_WORK and int8_serves())
    left, right = _Operand(a, 0, int8=int8), _Operand(b, 1, int8=int8)
    out = torch.empty((batch, m, n), dtype=torch.float32)
    if int8:
        _int8_matmul(left, right, out[0], k)
    else:
        _fp64_matmul(left, right, out, k)
    if wide and (left.wide.any() or right.wide.any()):
        round_products(a, b, left.wide & np.isfinite(left.outcome), right.wide & np.isfinite(right.outcome), out)
    return out
