"""Sums, means, variances, norms and extremes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics.backend import Backend
from monitor.numerics.errors import UnsupportedOperator
from monitor.numerics.operators.elementwise import quotient, square_root
from monitor.numerics.rounding.sums import order_free_cumsum

__all__ = [
    "all_dims",
    "along",
    "arg",
    "cumprod",
    "cumsum",
    "extreme",
    "extreme_all",
    "histogram",
    "largest_first",
    "logsumexp",
    "mean",
    "norm_along",
    "norm_scale",
    "product_along",
    "product_of_all",
    "smallest_and_largest",
    "sort",
    "std",
    "sum_over",
    "topk",
    "var",
    "var_mean",
    "vector_norm",
]

Dims = Sequence[int] | int | None


def all_dims(x: Tensor, dims: Dims) -> list[int]:
    """The dimensions as a list without negative numbers; none or an empty list means all."""
    if isinstance(dims, int):
        dims = [dims]
    if not dims:
        return list(range(x.dim()))
    return sorted(dim % max(x.dim(), 1) for dim in dims) if x.dim() else []


def _sum_float(backend: Backend, x: Tensor, dims: Dims, keepdim: bool) -> Tensor:
    listed = all_dims(x, dims)
    if not listed:
        return x + 0.0
    if x.dtype == torch.float64:
        return _pairwise(x, listed, keepdim)
    return backend.sum(x, listed, keepdim)


def _pairwise(x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    """FP64: neighbours are added, then neighbours among these sums, and so on; a lone last one waits."""
    kept = [dim for dim in range(x.dim()) if dim not in dims]
    count = math.prod(x.shape[dim] for dim in dims)
    rest = x.permute(*dims, *kept).reshape(count, *(x.shape[dim] for dim in kept))
    rest = rest if len(rest) else rest.new_zeros((1, *rest.shape[1:]))
    while len(rest) > 1:
        even = len(rest) // 2 * 2
        rest = torch.cat([rest[0:even:2] + rest[1:even:2], rest[even:]])
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    return rest[0].reshape(shape) if keepdim else rest[0].clone()


def sum_over(
    backend: Backend, x: Tensor, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    if dtype is not None:
        x = x.to(dtype)
    if not x.dtype.is_floating_point:
        return torch.sum(x, all_dims(x, dims), keepdim=keepdim, dtype=dtype) if x.dim() else torch.sum(x, dtype=dtype)
    return _sum_float(backend, x, dims, keepdim)


def _count(x: Tensor, dims: Dims) -> int:
    count = 1
    for dim in all_dims(x, dims):
        count *= x.shape[dim]
    return count


def mean(
    backend: Backend, x: Tensor, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Rounded sum divided by the number of elements."""
    if dtype is not None:
        x = x.to(dtype)
    return quotient(_sum_float(backend, x, dims, keepdim), _count(x, dims))


def var_mean(
    backend: Backend, x: Tensor, dims: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    centre = mean(backend, x, dims, True)
    rest = x - centre
    degrees = max(_count(x, dims) - (1 if correction is None else correction), 0)
    variance = quotient(_sum_float(backend, rest * rest, dims, keepdim), degrees)
    return variance, centre if keepdim else centre.reshape(variance.shape)


def var(backend: Backend, x: Tensor, dims: Dims = None, **kwargs: Any) -> Tensor:
    return var_mean(backend, x, dims, **kwargs)[0]


def std(backend: Backend, x: Tensor, dims: Dims = None, **kwargs: Any) -> Tensor:
    return square_root(var_mean(backend, x, dims, **kwargs)[0])


def vector_norm(
    backend: Backend,
    x: Tensor,
    order: float = 2,
    dims: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Norm of any order, in FP32 and then converted; order 2 scales by a power of two, so that no square overflows."""
    if dtype is not None and dtype != torch.float32:
        return vector_norm(backend, x.to(torch.float32), order, dims, keepdim).to(dtype)
    listed = all_dims(x, dims)
    if order == float("inf"):
        return x.abs().amax(listed, keepdim=keepdim) if listed else x.abs()
    if order == 1:
        return _sum_float(backend, x.abs(), dims, keepdim)
    if order == -float("inf"):
        return x.abs().amin(listed, keepdim=keepdim) if listed else x.abs()
    if order == 0:
        return (x != 0).sum(listed, keepdim=keepdim).to(x.dtype) if listed else (x != 0).to(x.dtype)
    if order != 2:
        powers = _sum_float(backend, backend.power(x.abs(), float(order)), dims, keepdim)
        return backend.power(powers, 1.0 / float(order))
    if not listed or x.numel() == 0:
        return x.abs() if not listed else _sum_float(backend, x, dims, keepdim)
    largest = x.abs().amax(listed, keepdim=True)
    scale = norm_scale(largest)
    small = torch.div(x, scale)
    root = square_root(_sum_float(backend, small * small, dims, keepdim))
    return root * (scale if keepdim else scale.reshape(root.shape))


def norm_scale(largest: Tensor) -> Tensor:
    """By which elements are divided before they are squared: a power of two, by the largest magnitude."""
    # Biased exponents 1 … 253 keep both the scale and its inverse normal; a larger one means infinity or NaN.
    biased = ((largest.view(torch.int32) >> 23) & 0xFF).clamp(min=1, max=253)
    return (biased << 23).view(torch.float32)


def extreme(largest: bool) -> Any:
    def amax(_: Backend, x: Tensor, dims: Dims = (), keepdim: bool = False) -> Tensor:
        listed = all_dims(x, dims)
        out = (x.amax(listed, keepdim=keepdim) if largest else x.amin(listed, keepdim=keepdim)) if listed else x.clone()
        return out + 0.0 if x.dtype.is_floating_point else out

    return amax


def extreme_all(largest: bool) -> Any:
    def reduce(_: Backend, x: Tensor) -> Tensor:
        out = x.amax() if largest else x.amin()
        return out + 0.0 if x.dtype.is_floating_point else out

    return reduce


def smallest_and_largest(
    backend: Backend, x: Tensor, *, dim: int | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = () if dim is None else (dim,)
    smallest, largest = (extreme(which)(backend, x, dims, keepdim) for which in (False, True))
    return smallest, largest


def histogram(_: Backend, x: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Tensor:
    """Counts of the elements in each of equal bins from low to high, both included; those outside are left out.

    An element lies in bin ⌊((x − low) / (high − low)) · bins⌋, each operation rounded to FP32, or in the last.
    """
    if low > high or bins < 1:
        raise CallerError("histc: at least one bin, and max no smaller than min")
    flat = x.reshape(-1).to(torch.float32)
    first, last = (torch.full((), float(value), device=x.device) for value in (low, high))
    if low == high and flat.numel():
        first, last = flat.amin(), flat.amax()
    if bool((first == last).all()):
        first, last = first - 1.0, last + 1.0
    if not bool((first.isfinite() & last.isfinite()).all()):
        raise UnsupportedOperator(
            "aten.histc", ("the input has values that are not finite; give the operator min and max")
        )
    kept = flat[(flat >= first) & (flat <= last)]
    places = (torch.div(kept - first, last - first) * float(bins)).floor().clamp(0, bins - 1).long()
    return torch.bincount(places, minlength=bins).to(x.dtype)


def product_of_all(backend: Backend, x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return product_along(backend, x.reshape(-1), 0, dtype=dtype)


def product_along(
    _: Backend, x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Neighbours are multiplied, then neighbours among these products, and so on; a lone last one waits."""
    if dtype is not None:
        x = x.to(dtype)
    if not x.dtype.is_floating_point:
        return torch.prod(x, dim, keepdim=keepdim, dtype=dtype)
    if x.dim() == 0:
        return x.clone()
    rest = x.movedim(dim, 0)
    if not len(rest):
        rest = torch.ones((1, *rest.shape[1:]), dtype=x.dtype, device=x.device)
    while len(rest) > 1:
        even = len(rest) // 2 * 2
        rest = torch.cat([rest[0:even:2] * rest[1:even:2], rest[even:]])
    return rest.movedim(0, dim).contiguous() if keepdim else rest[0].clone()


def cumprod(_: Backend, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Running products in doubling steps (Hillis and Steele 1986): each is the product of two halves, rounded once."""
    if dtype is not None:
        x = x.to(dtype)
    if not x.dtype.is_floating_point:
        return torch.cumprod(x, dim, dtype=dtype)
    if x.dim() == 0:
        return x.clone()
    out, step = x.movedim(dim, 0), 1
    while step < len(out):
        out = torch.cat([out[:step], out[step:] * out[:-step]])
        step *= 2
    return out.movedim(0, dim).contiguous()


def norm_along(
    backend: Backend,
    x: Tensor,
    order: float | None,
    dims: Dims,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return vector_norm(backend, x, 2 if order is None else order, dims, keepdim, dtype=dtype)


def logsumexp(backend: Backend, x: Tensor, dims: Dims, keepdim: bool = False) -> Tensor:
    listed = all_dims(x, dims)
    top = x.amax(listed, keepdim=True) + 0.0
    top = torch.where(top.isfinite(), top, torch.zeros_like(top))
    total = backend.unary("log", backend.sum(backend.unary("exp", x - top), listed, keepdim))
    return total + (top if keepdim else top.reshape(total.shape))


def largest_first(x: Tensor, dim: int, keepdim: bool, largest: bool) -> tuple[Tensor, Tensor]:
    """Extreme along a dimension and the lowest index that holds it; a NaN is the extreme."""
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    top = x.amax(dim, keepdim=True) if largest else x.amin(dim, keepdim=True)
    hit = (x == top) | x.isnan() if x.dtype.is_floating_point else x == top
    shape = [1] * x.dim()
    shape[dim] = -1
    places = torch.arange(x.shape[dim], device=x.device).reshape(shape)
    index = torch.where(hit, places, x.shape[dim]).amin(dim, keepdim=True)
    values = torch.gather(x, dim, index)
    return (values, index) if keepdim else (values.squeeze(dim), index.squeeze(dim))


def along(largest: bool) -> Any:
    def find(_: Backend, x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
        return largest_first(x, dim, keepdim, largest)

    return find


def arg(largest: bool) -> Any:
    def find(_: Backend, x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        if dim is None:
            index = largest_first(x.reshape(-1), 0, False, largest)[1]
            return index.reshape([1] * x.dim()) if keepdim else index
        return largest_first(x, dim, keepdim, largest)[1]

    return find


def sort(
    _: Backend, x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = True
) -> tuple[Tensor, Tensor]:
    """Always stable."""
    values, index = torch.sort(x, dim=dim, descending=descending, stable=True)
    return values, index


def topk(
    _: Backend, x: Tensor, k: int, dim: int = -1, largest: bool = True, ordered: bool = True
) -> tuple[Tensor, Tensor]:
    if x.dim() == 0:
        return x.clone(), torch.zeros((), dtype=torch.int64, device=x.device)
    values, index = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k).contiguous(), index.narrow(dim, 0, k).contiguous()


def cumsum(_: Backend, x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    if dtype is not None:
        x = x.to(dtype)
    if not x.dtype.is_floating_point:
        return torch.cumsum(x, dim, dtype=dtype)
    return order_free_cumsum(x, dim)
