"""Histograms between edges, and reductions of segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics.backend import Backend
from monitor.numerics.errors import UnsupportedOperator
from monitor.numerics.operators.elementwise import linspace, quotient
from monitor.numerics.operators.selections import reduce_places

__all__ = [
    "histogram",
    "histogram_of_edges",
    "histogramdd",
    "histogramdd_edges",
    "histogramdd_of_edges",
    "segment_reduce",
    "segment_reduce_backward",
]

Pair = tuple[Tensor, Tensor]
Limits = Sequence[float] | None


def histogramdd_edges(
    backend: Backend,
    x: Tensor,
    bins: Sequence[int],
    *,
    range: Limits = None,
    weight: Tensor | None = None,
    density: bool = False,
) -> list[Tensor]:
    """Edges in equal steps between the limits, or else between the extremes of a column, 1 apart where they are one."""
    found = []
    for k, (count, column) in enumerate(zip(bins, x.reshape(-1, x.shape[-1]).unbind(1), strict=True)):
        if range is not None:
            low, high = range[2 * k], range[2 * k + 1]
        else:
            low, high = (float(column.amin()), float(column.amax())) if column.numel() else (0.0, 1.0)
        if not -torch.inf < low <= high < torch.inf:
            raise UnsupportedOperator("aten.histogram", "limits that are not finite; give them")
        if low == high:
            low, high = low - 0.5, high + 0.5
        found.append(linspace(backend, low, high, count + 1, dtype=torch.float32, device=x.device))
    return found


def histogramdd_of_edges(
    backend: Backend, x: Tensor, edges: Sequence[Tensor], *, weight: Tensor | None = None, density: bool = False
) -> Tensor:
    """Counts, or exact sums of weights, of the rows of x whose elements lie between edges.

    A bin holds its lower edge, the last one both; a NaN lies in none. A density is divided by the whole, then by the
    width of a bin in one dimension after another.
    """
    if any(len(ends) < 2 for ends in edges):
        raise CallerError("histogram: a bin has two edges; give at least one bin")
    rows = x.reshape(-1, x.shape[-1])
    place = torch.zeros(len(rows), dtype=torch.int64, device=x.device)
    inside = torch.ones_like(place, dtype=torch.bool)
    for column, ends in zip(rows.unbind(1), edges, strict=True):
        inside = inside & (column >= ends[0]) & (column <= ends[-1])
        mine = torch.searchsorted(ends.contiguous(), column.contiguous(), right=True) - 1
        place = place * (len(ends) - 1) + mine.clamp(0, len(ends) - 2)
    shape = [len(ends) - 1 for ends in edges]
    size = torch.Size(shape).numel()
    if weight is None:
        out = torch.bincount(place[inside], minlength=size).to(torch.float32)
    else:
        out = backend.scatter_rows(size, place[inside], weight.reshape(-1, 1)[inside]).reshape(-1)
    out = out.reshape(shape)
    if density:
        out = torch.div(out, backend.sum(out, list(range(out.dim())), False))
        for k, ends in enumerate(edges):
            out = torch.div(out, (ends[1:] - ends[:-1]).reshape([-1] + [1] * (len(edges) - 1 - k)))
    return out


def histogramdd(backend: Backend, x: Tensor, bins: Sequence[int], *, range: Limits = None, **more: Any) -> Tensor:
    return histogramdd_of_edges(backend, x, histogramdd_edges(backend, x, bins, range=range), **more)


def histogram_of_edges(backend: Backend, x: Tensor, edges: Tensor, **more: Any) -> Pair:
    return histogramdd_of_edges(backend, x.reshape(-1, 1), [edges], **more), edges.clone()


def histogram(backend: Backend, x: Tensor, bins: int = 100, *, range: Limits = None, **more: Any) -> Pair:
    (edges,) = histogramdd_edges(backend, x.reshape(-1, 1), [bins], range=range)
    return histogram_of_edges(backend, x, edges, **more)


_UNITS = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -torch.inf, "min": torch.inf}
_PLACED = {"mean": "sum", "max": "amax", "min": "amin"}


class _Segments:
    """Which segment each element of data along an axis belongs to, and how many each segment has."""

    def __init__(self, data: Tensor, lengths: Tensor | None, offsets: Tensor | None, axis: int) -> None:
        if offsets is None and lengths is None:
            raise UnsupportedOperator("aten.segment_reduce", "neither lengths nor offsets")
        if offsets is None:
            assert lengths is not None
            ends = torch.cumsum(lengths, -1)
            offsets = torch.cat([torch.zeros_like(ends[..., :1]), ends], -1)
        lead, count = data.shape[:axis], data.shape[axis]
        inner = data.shape[axis + 1 :].numel()
        flat = offsets.reshape(lead.numel(), -1)
        size = flat.shape[1] - 1
        along = torch.arange(count, device=data.device).expand(len(flat), count).contiguous()
        segment = torch.searchsorted(flat.contiguous(), along, right=True) - 1
        self.held = ((segment >= 0) & (segment < size))[..., None].expand(-1, -1, inner).reshape(-1)
        row = torch.arange(len(flat), device=data.device)[:, None] * size + segment.clamp(0, max(size - 1, 0))
        self.places = (row[..., None] * inner + torch.arange(inner, device=data.device)).reshape(-1)[self.held]
        self.shape = (*lead, size, *data.shape[axis + 1 :])
        counts = (flat[:, 1:] - flat[:, :-1])[..., None].expand(-1, -1, inner)
        self.counts = counts.reshape(self.shape).to(torch.float32)

    def reduced(self, backend: Backend, values: Tensor, how: str, initial: float | None) -> Tensor:
        start = values.new_full(self.shape, _UNITS[how] if initial is None else initial)
        return reduce_places(backend, start, self.places, values, _PLACED.get(how, how), initial is not None)


def segment_reduce(
    backend: Backend,
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    indices: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> Tensor:
    """Exact sums and extremes, products pairwise; the mean of no elements is NaN, or the initial value."""
    fits = lengths is None or not lengths.numel() or (lengths >= 0).all() & (lengths.sum(-1) == data.shape[axis]).all()
    if not (unsafe or fits):
        raise CallerError("segment_reduce: lengths must not be negative, and add up to the data's size")
    parts = _Segments(data, lengths, offsets, axis)
    out = parts.reduced(backend, data.reshape(-1)[parts.held], reduce, initial)
    if reduce == "mean":
        whole = out if initial is not None else torch.full_like(out, torch.nan)
        out = torch.where(parts.counts > 0, torch.div(out, parts.counts.clamp(min=1)), whole)
    return out


def segment_reduce_backward(
    backend: Backend,
    grad: Tensor,
    output: Tensor,
    data: Tensor,
    reduce: str,
    *,
    lengths: Tensor | None = None,
    offsets: Tensor | None = None,
    axis: int = 0,
    initial: float | None = None,
) -> Tensor:
    """Equal extremes share a gradient; that of a product's only zero is the product of the others."""
    parts = _Segments(data, lengths, offsets, axis)
    values = data.reshape(-1)[parts.held]

    def mine(whole: Tensor) -> Tensor:
        return whole.reshape(-1)[parts.places]

    slope = mine(grad)
    if reduce == "mean":
        slope = torch.div(slope, mine(parts.counts))
    elif reduce in ("max", "min"):
        hit = (values == mine(output)) | values.isnan()
        shares = parts.reduced(backend, hit.to(torch.float32), "sum", None)
        slope = torch.where(hit, torch.div(slope, mine(shares).clamp(min=1)), torch.zeros_like(slope))
    elif reduce == "prod":
        zero = values == 0
        zeros = mine(parts.reduced(backend, zero.to(torch.float32), "sum", None))
        rest = mine(parts.reduced(backend, torch.where(zero, torch.ones_like(values), values), "prod", initial))
        others = torch.where(zeros > 1, torch.zeros_like(rest), rest)
        usual = quotient(slope * mine(output), torch.where(zero, torch.ones_like(values), values))
        slope = torch.where(zero, slope * others, usual)
    out = torch.zeros_like(data).reshape(-1)
    out[parts.held] = slope
    return out.reshape(data.shape)
