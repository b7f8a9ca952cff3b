"""2-D convolutions on the CPU, tile by tile: FP64 patches, products and results never leave the cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monitor.numerics.engines.cpu.rounded import patch_kernels as kernels
from monitor.numerics.engines.cpu.rounded.settle_kernels import POWERS
from monitor.numerics.engines.cpu.rounded.tiles import Bounds, Operand, flat, settle, settle_whole
from monitor.numerics.engines.results import Integers, Near, Piece, Reals, Rounding, Settled
from monitor.numerics.geometry import ConvolutionShape
from monitor.numerics.kernels.arrays import array
from monitor.numerics.kernels.scratch import scratch
from monitor.numerics.kernels.workers import edges, run_pieces, run_tiles, workers

__all__ = ["forward", "grad_input", "grad_weight", "has"]

_TILE_ELEMENTS = 1 << 17
_PARTIAL_ELEMENTS = 1 << 17
_MOST_GROUPS = 8
"""Convolutions of more groups run as a whole: their tiles would be too small."""


def has(shape: ConvolutionShape) -> bool:
    """Whether tiles serve convolutions of this shape."""
    return shape.groups <= _MOST_GROUPS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Sizes of a convolution of (samples, channels, height, wide) to (samples, outputs, lines, width)."""

    samples: int
    channels: int
    outputs: int
    groups: int
    height: int
    wide: int
    lines: int
    width: int
    geometry: tuple[int, ...]

    @property
    def taps(self) -> int:
        return self.geometry[0] * self.geometry[1]

    @property
    def places(self) -> int:
        return self.lines * self.width

    @property
    def window(self) -> tuple[int, tuple[int, ...]]:
        return self.width, self.geometry

    @property
    def work(self) -> int:
        return self.samples * self.places * self.outputs * (self.channels // self.groups) * self.taps

    @property
    def direct(self) -> bool:
        """Patches are the input itself."""
        return self.geometry == _PLAIN


def _plan(
    x_shape: tuple[int, ...], weight_shape: tuple[int, ...], out_size: tuple[int, ...], shape: ConvolutionShape
) -> _Plan:
    """A 1 × 1 convolution without stride sees lines as long as they may be."""
    geometry = (*weight_shape[2:], *shape.stride, *shape.padding, *shape.dilation)
    height, wide = x_shape[2:]
    lines, width = out_size
    plain = geometry[:6] == (1, 1, 1, 1, 0, 0)
    while plain and lines % 2 == 0 and width < 1024:
        height, lines, wide, width = height // 2, lines // 2, wide * 2, width * 2
    return _Plan(
        samples=x_shape[0],
        channels=x_shape[1],
        outputs=weight_shape[0],
        groups=shape.groups,
        height=height,
        wide=wide,
        lines=lines,
        width=width,
        geometry=_PLAIN if plain else geometry,
    )


def _image(x: Tensor, height: int, wide: int) -> Tensor:
    return x.detach().contiguous().reshape(x.shape[0], x.shape[1], height, wide)


def _norms(x: Tensor, plan: _Plan, reach: bool) -> tuple[Reals, Integers]:
    """Norms of patches, or of what input elements reach, (samples, groups, places), and each sample's span."""
    images = flat(x).reshape(x.shape[0], x.shape[1], -1)
    bits = images.view(np.int32)
    size = plan.height * plan.wide if reach else plan.places
    norms = np.empty((len(images), plan.groups, size))
    spans = np.empty(len(images), dtype=np.int32)
    kernel = kernels.reach_bounds if reach else kernels.patch_bounds
    sizes = (plan.height, plan.wide, plan.lines, plan.width)
    run_pieces(
        kernel, len(images), 8 * x.numel(), images, bits, plan.groups, POWERS, sizes, plan.geometry, norms, spans
    )
    return norms, spans


_PLAIN = (1, 1, 1, 1, 0, 0, 1, 1)
"""Geometry whose patches are the input itself."""


def _columns(x: Any, window: tuple[int, Any], samples: Any, channels: Any, lines: Any, name: str) -> Tensor:
    """(channels·taps, samples·lines·width) FP64 of (n, c, h, w), for a window (width of the output, geometry)."""
    width, geometry = window
    count = (samples[1] - samples[0]) * (lines[1] - lines[0]) * width
    columns = scratch(name, ((channels[1] - channels[0]) * geometry[0] * geometry[1], count), torch.float64)
    kernels.patches(x, samples, channels, lines, width, geometry, array(columns))
    return columns


def _kept(operand: Operand) -> tuple[Tensor, Reals, Integers]:
    """All vectors in memory that other threads may read while this one goes on."""
    wide, norms, spans = operand.widened((0, operand.batch), (0, operand.count), "filters")
    return wide, norms, spans


def forward(x: Tensor, weight: Tensor, shape: ConvolutionShape, factor: float, rounding: Rounding) -> Settled:
    """Cross-correlation; β = factor·‖patch‖·‖filter‖."""
    out_size = shape.out_size(x.shape[2:], weight.shape[2:])
    plan = _plan(tuple(x.shape), tuple(weight.shape), out_size, shape)
    out = torch.empty((plan.samples, plan.outputs, *out_size), dtype=torch.float32)
    image = _image(x, plan.height, plan.wide)
    source, target = array(image), flat(out)
    norms, spans = _norms(image, plan, reach=False)
    own, terms = plan.outputs // plan.groups, weight[0].numel()
    filters, filter_norms, filter_spans = _kept(Operand(weight.reshape(plan.groups, own, terms)))
    tasks = [
        (group, samples, lines)
        for group in range(plan.groups)
        for samples, lines in _sample_tiles(plan, terms)
    ]  # fmt: skip

    def tile(i: int) -> Piece:
        group, samples, lines = tasks[i]
        channels = (group * plan.channels // plan.groups, (group + 1) * plan.channels // plan.groups)
        columns = _columns(source, plan.window, samples, channels, lines, "patches")
        v = scratch("product", (own, columns.shape[1]), torch.float64)
        torch.mm(filters[group], columns, out=v)
        here = slice(lines[0] * plan.width, lines[1] * plan.width)
        bounds = _bounds_of_samples(
            filter_norms[group] * factor, filter_spans[group], norms, spans, samples, group, here
        )
        return settle(
            flat(v), len(bounds.left), here.stop - here.start, bounds, rounding, target,
            v_stride=columns.shape[1], v_jump=here.stop - here.start,
            out_base=(samples[0] * plan.outputs + group * own) * plan.places + here.start,
            out_stride=plan.places, out_jump=plan.outputs * plan.places,
        )  # fmt: skip

    return Settled(out=out, near=Near.joined(run_tiles(len(tasks), plan.work, tile)))


def _bounds_of_samples(
    left: Reals,
    left_spans: Integers,
    norms: Reals,
    spans: Integers,
    samples: tuple[int, int],
    group: int,
    places: slice,
) -> Bounds:
    """Of a tile with the same rows for each sample: ``left`` by row, ``norms`` by sample, group and place."""
    right, count = np.ascontiguousarray(norms[slice(*samples), group, places]), samples[1] - samples[0]
    return Bounds(
        left=np.tile(left, count),
        left_spans=np.tile(left_spans, count),
        right=right,
        right_spans=np.repeat(spans[slice(*samples)], right.shape[1]).reshape(right.shape),
        rows_per_right=len(left),
    )


def _sample_tiles(plan: _Plan, terms: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Samples and output lines of each tile: some samples whole, or some lines of one sample."""
    per_sample = terms * plan.places
    if per_sample <= _TILE_ELEMENTS:
        fit = min(_TILE_ELEMENTS // per_sample, -(-plan.samples // 2))
        return [(samples, (0, plan.lines)) for samples in edges(plan.samples, fit)]
    lines = edges(plan.lines, _TILE_ELEMENTS // (terms * plan.width))
    return [((sample, sample + 1), part) for sample in range(plan.samples) for part in lines]


def grad_input(grad: Tensor, x_shape: tuple[int, ...], weight: Tensor, shape: ConvolutionShape, factor: float,
               rounding: Rounding) -> Settled:  # fmt: skip
    """Gradient with respect to the input; β = factor·‖output gradients that an element reached‖·‖its weights‖."""
    plan = _plan(x_shape, tuple(weight.shape), tuple(grad.shape[2:]), shape)
    out = torch.empty(x_shape, dtype=torch.float32)
    image = _image(grad, 1, plan.places)
    source, target = array(image), flat(out)
    norms, spans = _norms(image, plan, reach=True)
    own, outputs = plan.channels // plan.groups, plan.outputs // plan.groups
    by_input = weight.reshape(plan.groups, outputs, own, plan.taps).permute(0, 2, 3, 1)
    filters, filter_norms, filter_spans = _kept(Operand(by_input.reshape(plan.groups, own, plan.taps * outputs)))
    size = plan.height * plan.wide
    per_channel = plan.taps * plan.places
    fit = max(min(_TILE_ELEMENTS // (per_channel * own), -(-plan.samples // 2)), 1)
    tasks = [
        (group, samples, channels)
        for group in range(plan.groups)
        for samples in edges(plan.samples, fit)
        for channels in edges(own, _TILE_ELEMENTS // per_channel)
    ]

    def tile(i: int) -> Piece:
        group, samples, (first, last) = tasks[i]
        gradients = _columns(
            source, (plan.places, _PLAIN), samples, (group * outputs, (group + 1) * outputs), (0, 1), "gradients"
        )
        chosen = filters[group].reshape(own * plan.taps, outputs)[first * plan.taps : last * plan.taps]
        columns = scratch("product", (len(chosen), gradients.shape[1]), torch.float64)
        torch.mm(chosen, gradients, out=columns)
        memory, stride, jump = columns, gradients.shape[1], plan.places
        if not plan.direct:
            shape = (samples[1] - samples[0], last - first, plan.height, plan.wide)
            memory, stride, jump = scratch("spread", shape, torch.float64), size, (last - first) * size
            for number, v in enumerate(array(memory)):
                kernels.add_patches(array(columns), number * plan.places, plan.lines, plan.width, plan.geometry, v)
        some = slice(first, last)
        left, left_spans = filter_norms[group, some] * factor, filter_spans[group, some]
        bounds = _bounds_of_samples(left, left_spans, norms, spans, samples, group, slice(size))
        return settle(
            flat(memory), len(bounds.left), size, bounds, rounding, target,
            v_stride=stride, v_jump=jump,
            out_base=(samples[0] * plan.channels + group * own + first) * size,
            out_stride=size, out_jump=plan.channels * size,
        )  # fmt: skip

    return Settled(out=out, near=Near.joined(run_tiles(len(tasks), plan.work, tile)))


def grad_weight(grad: Tensor, x: Tensor, weight_shape: tuple[int, ...], shape: ConvolutionShape, factor: float,
                rounding: Rounding) -> Settled:  # fmt: skip
    """Sum over samples and places; β = factor·‖gradients of an output channel‖·‖an input channel‖."""
    plan = _plan(tuple(x.shape), weight_shape, tuple(grad.shape[2:]), shape)
    image, gradient = _image(x, plan.height, plan.wide), _image(grad, 1, plan.places)
    rows, columns = _channel_bounds(gradient), _channel_bounds(image)
    own, outputs = plan.channels // plan.groups, plan.outputs // plan.groups
    per_result = own * plan.taps
    arrays = array(image), array(gradient)
    threads = workers(plan.work)
    parts = 4 * threads if threads > 1 else 1
    by_samples = outputs * per_result <= _PARTIAL_ELEMENTS
    channel_tiles = [(0, own)] if by_samples else edges(own, max(own // parts, -(-64 // plan.taps)))
    sample_tiles = edges(plan.samples, -(-plan.samples // parts)) if by_samples else [(0, plan.samples)]
    tasks = [(g, c, s) for g in range(plan.groups) for c in channel_tiles for s in sample_tiles]

    def tile(i: int) -> Tensor:
        group, channels, samples = tasks[i]
        return _weight_sum(arrays, plan, group, channels, samples)

    sums = run_tiles(len(tasks), plan.work, tile)
    v = torch.empty((plan.groups, outputs, own, plan.taps), dtype=torch.float64)
    for i in range(0, len(tasks), len(sample_tiles)):
        group, (first, last), _ = tasks[i]
        total = sums[i]
        for part in sums[i + 1 : i + len(sample_tiles)]:
            total += part
        v[group, :, first:last] = total.reshape(outputs, last - first, plan.taps)
    bounds = Bounds(
        left=rows[0] * factor,
        left_spans=rows[1],
        right=np.repeat(columns[0].reshape(plan.groups, own), plan.taps, axis=1),
        right_spans=np.repeat(columns[1].reshape(plan.groups, own), plan.taps, axis=1),
        rows_per_right=outputs,
    )
    return settle_whole(v.reshape(weight_shape), bounds, rounding)


def _weight_sum(arrays: Any, plan: _Plan, group: int, channels: tuple[int, int], samples: tuple[int, int]) -> Tensor:
    """(outputs, channels·taps) of one group: patches of a few samples, or of some lines of one, at a time."""
    image, gradient = arrays
    own, outputs = plan.channels // plan.groups, plan.outputs // plan.groups
    mine = (group * own + channels[0], group * own + channels[1])
    theirs = (group * outputs, (group + 1) * outputs)
    terms = (channels[1] - channels[0]) * plan.taps
    total = torch.zeros((outputs, terms), dtype=torch.float64)
    fit = max(_TILE_ELEMENTS // (max(terms, outputs) * plan.places), 1)
    for part in edges(samples[1] - samples[0], fit):
        some = (samples[0] + part[0], samples[0] + part[1])
        columns = _columns(image, plan.window, some, mine, (0, plan.lines), "patches")
        gradients = _columns(gradient, (plan.places, _PLAIN), some, theirs, (0, 1), "gradients")
        torch.addmm(total, gradients, columns.t(), out=total)
    return total


def _channel_bounds(x: Tensor) -> tuple[Reals, Integers]:
    """Norm and span of each channel of (n, c, …) over samples and places."""
    images = flat(x).reshape(x.shape[0], x.shape[1], -1)
    norms, spans = np.empty(x.shape[1]), np.empty(x.shape[1], dtype=np.int32)
    ranges = edges(x.shape[1], math.ceil((1 << 16) * x.shape[1] / x.numel()))

    def measure(i: int) -> None:
        kernels.channel_bounds(*ranges[i], images, images.view(np.int32), POWERS, norms, spans)

    run_tiles(len(ranges), 8 * x.numel(), measure)
    return norms, spans
