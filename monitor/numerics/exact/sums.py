"""Correctly rounded sums: FP32(Σ x) of the exact sum, so that no order of additions has to be stated.

FP64 adds FP32 numbers with 29 bits to spare. In any order, with any tree and any number of threads, the FP64 sum of n
terms is within n·2^-53·Σ|x| of the true one (Higham 2002, eq. 4.4, for n·2^-53 < 0.01). Ziv's test on that interval
decides almost every element; the others are summed in integers. A zero sum is +0; a NaN, or infinities of both signs,
give 0x7FC00000.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics.engines.cpu.exact.sums import accumulate_cpu, sum_blocks
from monitor.numerics.exact.unary import require_fp32
from monitor.numerics.kernels.bits import canonical, check_subnormals
from monitor.numerics.reference.resolve import round_fraction

__all__ = ["embedding_backward", "index_add", "mean", "scatter_add", "scatter_rows", "sum"]

_UNIT = 2.0**-52
"""Twice the unit roundoff of FP64: covers the rounding of the bound itself."""


def sum_of_doubles(values: Sequence[float]) -> Fraction:
    """Exact sum of finite floats: what `math.fsum` rounds away is summed again until nothing is left."""
    parts = list(values)
    total = Fraction(0)
    while True:
        rounded = math.fsum(parts)
        if rounded == 0.0:
            return total
        total += Fraction(rounded)
        parts.append(-rounded)


def _decide(total: Tensor, magnitude: Tensor, count: Tensor | int, divisor: int) -> tuple[Tensor, Tensor]:
    """(FP32 of total/divisor, undecided mask) where |error of total| ≤ count·2^-53·magnitude.

    A sum of one term, or of nothing but zeros, has no error.
    """
    slack = magnitude * (_UNIT * count)
    if isinstance(count, Tensor):
        slack = torch.where(count <= 1, 0.0, slack)
    elif count <= 1:
        slack = torch.zeros_like(magnitude)
    low, high = total - slack, total + slack
    if divisor != 1:
        scale = torch.full_like(total, float(divisor))
        low, high = low / scale, high / scale
        low, high = low - low.abs() * _UNIT, high + high.abs() * _UNIT
    low, high = low.to(torch.float32), high.to(torch.float32)
    finite = torch.isfinite(total)
    undecided = (low.view(torch.int32) != high.view(torch.int32)) | ((slack > 0) & (slack >= total.abs()))
    undecided &= finite
    value = torch.where(finite, high.to(torch.float64), total).to(torch.float32)
    return canonical(torch.where(total == 0, 0.0, value)), undecided


def _resolve_values(values: NDArray[np.float32], divisor: int) -> float:
    return round_fraction(sum_of_doubles(values.astype(np.float64).tolist()) / divisor)


def sum_rows_reference(rows: Tensor, divisor: int) -> Tensor:
    """Sums over the last dimension of a 2-D FP32 tensor, divided by `divisor` before the one rounding; any device."""
    check_subnormals(rows.device, rows.numel())
    wide = rows.to(torch.float64)
    result, undecided = _decide(wide.sum(dim=1), wide.abs().sum(dim=1), rows.shape[1], divisor)
    positions = torch.nonzero(undecided).reshape(-1)
    if positions.numel() == 0:
        return result
    values = [_resolve_values(rows[i].cpu().numpy(), divisor) for i in positions.tolist()]
    return result.index_copy(0, positions, torch.tensor(values, dtype=torch.float32, device=rows.device))


def _reduce(x: Tensor, dims: Sequence[int] | None, keepdim: bool, average: bool) -> Tensor:
    """Sum or mean over `dims`; a block of neighbouring dimensions of a contiguous tensor is summed where it lies."""
    rank = x.dim()
    listed = list(range(rank)) if not dims else list(dims)
    if any(not -max(rank, 1) <= d < max(rank, 1) for d in listed):
        raise CallerError(f"dimensions {listed} are out of range for a tensor of rank {rank}")
    chosen = sorted({d % rank for d in listed}) if rank else []
    if rank and len(chosen) != len(listed):
        raise CallerError(f"dimensions {listed} are repeated")
    kept = [d for d in range(rank) if d not in chosen]
    shape = tuple(1 if d in chosen else x.shape[d] for d in range(rank)) if keepdim else tuple(x.shape[d] for d in kept)
    count = math.prod(x.shape[d] for d in chosen)
    if count == 0:
        return canonical(torch.full(shape, torch.nan if average else 0.0, dtype=torch.float32, device=x.device))
    divisor = count if average else 1
    block = bool(chosen) and chosen[-1] - chosen[0] + 1 == len(chosen) and x.is_contiguous()
    if block:
        inner = math.prod(x.shape[chosen[-1] + 1 :])
        blocks = x.reshape(math.prod(x.shape[: chosen[0]]), count, inner)
    else:
        blocks = x.permute((*kept, *chosen)).reshape(-1, count, 1)
    if blocks.numel() == 0:
        return torch.zeros(shape, dtype=torch.float32, device=x.device)
    if x.device.type == "cpu":
        return sum_blocks(blocks.contiguous(), divisor, _resolve_values).reshape(shape)
    return sum_rows_reference(blocks.transpose(1, 2).reshape(-1, count), divisor).reshape(shape)


def sum(x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """FP32(Σ x) over `dims` (None or empty: over all), of the exact sum.

    Args:
        x: any shape, FP32 (BF16 and FP16 are taken as the FP32 numbers they are).
        dims: dimensions to sum over.
        keepdim: keep them with length 1.

    Raises:
        CallerError: another dtype, or a dimension out of range or repeated.
        DeviceError: the device flushes subnormal numbers.
    """
    return _reduce(require_fp32(x, "sum"), dims, keepdim, average=False)


def mean(x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """FP32(Σ x / n) over `dims`, rounded once; the mean of nothing is NaN. Arguments and errors as in `sum`."""
    return _reduce(require_fp32(x, "mean"), dims, keepdim, average=True)


def accumulate_reference(base: Tensor, slots: Tensor, source: Tensor) -> Tensor:
    """base (R, D) plus source (n, D) added to the rows `slots` (n,): one rounding for each element.

    Rows that receive nothing keep their bits. The touched rows are gathered first, so that FP64 accumulators exist for
    them alone.
    """
    check_subnormals(base.device, source.numel())
    touched, inverse = torch.unique(slots, return_inverse=True)
    old = base[touched].to(torch.float64)
    wide = source.to(torch.float64)
    total = old.index_add(0, inverse, wide)
    magnitude = old.abs().index_add(0, inverse, wide.abs())
    count = torch.ones_like(touched).index_add(0, inverse, torch.ones_like(inverse)).to(torch.float64)
    zero = (old == 0).all(dim=1)
    result, undecided = _decide(total, magnitude, (count - zero.to(torch.float64)).unsqueeze(1), 1)
    for row, column in torch.nonzero(undecided).tolist():
        terms = torch.cat([base[touched[row], column].reshape(1), source[inverse == row, column]])
        result[row, column] = _resolve_values(terms.cpu().numpy(), 1)
    return base.index_copy(0, touched, result)


def _accumulate(base: Tensor | None, rows: int, slots: Tensor, source: Tensor) -> Tensor:
    if source.device.type == "cpu":
        return accumulate_cpu(base, rows, slots, source, _resolve_values)
    start = torch.zeros((rows, source.shape[1]), device=source.device) if base is None else base
    return accumulate_reference(start, slots, source)


def _require_index(index: Tensor, size: int, what: str) -> Tensor:
    if index.dtype not in (torch.int64, torch.int32):
        raise CallerError(f"{what} needs an integer index, not {index.dtype}")
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= size):
        raise CallerError(f"{what} index out of range for {size} rows")
    return index.to(torch.int64)


def scatter_rows(rows: int, index: Tensor, source: Tensor) -> Tensor:
    """(rows, d) tensor: row i is FP32 of the exact sum of the rows of `source` (n, d) whose `index` (n,) is i.

    Raises:
        CallerError: shapes, dtypes or an index out of range.
        DeviceError: the device flushes subnormal numbers.
    """
    source = require_fp32(source, "scatter_rows")
    if source.dim() != 2 or index.shape != source.shape[:1]:
        raise CallerError(
            f"scatter_rows needs index (n,) and source (n, d), not {tuple(index.shape)}, {tuple(source.shape)}"
        )
    return _accumulate(None, rows, _require_index(index, rows, "scatter_rows"), source)


def embedding_backward(grad: Tensor, indices: Tensor, rows: int, padding_idx: int = -1) -> Tensor:
    """Gradient (rows, d) of an embedding table from grad (…, d) at indices (…): exact sums, rounded once.

    Occurrences of `padding_idx` are left out. Errors as in `scatter_rows`.
    """
    flat, positions = grad.reshape(-1, grad.shape[-1]), indices.reshape(-1)
    if padding_idx >= 0:
        keep = positions != padding_idx
        flat, positions = flat[keep], positions[keep]
    return scatter_rows(rows, positions, flat)


def index_add(base: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """FP32 of base + Σ of the slices of `source` along `dim`, one rounding for each element of the touched slices.

    Raises:
        CallerError: shapes, dtypes or an index out of range.
        DeviceError: the device flushes subnormal numbers.
    """
    base, source = require_fp32(base, "index_add"), require_fp32(source, "index_add")
    if index.dim() != 1 or source.dim() != base.dim() or index.shape[0] != source.shape[dim]:
        raise CallerError("index_add needs a 1-D index with one entry for each slice of the source")
    front, front_source = base.movedim(dim, 0), source.movedim(dim, 0)
    if front.shape[1:] != front_source.shape[1:]:
        raise CallerError(f"index_add can't add slices {tuple(front_source.shape[1:])} to {tuple(front.shape[1:])}")
    size = front.shape[0]
    width = math.prod(front.shape[1:])
    slots = _require_index(index, size, "index_add")
    result = _accumulate(front.reshape(size, width), size, slots, front_source.reshape(index.shape[0], width))
    return result.reshape(front.shape).movedim(0, dim).contiguous()


def scatter_add(base: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """FP32 of base + Σ source scattered along `dim` (the meaning of `torch.Tensor.scatter_add`), rounded once.

    Raises:
        CallerError: shapes, dtypes or an index out of range.
        DeviceError: the device flushes subnormal numbers.
    """
    base, source = require_fp32(base, "scatter_add"), require_fp32(source, "scatter_add")
    if not (base.dim() == index.dim() == source.dim()):
        raise CallerError("scatter_add needs base, index and source of one rank")
    if any(i > s for i, s in zip(index.shape, source.shape, strict=True)):
        raise CallerError(f"scatter_add index {tuple(index.shape)} exceeds source {tuple(source.shape)}")
    source = source[tuple(slice(0, n) for n in index.shape)]
    index = _require_index(index, base.shape[dim] if base.dim() else 1, "scatter_add")
    slots = torch.arange(base.numel(), device=base.device).reshape(base.shape)
    slots = slots[tuple(slice(0, n) if d != dim % base.dim() else slice(None) for d, n in enumerate(index.shape))]
    flat = torch.gather(slots, dim, index).reshape(-1)
    return _accumulate(base.reshape(-1, 1), base.numel(), flat, source.reshape(-1, 1)).reshape(base.shape)
