"""Sampling of images and volumes at the places of a grid, and its gradients.

A place takes the taps of each dimension: one for ``nearest`` (halves to even), two for ``bilinear``, four for
``bicubic`` (Keys 1981, −0.75). Taps outside, and a place that is NaN, take nothing. Places and weights are computed in
FP64 and rounded once, but that ``nearest`` rounds the place to FP32 first. Products and sums over taps have a stated
order, each rounded once; sums over channels and over the shares of an element are exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from monitor.numerics.errors import UnsupportedOperator

__all__ = ["grid_sample", "grid_sample_backward"]

_NEAREST, _CUBIC = 1, 2
_ZEROS, _BORDER = 0, 1
_A = -0.75
Tap = tuple[Tensor, Tensor, Tensor]
"""An index along one dimension, its weight, and the weight's slope in the grid's coordinate."""


def _inside(at: Tensor, slope: Tensor, size: int, padding: int, aligned: bool) -> tuple[Tensor, Tensor]:
    """Places moved into the image by the rule of padding, and their slopes; a slope ends at a border."""
    if padding == _ZEROS:
        return at, slope
    if padding != _BORDER:
        low, span = (0.0, float(size - 1)) if aligned else (-0.5, float(size))
        if span == 0:
            return torch.zeros_like(at), torch.zeros_like(slope)
        far = (at - low).abs()
        turns = torch.floor(torch.div(far, span))
        rest, back = far - turns * span, turns - 2.0 * torch.floor(turns * 0.5) != 0
        slope = torch.where((at < low) != back, -slope, slope)
        at = torch.where(back, span - rest, rest) + low
    outside = (at <= 0) | (at >= size - 1)
    return at.clamp(0.0, size - 1.0), torch.where(outside, torch.zeros_like(slope), slope)


def _cubic(t: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Weights of four neighbours and their slopes in t, the distance from the second to a place."""
    for near, sign in ((t, 1.0), (1.0 - t, -1.0)):
        far = near + 1.0
        inner = ((_A + 2.0) * near - (_A + 3.0)) * near * near + 1.0
        inner_slope = (3.0 * (_A + 2.0) * near - 2.0 * (_A + 3.0)) * near * sign
        outer = ((_A * far - 5.0 * _A) * far + 8.0 * _A) * far - 4.0 * _A
        outer_slope = ((3.0 * _A * far - 10.0 * _A) * far + 8.0 * _A) * sign
        yield from [(outer, outer_slope), (inner, inner_slope)][:: int(sign)]


def _taps(at: Tensor, size: int, mode: int, padding: int, aligned: bool) -> list[Tap]:
    scale = 0.5 * (size - 1) if aligned else 0.5 * size
    place = at.to(torch.float64) * scale + 0.5 * (size - 1)
    slope = torch.full_like(place, scale)
    kept: list[Tap] = []
    if mode == _CUBIC:
        low = torch.floor(place)
        each = enumerate(_cubic(place - low), start=-1)
        found = [
            (_inside(low + k, slope, size, padding, aligned)[0], weight, incline * slope)
            for k, (weight, incline) in each
        ]
    else:
        place, slope = _inside(place, slope, size, padding, aligned)
        if mode == _NEAREST:
            found = [(torch.round(place.to(torch.float32)), torch.ones_like(at), torch.zeros_like(at))]
        else:
            low = torch.floor(place)
            found = [(low, 1.0 - (place - low), -slope), (low + 1.0, place - low, slope)]
    for index, weight, incline in found:
        held = (index >= 0) & (index <= size - 1)
        index, weight, incline = (torch.where(held, each, torch.zeros_like(each)) for each in (index, weight, incline))
        kept.append((index.to(torch.int64), weight.to(torch.float32), incline.to(torch.float32)))
    return kept


def _corners(x: Tensor, grid: Tensor, *how: int) -> Iterator[tuple[Tensor, list[Tap]]]:
    """Flat place in the image (n, 1, places) of each choice of taps, and the taps, the last dimension of x first."""
    sizes = x.shape[2:][::-1]
    flat = grid.reshape(len(grid), 1, grid.shape[1:-1].numel(), len(sizes))
    axes = [_taps(flat[..., k], size, how[0], how[1], bool(how[2])) for k, size in enumerate(sizes)]
    for taps in itertools.product(*axes[::-1]):
        index = torch.zeros_like(taps[0][0])
        for (place, _, _), size in zip(taps, x.shape[2:], strict=True):
            index = index * size + place
        yield index, list(taps[::-1])


def _product(parts: Sequence[Tensor]) -> Tensor:
    whole = parts[0]
    for part in parts[1:]:
        whole = whole * part
    return whole


def grid_sample(x: Tensor, grid: Tensor, mode: int, padding: int, aligned: bool) -> Tensor:
    """Samples (n, c, …) of an image at a grid (n, …, rank); the corner that is last in the image is added last."""
    if mode == _CUBIC and x.dim() != 4:
        raise UnsupportedOperator("aten.grid_sampler_3d", "bicubic samples of a volume; PyTorch has none")
    flat = x.reshape(*x.shape[:2], x.shape[2:].numel())
    total: Tensor | None = None
    for index, taps in _corners(x, grid, mode, padding, aligned):
        seen = torch.gather(flat, 2, index.expand(-1, x.shape[1], -1))
        part = seen * _product([weight for _, weight, _ in taps])
        total = part if total is None else total + part
    assert total is not None
    return total.reshape(*x.shape[:2], *grid.shape[1:-1])


def grid_sample_backward(
    grad: Tensor, x: Tensor, grid: Tensor, mode: int, padding: int, aligned: bool, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    n, channels = x.shape[:2]
    flat = x.reshape(n, channels, x.shape[2:].numel())
    rows = grad.reshape(n, channels, grad.shape[2:].numel())
    places, shares, inclines = [], [], []
    for index, taps in _corners(x, grid, mode, padding, aligned):
        wide = index.expand(-1, channels, -1)
        if mask[0]:
            places.append(wide)
            shares.append(rows * _product([weight for _, weight, _ in taps]))
        if mask[1] and mode != _NEAREST:
            along = (torch.gather(flat, 2, wide) * rows).sum(1)
            each = [
                along * _product([taps[b][2 if a == b else 1].squeeze(1) for b in range(len(taps))])
                for a in range(len(taps))
            ]
            inclines.append(torch.stack(each, -1))
    grad_x = torch.zeros_like(flat).scatter_add(2, torch.cat(places, 2), torch.cat(shares, 2)) if mask[0] else None
    grad_grid = torch.stack(inclines).sum(0).reshape(grid.shape) if inclines else torch.zeros_like(grid)
    return None if grad_x is None else grad_x.reshape(x.shape), grad_grid if mask[1] else None
