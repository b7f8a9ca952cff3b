"""Tiles of convolutions: what the filters of a box of the result see, or what a box of the input reaches.

A product of patches and filters depends on no zeros around them, not even on how many there are. So a box is computed
from the part of an operand that belongs to it, with zeros where that lies outside, by the operator without padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from monitor.numerics.geometry import ConvolutionShape
from monitor.numerics.operators.tiles import Operand, Span, TileCall, Untiled, box_of, cut_out

__all__ = ["convolution", "convolution_slope", "images", "images_slope"]


def convolution(call: TileCall, slot: int, span: Span) -> Tensor:
    """A box of the result, by its part of the input and its filters."""
    x, weight, bias, *how = call.args
    part = _Part(x, weight, how, call.shapes[slot], span, is_spread=how[3])
    own = None if bias is None else bias.at(torch.arange(part.box[1].start, part.box[1].stop))
    return part.cut(call.run(call.func, (part.source(), part.filters(), own, *part.how), {}))


def convolution_slope(call: TileCall, slot: int, span: Span) -> Tensor:
    """Gradients: a box of the input's by what it reaches, those of filters and bias by their channels of all images."""
    grad, x, weight, _, *how, mask = call.args
    which = [number for number in range(3) if mask[number]][slot]
    wanted = [number == which for number in range(3)]
    if 0 in (*grad.shape, *x.shape, *weight.shape):
        raise Untiled("it has no elements")
    if which == 0:
        part = _Part(grad, weight, how, x.shape, span, is_spread=not how[3])
        grad.allow(math.prod(map(len, part.box)))
        like = torch.zeros([len(each) for each in part.box], dtype=x.dtype)
        return part.cut(call.run(call.func, (part.source(), like, part.filters(), None, *part.how, wanted), {})[0])
    if which == 1:
        return _filters_slope(call, span, wanted)
    taken, rank = _all_of(grad, range(span.start, span.stop)), len(x.shape) - 2
    like = torch.zeros((taken.shape[0], 1, *taken.shape[2:]), dtype=x.dtype)
    filters = torch.zeros((len(span), 1, *(1,) * rank), dtype=weight.dtype)
    plain = ([1] * rank, [0] * rank, [1] * rank, False, [0] * rank, 1)
    found: Tensor = call.run(call.func, (taken, like, filters, [len(span)], *plain, wanted), {})[2]
    return found


def images(call: TileCall, slot: int, span: Span) -> Tensor:
    """The result's images in which the elements lie, by theirs of the input."""
    x, weight, bias, *how = call.args
    taken, filters = _images(x, call.shapes[slot], span), weight.whole()
    out = call.run(call.func, (taken, filters, None if bias is None else bias.whole(), *how), {})
    return _of_images(out, call.shapes[slot], span)


def images_slope(call: TileCall, slot: int, span: Span) -> Tensor:
    """Gradients: the input's by images, those of filters and bias as always."""
    grad, x, weight, *how, mask = call.args
    if [number for number in range(3) if mask[number]][slot]:
        return convolution_slope(call, slot, span)
    taken, filters = _images(grad, x.shape, span), weight.whole()
    like = torch.zeros((len(taken), *x.shape[1:]), dtype=x.dtype)
    out = call.run(call.func, (taken, like, filters, *how, [True, False, False]), {})[0]
    return _of_images(out, x.shape, span)


def _images(x: Operand, shape: Sequence[int], span: Span) -> Tensor:
    """Images of an operand, whose places are those of the result's."""
    if not span or len(shape) > 4 or len(x.shape) != len(shape) or x.shape[0] != shape[0]:
        raise Untiled("it has no images")
    numbers = box_of(span, shape)[0]
    size = math.prod(x.shape[1:])
    x.allow(len(numbers) * size)
    return x.at(torch.arange(numbers.start * size, numbers.stop * size)).reshape(len(numbers), *x.shape[1:])


def _of_images(out: Tensor, shape: Sequence[int], span: Span) -> Tensor:
    size = math.prod(shape[1:])
    return out.reshape(-1)[span.start - span.start // size * size :][: len(span)]


def _filters_slope(call: TileCall, span: Span, wanted: Sequence[bool]) -> Tensor:
    grad, x, weight, _, *how, _ = call.args
    count, width, *kernel = weight.shape
    rows, columns, *_ = box_of(span, weight.shape)
    each = count // how[5]
    groups = range(rows[0] // each, rows[-1] // each + 1)
    if len(groups) > 1:
        rows, columns = range(groups.start * each, groups.stop * each), range(width)
    below = range(groups.start * width + columns.start, (groups.stop - 1) * width + columns.stop)
    box = [rows, columns, *map(range, kernel)]
    seen = (x, grad) if how[3] else (grad, x)
    if [each.shape[1] for each in seen] != [count, width * how[5]] or count % how[5]:
        raise Untiled("its channels and filters do not fit")
    weight.allow(math.prod(map(len, box)))
    like = torch.zeros([len(each) for each in box], dtype=weight.dtype)
    parts = (_all_of(grad, below), _all_of(x, rows)) if how[3] else (_all_of(grad, rows), _all_of(x, below))
    found = call.run(call.func, (*parts, like, None, *how[:5], len(groups), wanted), {})[1]
    return cut_out(found, box, span, weight.shape)


def _all_of(x: Operand, channels: range) -> Tensor:
    """These channels of all images."""
    images, *area = (torch.arange(size) for size in (x.shape[0], *x.shape[2:]))
    return x.box(images, torch.arange(channels.start, channels.stop), *area)


def _along(places: range, shape: tuple[int, int, int, int], is_spread: bool) -> tuple[range, range]:
    """One dimension of a box: the places of the result that are computed, and those of the source that belong to them.

    Args:
        shape: kernel, stride, padding and dilation.
        is_spread: the source's places are those of a forward result.
    """
    kernel, stride, padding, dilation = shape
    reach = dilation * (kernel - 1)
    if not is_spread:
        return places, range(places[0] * stride - padding, places[-1] * stride - padding + reach + 1)
    low, high = places[0] + padding, places[-1] + padding
    first = min(-((reach - low) // stride), low // stride)
    last = max(high // stride, -((reach - high) // stride))
    return range(first * stride - padding, last * stride - padding + reach + 1), range(first, last + 1)


class _Part:
    """A box of a convolution's result, or of its gradient.

    Attributes:
        box: places of the result that are computed.
        how: arguments of the operator for them, from its stride on.
    """

    def __init__(
        self,
        source: Operand,
        weight: Operand,
        how: Sequence[Any],
        shape: tuple[int, ...],
        span: Span,
        *,
        is_spread: bool,
    ) -> None:
        stride, padding, dilation, transposed, extra, groups = how
        rank = len(shape) - 2
        if 0 in (*source.shape, *weight.shape) or len(weight.shape) != rank + 2:
            raise Untiled("it has no elements")
        ends = (source.shape[1], shape[1])
        fit = (weight.shape[0], weight.shape[1] * groups) == (ends if is_spread else ends[::-1])
        if not fit or weight.shape[0] % groups:
            raise Untiled("its channels and filters do not fit")
        form, kernel = ConvolutionShape.of(rank, stride, padding, dilation, groups), weight.shape[2:]
        if is_spread and set(kernel) == {1} and (any(padding) or any(more >= min(form.stride) for more in extra)):
            raise Untiled("zeros that no filter sees")  # the operator may leave them out of its product
        self._source, self._weight, self._span, self._shape = source, weight, span, shape
        self._is_spread = is_spread
        images, channels, *area = box_of(span, shape)
        each = zip(area, zip(kernel, form.stride, form.padding, form.dilation, strict=True), strict=True)
        along = [_along(places, numbers, is_spread) for places, numbers in each]
        mine, theirs = shape[1] // groups, source.shape[1] // groups
        self._groups = range(channels[0] // mine, channels[-1] // mine + 1)
        if len(self._groups) > 1:
            channels = range(self._groups.start * mine, self._groups.stop * mine)
        seen = range(self._groups.start * theirs, self._groups.stop * theirs)
        self._taken = [images, seen, *(sources for _, sources in along)]
        self.box = [images, channels, *(boxes for boxes, _ in along)]
        self.how = (stride, [0] * rank, dilation, transposed, [0] * rank, len(self._groups))

    def source(self) -> Tensor:
        """The part of the source, with zeros where it lies outside."""
        self._source.allow(math.prod(map(len, self._taken)))
        inside = [
            range(min(max(each.start, 0), size), max(min(each.stop, size), 0))
            for each, size in zip(self._taken, self._source.shape, strict=True)
        ]
        found = torch.zeros([len(each) for each in self._taken], dtype=self._source.dtype)
        if all(inside):
            places = [
                slice(to.start - each.start, to.stop - each.start) for each, to in zip(self._taken, inside, strict=True)
            ]
            found[tuple(places)] = self._source.box(*(torch.arange(each.start, each.stop) for each in inside))
        return found

    def filters(self) -> Tensor:
        """Their part: filters of the result's channels, or channels of the source's filters."""
        first, second = self.box[1], range(self._weight.shape[1])
        if self._is_spread:
            start = first.start - self._groups.start * len(second)
            second = range(start, start + len(first)) if len(self._groups) == 1 else second
            first = self._taken[1]
        rest = [torch.arange(size) for size in self._weight.shape[2:]]
        return self._weight.box(*(torch.arange(each.start, each.stop) for each in (first, second)), *rest)

    def cut(self, found: Tensor) -> Tensor:
        """The elements of the span."""
        return cut_out(found, self.box, self._span, self._shape)
