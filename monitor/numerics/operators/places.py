"""Tiles of operators that move elements, or collect those that go to one place.

An operator that only moves elements is applied twice: to the numbers of its operands' places, which say where a tile's
elements come from, and to operands that hold these alone and zeros elsewhere. Numbers that are fills or indices by
chance cost elements that nothing depends on, and change no bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from monitor.numerics.operators.tiles import (
    Operand,
    Span,
    TileCall,
    Untiled,
    box_of,
    broadcast,
    cut_out,
    lines,
    result_of,
    within,
)

__all__ = ["added_by_number", "in_shape", "moved", "put", "rows_added", "scattered", "values_put"]

_CHOICES = frozenset(("index", "indices", "mask", "repeats", "lengths"))
"""Names of arguments that say which elements are moved, and where to; they are taken whole."""

_MOST = 1 << 27
"""Elements of all operands and results of an operator that is applied to operands of their full size."""


def moved(call: TileCall, slot: int, span: Span) -> Tensor:
    """Elements of the operands, or constants, by the operator itself on the numbers of their places."""
    values, first = _values(call), 1
    numbers: dict[int, range] = {}
    for each in values:
        numbers[id(each)] = range(first, first + each.size)
        first += each.size
    _allow(call, first)
    chosen = {id(each): each.whole() for each in _operands(call) if id(each) not in numbers}

    def numbered(kind: torch.dtype) -> Tensor:
        def placed(value: Any) -> Any:
            if isinstance(value, Operand) and id(value) in numbers:
                mine = numbers[id(value)]
                return torch.arange(mine.start, mine.stop, dtype=kind).reshape(value.shape)
            return 0 if isinstance(value, float) else chosen.get(id(value), value)

        return _tile(call, slot, span, placed).to(torch.int64)

    try:
        places = numbered(torch.int32)
    except RuntimeError:  # this operator takes no integers
        places = numbered(torch.float64)

    def filled(value: Any) -> Any:
        if not isinstance(value, Operand) or id(value) not in numbers:
            return chosen.get(id(value), value)
        mine = numbers[id(value)]
        taken = torch.unique(places[(places >= mine.start) & (places < mine.stop)]) - mine.start
        return _sparse(value, taken)

    return _tile(call, slot, span, filled).clone()


def scattered(call: TileCall, slot: int, span: Span) -> Tensor:
    """Elements that an index moves along a dimension: lines of it, or all where the index is smaller."""
    try:
        return lines(call, slot, span)
    except Untiled:
        return moved(call, slot, span)


def in_shape(call: TileCall, slot: int, span: Span) -> Tensor:
    """Elements that depend on those at their place, and on its number, such as random ones."""
    _allow(call, 0)

    def taken(value: Any) -> Any:
        if not isinstance(value, Operand):
            return value
        is_alike = value.shape == call.shapes[slot] and value.shape
        return _sparse(value, torch.arange(span.start, span.stop)) if is_alike else value.whole()

    return _tile(call, slot, span, taken).clone()


def rows_added(call: TileCall, slot: int, span: Span) -> Tensor:
    """Gradients of an embedding: the rows of those words that are the tile's."""
    grad, index, _, padding, by_count = call.args
    shape = call.shapes[slot]
    rows, columns = box_of(span, shape)
    words, kept = _kept(index, shape[0], rows)
    grad.allow(len(kept) * len(columns))
    source = grad.at(kept[:, None] * shape[1] + torch.arange(columns.start, columns.stop))
    mine = padding - rows.start if padding in rows else -1
    args = (source, words, len(rows), mine, by_count)
    return cut_out(result_of(call.run(call.func, args, {}), slot), (rows, columns), span, shape)


def added_by_number(call: TileCall, slot: int, span: Span) -> Tensor:
    """Slices that go to places along a dimension: those that go to the tile's."""
    x, dim, index = call.args[:3]
    if not x.shape or x.shape != call.shapes[slot]:
        raise Untiled("it has no dimension")
    axis, box = dim % len(x.shape), box_of(span, x.shape)
    numbers, kept = _kept(index, x.shape[axis], box[axis])
    mine = [torch.arange(each.start, each.stop) for each in box]

    def taken(value: Any) -> Any:
        if not isinstance(value, Operand) or value is index:
            return numbers if value is index else value
        if not value.shape:
            return value.whole()
        return value.box(*mine) if value is x else value.box(*mine[:axis], kept, *mine[axis + 1 :])

    return cut_out(result_of(call.with_values(taken), slot), box, span, x.shape)


def values_put(call: TileCall, slot: int, span: Span) -> Tensor:
    """``index_put``: values that go to the tile's places, in their order."""
    x, indices, _, *how = call.args
    _allow(call, 0)
    chosen = [each.whole() if isinstance(each, Operand) else each for each in indices]
    listed = [each for each in chosen if each is not None and each.dtype is not torch.bool]
    if listed:
        rest = [size for number, size in enumerate(x.shape) if number >= len(chosen) or chosen[number] is None]
        counts = np.broadcast_shapes(*(tuple(each.shape) for each in listed))
        if len(listed) != len([each for each in chosen if each is not None]) or math.prod((*counts, *rest)) > _MOST:
            raise Untiled("too many places")
    targets = torch.ops.aten.index.Tensor(torch.arange(x.size, dtype=torch.int32).reshape(x.shape), chosen)
    return _put(call, slot, span, targets, how)


def put(call: TileCall, slot: int, span: Span) -> Tensor:
    """``put``: the same with flat places."""
    x, index, source, *how = call.args
    places = index.whole()
    if places.numel() != source.size:
        raise Untiled("as many values as places")
    return _put(call, slot, span, within(torch.where(places < 0, places + x.size, places), x.size), how)


def _put(call: TileCall, slot: int, span: Span, targets: Tensor, how: list[Any]) -> Tensor:
    x, values = call.args[0], call.args[2]
    if x.shape != call.shapes[slot]:
        raise Untiled("it writes a different tensor")
    flat = targets.reshape(-1)
    kept = ((flat >= span.start) & (flat < span.stop)).nonzero().reshape(-1)
    is_put = call.func._schema.arguments[1].name == "index"
    taken = values.at(kept if is_put else broadcast(kept, targets.shape, values.shape))
    mine = flat[kept].to(torch.int64) - span.start
    args = (x.at(torch.arange(span.start, span.stop)), mine if is_put else [mine], taken, *how)
    return result_of(call.run(call.func, args, call.kwargs), slot)


def _kept(index: Operand, size: int, rows: range) -> tuple[Tensor, Tensor]:
    """Numbers in an index that are the tile's, from its first on, and where they lie; Untiled if one is outside."""
    numbers = within(index.whole().reshape(-1), size)
    kept = ((numbers >= rows.start) & (numbers < rows.stop)).nonzero().reshape(-1)
    return numbers[kept] - rows.start, kept


def _operands(call: TileCall) -> list[Operand]:
    found: list[Operand] = []

    def seen(value: Any) -> None:
        if isinstance(value, list | tuple):
            list(map(seen, value))
        elif isinstance(value, Operand):
            found.append(value)

    seen([*call.args, *call.kwargs.values()])
    return found


def _values(call: TileCall) -> list[Operand]:
    """The operands that are moved."""
    names = [each.name for each in call.func._schema.arguments]
    named: Mapping[str, Any] = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
    kept = {name: value for name, value in named.items() if name not in _CHOICES}
    if kept.get("accumulate"):
        raise Untiled("it adds what it moves")
    return _operands(TileCall(func=call.func, args=tuple(kept.values()), kwargs={}, shapes=(), run=call.run))


def _allow(call: TileCall, first: int) -> None:
    """Untiled if all operands and results are too large to be filled with numbers or zeros."""
    if first + sum(each.size for each in _operands(call)) + sum(map(math.prod, call.shapes)) > _MOST:
        raise Untiled("its operands and results are too large to be filled with zeros")


def _sparse(value: Operand, taken: Tensor) -> Tensor:
    """Elements at some places, zeros elsewhere."""
    flat = torch.zeros(value.size, dtype=value.dtype)
    flat[taken] = value.at(taken)
    return flat.reshape(value.shape)


def _tile(call: TileCall, slot: int, span: Span, change: Callable[[Any], Any]) -> Tensor:
    """A span of what the operator gives for changed arguments."""

    def each(value: Any) -> Any:
        return type(value)(map(each, value)) if isinstance(value, list | tuple) else change(value)

    return result_of(call.with_values(each), slot).reshape(-1)[span.start : span.stop]
