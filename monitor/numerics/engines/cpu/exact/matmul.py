"""Matrix products on the CPU: int8 GEMMs for large products, FP64 ones for small and batched; the same bits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from monitor.numerics.engines.capability import INT8_WORK, int8_serves, require_fp64
from monitor.numerics.engines.cpu.exact import matmul_kernels as kernels
from monitor.numerics.engines.cpu.exact.int8 import int8_matmul
from monitor.numerics.engines.cpu.exact.wide_path import round_flagged
from monitor.numerics.kernels.arrays import array
from monitor.numerics.kernels.scratch import scratch
from monitor.numerics.kernels.workers import run_pieces, run_tiles, workers
from monitor.numerics.reference.matmul import CHUNK

__all__ = ["cpu_matmul", "is_sampled"]

_TILE_WORK = 1 << 21
"""Multiplications of the FP64 products of one tile of a batch."""

_CHECK_EVERY = 64
_calls: dict[tuple[int, ...], int] = {}


def is_sampled(a: Tensor, b: Tensor) -> bool:
    """Whether this call is checked: the first of each shape and layout, then every 64th."""
    key = (*a.shape, 0, *b.shape, int(a.stride(-1) == 1), int(b.stride(-1) == 1))
    count = _calls.get(key, 0)
    _calls[key] = count + 1
    return count % _CHECK_EVERY == 0


class _Halves:
    """One side of a batched product: scaled rows (side 0, rows of A) or columns (side 1, columns of B)."""

    __slots__ = ("outcome", "parts", "wide")

    def __init__(self, matrices: Tensor, side: int) -> None:
        """Splits `matrices` (B, rows, K) for side 0 or (B, K, columns) for side 1; `parts` lie side by side along K."""
        scaled_first = matrices if side == 0 else matrices.transpose(-1, -2)
        batch, count, k = scaled_first.shape
        by_rows = k >= count or scaled_first.stride(-1) == 1 or scaled_first.stride(-2) != 1  # long loops are fast
        source = (scaled_first if by_rows else scaled_first.transpose(-1, -2)).contiguous()
        self.outcome = np.empty((batch, count), np.float64)
        self.wide = np.empty((batch, count), np.bool_)
        out = scratch(f"operand {side}", (batch, count, 2 * k) if by_rows else (batch, 2 * k, count), torch.float64)
        x, result = array(source), array(out)
        work = x.size * 4
        if by_rows:
            x, result = x.reshape(batch * count, k), result.reshape(batch * count, 2 * k)
            flat = (self.outcome.reshape(-1), self.wide.reshape(-1))
            run_pieces(kernels.halves_by_rows, batch * count, work, x, x.view(np.uint32), result, *flat, side)
        else:
            arguments = (x, x.view(np.uint32), result, self.outcome, self.wide, side)
            run_pieces(kernels.halves_by_columns, batch, work, *arguments)
        self.parts = out if by_rows == (side == 0) else out.transpose(-1, -2)


def _fp64_matmul(a: Tensor, b: Tensor, out: Tensor, *, wide: bool) -> None:
    """Fills out (B, M, N)."""
    left, right = _Halves(a, 0), _Halves(b, 1)
    k = a.shape[-1]
    if k <= CHUNK:
        value = torch.bmm(left.parts, right.parts, out=scratch("value", tuple(out.shape), torch.float64))
    else:
        total = torch.zeros(out.shape, dtype=torch.int64)
        for offset in (0, k):
            for start in range(0, k, CHUNK):
                span = slice(offset + start, offset + min(start + CHUNK, k))
                total += torch.bmm(left.parts[:, :, span], right.parts[:, span]).to(torch.int64)
        value = total.to(torch.float64)
    result = array(out)
    run_pieces(kernels.combine_fp64, out.shape[0], out.numel() * 2, array(value), left.outcome, right.outcome, result)
    if wide and (left.wide.any() or right.wide.any()):
        round_flagged(a, b, left.wide, right.wide, result)


def cpu_matmul(a: Tensor, b: Tensor, *, engine: str = "auto", wide: bool = True) -> Tensor:
    """The product by the specification of `matmul`, for CPU FP32 (B, M, K) and (B, K, N) with no empty dimension.

    Args:
        engine: "int8" or "fp64" to force one; "auto" takes int8 for large products where its known-answer test passed.
        wide: False leaves the wide path out, against the specification: for measuring what it is worth.
    """
    batch, m, k = a.shape
    n = b.shape[-1]
    out = torch.empty((batch, m, n), dtype=torch.float32)
    if engine == "int8" or (engine == "auto" and m * n * k >= INT8_WORK and int8_serves(a.device)):
        for left, right, result in zip(a, b, out, strict=True):
            int8_matmul(left, right, result, check=is_sampled(left, right), wide=wide)
        return out
    require_fp64(a.device)
    each = max(_TILE_WORK // (m * n * k), 1)

    def fill(i: int) -> None:
        part = slice(i * each, (i + 1) * each)
        _fp64_matmul(a[part], b[part], out[part], wide=wide)

    work = out.numel() * k
    if batch > 1 or workers(work) == 1:
        run_tiles(-(-batch // each), work, fill)
    else:
        fill(0)
    return out
