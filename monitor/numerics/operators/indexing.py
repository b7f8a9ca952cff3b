"""Embedding, gather, scatter and pooling: results that collect several addends are summed in no particular order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics.backend import Backend
from monitor.numerics.errors import UnsupportedOperator

__all__ = [
    "adaptive_max_pool",
    "adaptive_pool_backward",
    "embedding_backward",
    "flat_targets",
    "index",
    "index_add",
    "index_put",
    "largest_backward",
    "last_put",
    "max_pool",
    "max_pool_3d",
    "require_places",
    "scatter_add",
    "scatter_src",
    "scatter_value",
    "unpool",
]


def embedding_backward(
    backend: Backend, grad: Tensor, indices: Tensor, rows: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    if scale_grad_by_freq:
        raise UnsupportedOperator("aten.embedding_dense_backward", "use scale_grad_by_freq=False")
    index, source = indices.reshape(-1), grad.reshape(-1, grad.shape[-1])
    if padding_idx >= 0:
        kept = index != padding_idx
        index, source = index[kept], source[kept]
    return backend.scatter_rows(rows, index, source)


def require_places(index: Tensor, size: int, first: int = 0) -> None:
    """CallerError if an index is below the first or not below the size, as ATen's own kernels raise."""
    if index.numel() and not bool(((index >= first) & (index < size)).all()):
        raise CallerError(f"an index is out of bounds for {size} places: it must be from {first} to {size - 1}")


def flat_targets(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Flat positions in contiguous ``x`` that a scatter along ``dim`` writes; CallerError for those outside."""
    require_places(index, x.shape[dim])
    positions = torch.zeros_like(index)
    stride = 1
    for axis in reversed(range(x.dim())):
        if axis == dim % x.dim():
            along = index
        else:
            shape = [1] * x.dim()
            shape[axis] = -1
            along = torch.arange(index.shape[axis], device=index.device).reshape(shape)
        positions = positions + along * stride
        stride *= x.shape[axis]
    return positions.reshape(-1)


def scatter_add(backend: Backend, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    if x.dim() == 0:
        return x + source
    cut = source[tuple(slice(0, size) for size in index.shape)]
    if not x.dtype.is_floating_point:
        return torch.scatter_add(x, dim, index, source)
    summed = backend.scatter_rows(x.numel(), flat_targets(x, dim, index), cut.reshape(-1, 1)).reshape(x.shape)
    return x + summed


def index_add(
    backend: Backend, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: int | float = 1
) -> Tensor:
    if not x.dtype.is_floating_point:
        return torch.index_add(x, dim, index, source, alpha=alpha)
    if x.dim() == 0:
        return index_add(backend, x.reshape(1), 0, index.reshape(-1), source.reshape(-1), alpha=alpha).reshape(())
    moved = source.movedim(dim, 0)
    rows = moved.reshape(moved.shape[0], moved.shape[1:].numel())
    summed = backend.scatter_rows(x.shape[dim], index.reshape(-1), rows)
    summed = summed.reshape(x.shape[dim], *moved.shape[1:]).movedim(0, dim)
    return x + (summed if alpha == 1 else summed * alpha)


def _has_duplicates(targets: Tensor) -> bool:
    ordered = targets.sort().values
    return bool((ordered[1:] == ordered[:-1]).any())


def scatter_src(_: Backend, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    if x.dim() and index.numel():
        targets = flat_targets(x, dim, index)
        if _has_duplicates(targets):
            taken = source[tuple(slice(0, size) for size in index.shape)].reshape(-1)
            return last_put(x.reshape(-1), targets, taken).reshape(x.shape)
    return torch.scatter(x, dim, index, source)


def scatter_value(_: Backend, x: Tensor, dim: int, index: Tensor, value: float) -> Tensor:
    return torch.scatter(x, dim, index, value)


def index(_: Backend, x: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    return torch.ops.aten.index.Tensor(x, indices)  # type: ignore[no-any-return]


def index_put(
    backend: Backend, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    if not x.dtype.is_floating_point and accumulate:
        return torch.ops.aten.index_put.default(x, indices, values, True)  # type: ignore[no-any-return]
    positions = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    targets = torch.ops.aten.index.Tensor(positions, indices)
    spread = values.expand(targets.shape).reshape(-1)
    targets = targets.reshape(-1)
    if accumulate:
        return x + backend.scatter_rows(x.numel(), targets, spread.reshape(-1, 1)).reshape(x.shape)
    if values.numel() != 1 and _has_duplicates(targets):
        return last_put(x.reshape(-1), targets, spread).reshape(x.shape)
    return torch.ops.aten.index_put.default(x, indices, values, False)  # type: ignore[no-any-return]


def adaptive_pool_backward(backend: Backend, grad: Tensor, x: Tensor) -> Tensor:
    """Output cell i covers inputs ⌊i·n/m⌋ … ⌈(i+1)·n/m⌉ − 1 of n; cells may overlap."""
    height, width = x.shape[-2:]
    rows, columns = grad.shape[-2:]
    targets, cells, areas = [], [], []
    for i in range(rows):
        for j in range(columns):
            inside = [
                h * width + w
                for h in range(i * height // rows, -(-(i + 1) * height // rows))
                for w in range(j * width // columns, -(-(j + 1) * width // columns))
            ]
            targets += inside
            cells += [i * columns + j] * len(inside)
            areas.append(float(len(inside)))
    area = torch.tensor(areas, dtype=x.dtype, device=x.device)
    share = torch.div(grad.reshape(-1, rows * columns), area)
    source = share[:, torch.tensor(cells, device=x.device)].t()
    summed = backend.scatter_rows(height * width, torch.tensor(targets, device=x.device), source)
    return summed.t().reshape(x.shape)


def max_pool(
    _: Backend,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    # A window scans in rising order and replaces on strictly greater, on every device: ties take the lowest index.
    out, index = torch.ops.aten.max_pool2d_with_indices.default(x, kernel, stride, padding, dilation, ceil_mode)
    return out, index


def max_pool_3d(
    _: Backend,
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0, 0),
    dilation: Sequence[int] = (1, 1, 1),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    out, index = torch.ops.aten.max_pool3d_with_indices.default(
        x.contiguous(), kernel, stride, padding, dilation, ceil_mode
    )
    return out, index


def adaptive_max_pool(pool: Callable[..., Any]) -> Callable[..., Any]:
    def apply(_: Backend, x: Tensor, output_size: Sequence[int]) -> Any:
        return pool(x.contiguous(), output_size)

    return apply


def largest_backward(rank: int) -> Callable[..., Tensor]:
    """Gradient of a pool over so many dimensions, whose last argument says where each window's largest element lies."""
    return lambda backend, grad, x, *given: _scatter_largest(backend, grad, x, given[-1], rank)


def unpool(rank: int) -> Callable[..., Tensor]:
    """Values go to the places of a plane of zeros that they came from; of several for one place, the last."""

    def apply(_: Backend, x: Tensor, indices: Tensor, size: Sequence[int], *__: Any) -> Tensor:
        planes, area = x.shape[:-rank].numel(), torch.Size(size).numel()
        require_places(indices, area)
        offsets = torch.arange(planes, device=x.device).reshape(-1, 1) * area
        places = (indices.reshape(planes, -1) + offsets).reshape(-1)
        flat = torch.zeros(planes * area, dtype=x.dtype, device=x.device)
        return last_put(flat, places, x.reshape(-1)).reshape(*x.shape[:-rank], *size)

    return apply


def last_put(flat: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """``flat`` with values at places; of several for one place, the last."""
    ordered, order = torch.sort(places, stable=True)
    last = torch.ones_like(ordered, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return torch.index_put(flat, (ordered[last],), values[order[last]])


def _scatter_largest(backend: Backend, grad: Tensor, x: Tensor, indices: Tensor, rank: int) -> Tensor:
    """Add each gradient where its window's largest element lies, over the last ``rank`` dimensions."""
    planes, size = x.shape[:-rank].numel(), x.shape[-rank:].numel()
    require_places(indices, size)
    offsets = torch.arange(planes, device=x.device).reshape(-1, 1) * size
    target = (indices.reshape(planes, -1) + offsets).reshape(-1)
    return backend.scatter_rows(planes * size, target, grad.reshape(-1, 1)).reshape(x.shape)
