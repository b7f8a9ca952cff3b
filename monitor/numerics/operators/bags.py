"""Embedding bags: exact sums over the rows of a table that each bag names; ties of a maximum take the lowest place."""

from __future__ import annotations

import torch
from torch import Tensor

from monitor.numerics.backend import Backend
from monitor.numerics.errors import UnsupportedOperator

__all__ = ["bag", "bag_backward", "bag_weights_backward"]

_SUM, _MEAN, _MAX = range(3)
_NONE = -1


def _require_plain(scale_grad_by_freq: bool, sparse: bool) -> None:
    if scale_grad_by_freq or sparse:
        raise UnsupportedOperator("aten._embedding_bag", "use scale_grad_by_freq=False and sparse=False")


def bag(
    backend: Backend,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = _NONE,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Result (bags, d), the bag of each index, the indices of each bag that count, and the rows of its maxima."""
    _require_plain(scale_grad_by_freq, sparse)
    starts = (offsets[:-1] if include_last_offset else offsets).contiguous()
    bags, width = len(starts), weight.shape[1]
    outside = (indices < 0).any() | (indices >= len(weight)).any() | (offsets > len(indices)).any()
    if bags and bool(outside | (starts[0] != 0)):
        raise IndexError("an index is outside the table, or the bags do not begin with the first index and end in time")
    of = torch.searchsorted(starts, torch.arange(len(indices), device=indices.device).to(starts), right=True) - 1
    of = of.to(torch.int64)
    kept = indices != padding_idx
    size = torch.zeros(bags, dtype=torch.int64, device=of.device).index_add_(0, of[kept], kept[kept].long())
    rows, to = weight[indices[kept]], of[kept]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[kept][:, None]
    if mode == _MAX:
        out, best = _largest(rows, indices[kept], to, bags, width)
    else:
        out = backend.scatter_rows(bags, to, rows)
        best = torch.full((0,), _NONE, dtype=torch.int64, device=of.device)
        if mode == _MEAN:
            out = torch.div(out, size.clamp(min=1).to(out)[:, None])
    return out, of, size, best


def _largest(rows: Tensor, indices: Tensor, to: Tensor, bags: int, width: int) -> tuple[Tensor, Tensor]:
    where = to[:, None].expand(-1, width)
    lowest = rows.new_full((bags, width), -torch.inf)
    top = lowest.scatter_reduce(0, where, rows, "amax")
    hit = (rows == top[to]) | rows.isnan()
    places = torch.arange(len(rows), device=rows.device)[:, None].expand(-1, width)
    none = torch.full((bags, width), len(rows), device=rows.device)
    first = none.scatter_reduce(0, where, torch.where(hit, places, len(rows)), "amin")
    empty = first == len(rows)
    safe = torch.where(empty, 0, first)
    if not len(rows):
        return torch.zeros_like(top), torch.full_like(first, _NONE)
    return torch.where(empty, 0.0, rows.gather(0, safe)), torch.where(empty, _NONE, indices[safe])


def bag_backward(
    backend: Backend,
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = _NONE,
) -> Tensor:
    """Gradient of the table."""
    _require_plain(scale_grad_by_freq, sparse)
    width = grad.shape[1]
    if mode == _MAX:
        known = maximum_indices != _NONE
        columns = torch.arange(width, device=grad.device).expand_as(maximum_indices)
        target = (maximum_indices * width + columns)[known]
        return backend.scatter_rows(num_weights * width, target, grad[known][:, None]).reshape(num_weights, width)
    kept = indices != padding_idx
    if mode == _MEAN:
        grad = torch.div(grad, bag_size.clamp(min=1).to(grad)[:, None])
    rows = grad[offset2bag[kept]]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[kept][:, None]
    return backend.scatter_rows(num_weights, indices[kept], rows)


def bag_weights_backward(
    backend: Backend,
    grad: Tensor,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    mode: int,
    padding_idx: int = _NONE,
) -> Tensor:
    """Gradient of ``per_sample_weights``: the product of each index's row with its bag's gradient."""
    if mode != _SUM:
        raise UnsupportedOperator("aten._embedding_bag", "weights of samples go with mode='sum'")
    total = backend.sum(grad[offset2bag] * weight[indices], [1], False)
    return torch.where(indices == padding_idx, torch.zeros_like(total), total)
