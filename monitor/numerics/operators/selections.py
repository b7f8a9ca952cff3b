"""Selections, running extremes and reductions by place, with stated ties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from monitor.numerics.backend import Backend
from monitor.numerics.errors import UnsupportedOperator
from monitor.numerics.operators.indexing import flat_targets, last_put, require_places
from monitor.numerics.operators.reductions import product_along

__all__ = [
    "bincount",
    "index_reduce",
    "kthvalue",
    "logcumsumexp",
    "median",
    "median_of_all",
    "mode",
    "put",
    "reduce_places",
    "running",
    "scatter_reduce",
    "unique",
]

Pair = tuple[Tensor, Tensor]


def _sorted(x: Tensor, dim: int) -> tuple[Pair, int]:
    """Values and places sorted along the first dimension, stably, NaN last; and which dimension it was."""
    moved = x.reshape(1) if x.dim() == 0 else x.movedim(dim, 0)
    values, index = torch.sort(moved, dim=0, stable=True)
    return (values, index), dim % max(x.dim(), 1)


def _taken(x: Tensor, pair: Pair, places: Tensor, dim: int, keepdim: bool) -> Pair:
    """Row ``places`` of sorted values and their places in x, with or without the dimension."""
    values, index = (torch.gather(each, 0, places[None]) for each in pair)
    if x.dim() == 0:
        return values.reshape(()), index.reshape(())
    if keepdim:
        return values.movedim(0, dim).contiguous(), index.movedim(0, dim).contiguous()
    return values[0].clone(), index[0].clone()


def kthvalue(_: Backend, x: Tensor, k: int, dim: int = -1, keepdim: bool = False) -> Pair:
    """The k-th smallest, of equal ones the k-th in a stable order; NaN is the largest."""
    pair, dim = _sorted(x, dim)
    return _taken(x, pair, torch.full(pair[0].shape[1:], k - 1, device=x.device), dim, keepdim)


def median(ignores_nan: bool) -> Callable[..., Pair]:
    def find(_: Backend, x: Tensor, dim: int, keepdim: bool = False) -> Pair:
        """The lower median, as ``kthvalue`` takes it; a NaN is the median, unless NaNs are left out."""
        pair, dim = _sorted(x, dim)
        values = pair[0]
        unknown = values.isnan().sum(0) if values.dtype.is_floating_point else torch.zeros_like(pair[1][0])
        count = len(values) - unknown
        middle = (torch.where(count > 0, count, len(values)) - 1) // 2
        if not ignores_nan:
            middle = torch.where(unknown > 0, count, middle)
        return _taken(x, pair, middle, dim, keepdim)

    return find


def median_of_all(ignores_nan: bool) -> Callable[..., Tensor]:
    def find(backend: Backend, x: Tensor) -> Tensor:
        if not x.numel():
            if not x.dtype.is_floating_point:
                raise UnsupportedOperator(
                    "aten.median", "an empty integer tensor has no median; give at least one element"
                )
            return x.new_full((), torch.nan)
        return median(ignores_nan)(backend, x.reshape(-1), 0)[0]

    return find


def mode(_: Backend, x: Tensor, dim: int = -1, keepdim: bool = False) -> Pair:
    """The most frequent value, of several the smallest, and the last place that holds it."""
    pair, dim = _sorted(x, dim)
    values = pair[0]
    places = torch.arange(len(values), device=x.device).reshape(-1, *[1] * (values.dim() - 1)).expand(values.shape)
    begins = torch.cat([torch.ones_like(values[:1], dtype=torch.bool), values[1:] != values[:-1]])
    length = places - torch.cummax(torch.where(begins, places, 0), 0).values
    longest = torch.where(length == length.amax(0), places, len(values)).amin(0)
    return _taken(x, pair, longest, dim, keepdim)


def _scanned(first: Sequence[Tensor], join: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]) -> Any:
    """Running results along the first dimension in doubling steps (Hillis and Steele 1986)."""
    out, step = list(first), 1
    while step < len(out[0]):
        joined = join([each[:-step] for each in out], [each[step:] for each in out])
        out = [torch.cat([each[:step], new]) for each, new in zip(out, joined, strict=True)]
        step *= 2
    return out


def running(larger: bool) -> Callable[..., Pair]:
    def join(before: Sequence[Tensor], after: Sequence[Tensor]) -> Sequence[Tensor]:
        (a, i), (b, j) = before, after
        later = (b >= a) if larger else (b <= a)
        if a.dtype.is_floating_point:
            later = b.isnan() | (later & ~a.isnan())
        return torch.where(later, b, a), torch.where(later, j, i)

    def scan(_: Backend, x: Tensor, dim: int) -> Pair:
        """Running extremes and the last place that holds each; a NaN stays, at its last place."""
        if x.dim() == 0:
            return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
        moved = x.movedim(dim, 0)
        places = torch.arange(len(moved), device=x.device).reshape(-1, *[1] * (x.dim() - 1)).expand(moved.shape)
        values, index = _scanned([moved, places], join)
        return values.movedim(0, dim).contiguous(), index.movedim(0, dim).contiguous()

    return scan


def logcumsumexp(backend: Backend, x: Tensor, dim: int) -> Tensor:
    def join(before: Sequence[Tensor], after: Sequence[Tensor]) -> Sequence[Tensor]:
        (a,), (b,) = before, after
        top = torch.maximum(a, b)
        shift = torch.where(top.isfinite(), top, 0.0)
        rest = backend.unary("log", backend.unary("exp", a - shift) + backend.unary("exp", b - shift))
        return [torch.where(top.isnan(), top, shift + rest)]

    return x.clone() if x.dim() == 0 else _scanned([x.movedim(dim, 0)], join)[0].movedim(0, dim).contiguous()


def unique(name: str) -> Callable[..., Any]:
    """Distinct values, sorted, −0 as +0, with places and counts."""

    def find(_: Backend, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = x + 0.0 if x.dtype.is_floating_point else x
        return getattr(torch.ops.aten, name).default(plain, *args, **kwargs)

    return find


def bincount(backend: Backend, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if weights is None:
        return torch.bincount(x, minlength=minlength)
    if weights.dtype != torch.float32:
        raise UnsupportedOperator("aten.bincount", f"{weights.dtype} weights; use float32")
    if not x.numel():
        return torch.bincount(x, minlength=minlength)  # which counts, as ATen does, though there are weights
    size = max(minlength, int(x.max()) + 1)
    return backend.scatter_rows(size, x.to(torch.int64), weights.reshape(-1, 1)).reshape(-1)


def put(backend: Backend, x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Flat places of x; of several values for one place the last, or their sum."""
    require_places(index, x.numel(), -x.numel())
    places = torch.where(index < 0, index + x.numel(), index).reshape(-1)
    if not accumulate:
        return last_put(x.reshape(-1), places, source.reshape(-1)).reshape(x.shape)
    return reduce_places(backend, x, places, source.reshape(-1), "sum", True)


def scatter_reduce(
    backend: Backend,
    x: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    """``sum``, ``mean``, ``prod``, ``amax`` or ``amin`` of what goes to one place."""
    if x.dim() == 0:
        places, taken = torch.zeros_like(index.reshape(-1)), source.reshape(-1)[: index.numel()]
    else:
        places = flat_targets(x, dim, index)
        taken = source[tuple(slice(0, size) for size in index.shape)].reshape(-1)
    return reduce_places(backend, x, places, taken, reduce, include_self)


def index_reduce(
    backend: Backend,
    x: Tensor,
    dim: int,
    index: Tensor,
    source: Tensor,
    reduce: str,
    *,
    include_self: bool = True,
) -> Tensor:
    if x.dim() == 0:
        require_places(index, 1)
        return reduce_places(backend, x, index.reshape(-1), source.reshape(-1), reduce, include_self)
    shape = [1] * x.dim()
    shape[dim] = -1
    wide = index.reshape(shape).expand(source.shape)
    return reduce_places(backend, x, flat_targets(x, dim, wide), source.reshape(-1), reduce, include_self)


def reduce_places(backend: Backend, x: Tensor, places: Tensor, values: Tensor, how: str, include_self: bool) -> Tensor:
    """x with what goes to each flat place reduced; sums in no order, products pairwise in the order of the source.

    The type stays x's, however small: integers wrap around.
    """
    if how == "mean" and x.dtype == torch.bool:
        raise UnsupportedOperator("aten.scatter_reduce", "a mean of bools; convert them")
    flat, count = x.reshape(-1), torch.bincount(places, minlength=x.numel())
    touched = count > 0
    floating = x.dtype.is_floating_point
    if how in ("sum", "mean"):
        if floating:
            total = backend.scatter_rows(x.numel(), places, values.reshape(-1, 1)).reshape(-1)
        else:
            total = torch.zeros_like(flat).scatter_add(0, places, values)
        total = flat + total if include_self else total
        if how == "mean":
            divisor = count + 1 if include_self else count.clamp(min=1)
            total = total / divisor.to(x.dtype) if floating else torch.div(total, divisor, rounding_mode="floor")
        out = total
    else:
        order = torch.sort(places, stable=True).indices
        first = torch.cumsum(count, 0) - count
        rank = torch.arange(len(order), device=x.device) - first[places[order]]
        depth = int(count.max()) if len(order) else 0
        unit = {"prod": 1, "amax": -torch.inf, "amin": torch.inf}[how]
        if x.dtype == torch.bool:
            unit = how != "amax"
        elif not floating and how in ("amax", "amin"):
            limits = torch.iinfo(x.dtype)
            unit = limits.min if how == "amax" else limits.max
        table = torch.full((depth, x.numel()), unit, dtype=x.dtype, device=x.device)
        table[rank, places[order]] = values[order].to(x.dtype)
        if include_self or not depth:
            table = torch.cat([flat[None], table])
        if how == "prod":
            out = product_along(backend, table, 0)
        else:
            out = table.amax(0) if how == "amax" else table.amin(0)
            out = out + 0.0 if floating else out
    return torch.where(touched, out.to(x.dtype), flat).reshape(x.shape)
