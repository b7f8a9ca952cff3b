"""Tiles of operators that treat channels, groups of channels, images or matrices one by one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from monitor.numerics.operators.tiles import Operand, Span, Tile, TileCall, Untiled, box_of, cut_out, result_of

__all__ = ["by_channel", "by_group", "by_group_slope", "by_part", "by_row"]


_SHARED = frozenset(("vec", "weight", "bias"))
"""Operands that belong to all parts."""
_SMALLER = frozenset(("tau", "random_samples", "samples", "rstd"))
"""Operands whose parts have fewer dimensions than those of the first."""


def by_part(rank: int) -> Tile:
    """Of operators that treat the last dimensions, as many as ``rank``, alone: parts of operands as of a batch."""

    def parts(call: TileCall, slot: int, span: Span) -> Tensor:
        names = [each.name for each in call.func._schema.arguments]
        named: Mapping[str, Any] = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        first = next(each for each in call.args if isinstance(each, Operand))
        lead, shape = first.shape[: len(first.shape) - rank], call.shapes[slot]
        size = math.prod(shape[len(lead) :])
        if len(first.shape) <= rank or shape[: len(lead)] != lead or not size:
            raise Untiled("it has one part")
        low, high = span.start // size, (span.stop - 1) // size + 1
        begin = (*(1,) * (len(lead) - 1), high - low)

        def taken(name: str, value: Any) -> Any:
            if name == "input_size":
                return [*begin, *value[len(lead) :]]
            if not isinstance(value, Operand):
                return value
            if name in _SHARED:
                return value.whole()
            if value.shape[: len(lead)] != lead or not (len(value.shape) == len(first.shape) or name in _SMALLER):
                raise Untiled("operands of different numbers of parts")
            own = math.prod(value.shape[len(lead) :])
            value.allow((high - low) * own)
            return value.at(torch.arange(low * own, high * own)).reshape(*begin, *value.shape[len(lead) :])

        changed = {name: taken(name, value) for name, value in named.items()}
        args = tuple(changed.pop(name) for name in names[: len(call.args)])
        found = result_of(call.run(call.func, args, changed), slot).reshape(-1)
        return found[span.start - low * size :][: len(span)]

    parts.__name__ = f"part_of_{rank}_dimension{'s' * (rank > 1)}"
    return parts


def by_row(call: TileCall, slot: int, span: Span) -> Tensor:
    """Of normalisations over the last dimensions, and of their gradient in the input."""
    names = [each.name for each in call.func._schema.arguments]
    if "output_mask" in names and [number for number in range(2) if call.argument("output_mask")[number]][slot]:
        raise Untiled("each element depends on all rows")
    return by_part(len(call.argument("normalized_shape")))(call, slot, span)


def by_channel(call: TileCall, slot: int, span: Span) -> Tensor:
    """Of batch normalisation: all of the channels in which the elements lie."""
    shape, x = call.shapes[slot], next(each for each in call.args if isinstance(each, Operand))
    if len(x.shape) < 2 or shape not in (x.shape, x.shape[1:2]):
        raise Untiled("it has no channels")
    axis = 1 if shape == x.shape else 0
    box = [range(size) for size in shape]
    box[axis] = box_of(span, shape)[axis]
    channels = torch.arange(box[axis].start, box[axis].stop)
    wide = [channels if number == 1 else torch.arange(size) for number, size in enumerate(x.shape)]

    def taken(value: Any) -> Any:
        if not isinstance(value, Operand):
            return value
        if value.shape == x.shape:
            return value.box(*wide)
        return value.at(channels) if value.shape == x.shape[1:2] else value.whole()

    args = tuple(map(taken, call.args))
    out = call.run(call.func, args, call.kwargs)
    places = {each.name: place for place, each in enumerate(call.func._schema.arguments)}
    written = [args[places[name]] for name in ("running_mean", "running_var") if name in places]
    found = [*_tensors(out), *_tensors(written)][slot]
    return cut_out(found, box, span, shape)


def _tensors(out: Any) -> Iterable[Tensor]:
    return [out] if isinstance(out, Tensor) else [each for each in out if isinstance(each, Tensor)]


def by_group(call: TileCall, slot: int, span: Span) -> Tensor:
    """Of ``native_group_norm``: each group of channels of an image as a group of one image."""
    x, weight, bias, n, channels, area, groups, eps = call.args
    each = _of_a_group(x, n, channels, area, groups)
    size = each * area if slot == 0 else 1
    blocks = _blocks(span, size)
    mine = _channels(blocks, groups, each)
    flat = [None if value is None else value.at(mine) for value in (weight, bias)]
    args = (_images(x, blocks, each, area), *flat, 1, len(mine), area, len(blocks), eps)
    return result_of(call.run(call.func, args, {}), slot).reshape(-1)[span.start % size :][: len(span)]


def by_group_slope(call: TileCall, slot: int, span: Span) -> Tensor:
    """Of its gradients: the same of the input; a channel of all images as a group for weight and bias."""
    grad, x, centre, scale, weight, count, channels, area, groups, mask = call.args
    each = _of_a_group(x, count, channels, area, groups)
    which = [number for number in range(3) if mask[number]][slot]
    wanted = [number == which for number in range(3)]
    if which == 0:
        size, blocks = each * area, _blocks(span, each * area)
        mine = _channels(blocks, groups, each)
        images = [_images(value, blocks, each, area) for value in (grad, x)]
        statistics = [value.at(blocks)[None] for value in (centre, scale)]
        sizes = (1, len(mine), area, len(blocks))
    else:
        size, mine = len(span), torch.arange(span.start, span.stop)
        x.allow(count * len(mine) * area)
        places = (torch.arange(count)[:, None] * channels + mine)[..., None] * area + torch.arange(area)
        images = [value.at(places) for value in (grad, x)]
        statistics = [value.at(torch.arange(count)[:, None] * groups + mine // each) for value in (centre, scale)]
        sizes = (count, len(mine), area, len(mine))
    args = (*images, *statistics, None if weight is None else weight.at(mine), *sizes, wanted)
    found: Tensor = next(value for value in call.run(call.func, args, {}) if value is not None).reshape(-1)
    return found[span.start % size if which == 0 else 0 :][: len(span)]


def _of_a_group(x: Operand, n: int, channels: int, area: int, groups: int) -> int:
    if x.shape[:2] != (n, channels) or x.size != n * channels * area or channels % groups:
        raise Untiled("its sizes do not fit")
    return channels // groups


def _blocks(span: Span, size: int) -> Tensor:
    return torch.arange(span.start // size, (span.stop - 1) // size + 1)


def _channels(blocks: Tensor, groups: int, each: int) -> Tensor:
    return ((blocks % groups)[:, None] * each + torch.arange(each)).reshape(-1)


def _images(x: Operand, blocks: Tensor, each: int, area: int) -> Tensor:
    size = each * area
    x.allow(len(blocks) * size)
    return x.at(blocks[:, None] * size + torch.arange(size)).reshape(1, len(blocks) * each, area)
