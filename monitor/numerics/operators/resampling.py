"""Upsampling and downsampling by fixed weights, one spatial dimension after the other.

Along a dimension, place i of the result is a sum of one, two or four places of the input with weights that depend on
sizes alone: products and sums in a stated order, each rounded once. The gradient of a place is the exact sum of its
shares. ATen's own kernels weigh all dimensions at once, which rounds otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from monitor.numerics.arguments import Keywords
from monitor.numerics.backend import Backend
from monitor.numerics.errors import UnsupportedOperator

__all__ = ["Kind", "downsample", "upsample"]

Kind = Literal["nearest", "nearest exact", "linear", "cubic", "linear smooth", "cubic smooth"]
Tap = tuple[Tensor, Tensor | None]
"""For each place of the result an index into the input, and its weight; None means ones."""

_CUBIC = -0.75
_SMOOTH_CUBIC = -0.5


def _taps(kind: Kind, size: int, out: int, aligned: bool, scale: float | None) -> list[Tap]:
    """Source index and weight by ATen's formulas; those of ``nearest`` in FP32, as there, as they decide an index."""
    step = 1.0 / scale if scale is not None and scale > 0 else size / out
    if kind in ("nearest", "nearest exact"):
        places = torch.arange(out).to(torch.float32) + (0.5 if kind == "nearest exact" else 0.0)
        index = (places * torch.tensor(step, dtype=torch.float32)).floor().long()
        return [(index.clamp(max=size - 1), None)]
    places = torch.arange(out).to(torch.float64)
    between = (size - 1) / (out - 1) if out > 1 else 0.0
    source = places * between if aligned else (places + 0.5) * step - 0.5
    if kind in ("linear smooth", "cubic smooth"):
        return _smooth(kind, size, places, between if aligned else step)
    if kind == "linear":
        source = source.clamp(min=0.0)
        low = source.floor().long().clamp(max=size - 1)
        ahead = (source - low).clamp(0.0, 1.0)
        return [(low, (1.0 - ahead).float()), ((low + 1).clamp(max=size - 1), ahead.float())]
    low = source.floor()
    ahead = source - low
    weights = (_outer(ahead + 1.0), _inner(ahead), _inner(1.0 - ahead), _outer(2.0 - ahead))
    return [((low.long() + k - 1).clamp(0, size - 1), weight.float()) for k, weight in enumerate(weights)]


def _inner(x: Tensor, a: float = _CUBIC) -> Tensor:
    """Keys (1981): the cubic convolution kernel for |x| <= 1."""
    return ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0


def _outer(x: Tensor, a: float = _CUBIC) -> Tensor:
    """The kernel for 1 < |x| < 2."""
    return ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a


def _smooth(kind: Kind, size: int, places: Tensor, step: float) -> list[Tap]:
    """A kernel as wide as the places lie apart (``antialias``), its weights divided by their sum in order."""
    wide = max(step, 1.0)
    reach = (1.0 if kind == "linear smooth" else 2.0) * wide
    centre = step * (places + 0.5)
    first = (centre - reach + 0.5).long().clamp(min=0)
    last = (centre + reach + 0.5).long().clamp(max=size)
    weights = []
    for k in range(int((last - first).max()) if len(places) else 0):
        x = ((first + k - centre + 0.5) / wide).abs()
        if kind == "linear smooth":
            weight = (1.0 - x).clamp(min=0.0)
        else:
            weight = torch.where(x < 1.0, _inner(x, _SMOOTH_CUBIC), _outer(x.clamp(max=2.0), _SMOOTH_CUBIC))
        weights.append(torch.where(first + k < last, weight, 0.0))
    total = functools.reduce(torch.add, weights)
    return [((first + k).clamp(max=size - 1), (weight / total).float()) for k, weight in enumerate(weights)]


def _options(kind: Kind, rank: int, rest: Sequence[Any], named: Keywords) -> tuple[bool, list[float | None]]:
    """``align_corners`` and the scale of each dimension from what follows the sizes."""
    given = list(rest)
    aligned = False
    if not kind.startswith("nearest"):
        aligned = given.pop(0) if given else named["align_corners"]
    names = ("scales",) if rank == 1 else ("scales_d", "scales_h", "scales_w")[-rank:]
    return aligned, [*given, *(named.get(name) for name in names[len(given) :])]


def upsample(kind: Kind, rank: int) -> Callable[..., Tensor]:
    """The forward operator over the last ``rank`` dimensions."""

    def apply(_: Backend, x: Tensor, output_size: Sequence[int], *rest: Any, **named: Any) -> Tensor:
        aligned, scales = _options(kind, rank, rest, named)
        for axis, (out, scale) in enumerate(zip(output_size, scales, strict=True), start=x.dim() - rank):
            x = _along(x, axis, _taps(kind, x.shape[axis], out, aligned, scale))
        return x.contiguous()

    return apply


def _along(x: Tensor, axis: int, taps: list[Tap]) -> Tensor:
    shape = [1] * x.dim()
    shape[axis] = -1
    total: Tensor | None = None
    for index, weight in taps:
        part = x.index_select(axis, index.to(x.device))
        if weight is not None:
            part = part * weight.to(x).reshape(shape)
        total = part if total is None else total + part
    assert total is not None
    return total


def downsample(kind: Kind, rank: int) -> Callable[..., Tensor]:
    """The gradient of ``upsample``."""

    def apply(
        backend: Backend, grad: Tensor, output_size: Sequence[int], input_size: Sequence[int], *rest: Any, **named: Any
    ) -> Tensor:
        aligned, scales = _options(kind, rank, rest, named)
        if tuple(grad.shape[-rank:]) != tuple(output_size):
            raise UnsupportedOperator("upsampling's gradient", "its sizes are not those of the forward pass")
        sizes = input_size[-rank:]
        for place in reversed(range(rank)):
            axis = grad.dim() - rank + place
            taps = _taps(kind, sizes[place], grad.shape[axis], aligned, scales[place])
            grad = _back_along(backend, grad, axis, sizes[place], taps)
        return grad.contiguous()

    return apply


def _back_along(backend: Backend, grad: Tensor, axis: int, size: int, taps: list[Tap]) -> Tensor:
    moved = grad.movedim(axis, 0)
    rows = moved.reshape(moved.shape[0], -1)
    shares = [rows if weight is None else rows * weight.to(grad)[:, None] for _, weight in taps]
    index = torch.cat([index for index, _ in taps]).to(grad.device)
    summed = backend.scatter_rows(size, index, torch.cat(shares))
    return summed.reshape(size, *moved.shape[1:]).movedim(0, axis)
