"""Output tiles: some elements of an operator's result, computed from the inputs that these depend on alone.

Law: under ``exact`` numerics a tile has the bits that the whole result has in its place. Operators on elements and on
lines compute each one alone. A product of FP32 matrices takes scale and wide path from a row and a column alone
(``exact.matmul``); one of BF16 takes outlier channels from all of them, so it has no tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from firmware_sim.errors import ChipwitnessError
from monitor.numerics import exact
from monitor.numerics.kernels.bits import HALF

__all__ = [
    "Operand",
    "Run",
    "Span",
    "Tile",
    "TileCall",
    "Untiled",
    "compute",
    "elements",
    "gathered",
    "layer_norm_slope",
    "lines",
    "list_elements",
    "loss_slope",
    "matrix_product",
    "reduction",
    "rows_by_number",
    "selected",
    "view",
]


class Untiled(ChipwitnessError):
    """These elements depend on more of the inputs than a tile may need, or on all."""


@dataclass(frozen=True, slots=True)
class Operand:
    """An input, of which a tile takes elements.

    Attributes:
        fetch: the elements at these places (n,) INT64 of the flattened tensor.
        most: elements that may be taken at once.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fetch: Callable[[Tensor], Tensor]
    most: int

    def at(self, places: Tensor) -> Tensor:
        """Elements at flattened places of any shape, in that shape; Untiled if they are too many, or not all inside."""
        self.allow(places.numel())
        within(places, self.size)
        return self.fetch(places.reshape(-1)).reshape(places.shape)

    @property
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    def allow(self, count: int) -> None:
        """Untiled if a tile may not take so many elements; asked before anything of that size is made."""
        if count > self.most:
            raise Untiled("a tile would take too many elements of an input")

    def box(self, *axes: Tensor) -> Tensor:
        """The elements at all combinations of places along the axes; Untiled as in ``at``."""
        self.allow(math.prod(len(axis) for axis in axes))
        for axis, size in zip(axes, self.shape, strict=True):
            within(axis, size)
        places = torch.zeros((1,) * len(axes), dtype=torch.int64)
        for number, (axis, stride) in enumerate(zip(axes, strides_of(self.shape), strict=True)):
            places = places + (axis * stride).reshape(*(-1 if number == other else 1 for other in range(len(axes))))
        return self.at(places)

    def whole(self) -> Tensor:
        """All of it."""
        self.allow(self.size)
        return self.at(torch.arange(self.size).reshape(self.shape))


Run: TypeAlias = Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any]], Any]
"""Calls an operator under the declared numerics."""
Span: TypeAlias = range
"""Places of a tile's elements in the flattened result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCall:
    """One call of an operator, with operands in place of tensors.

    Attributes:
        shapes: of its results, written arguments among them.
        is_exact: the declared numerics are ``exact``.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shapes: Sequence[tuple[int, ...]]
    run: Run
    is_exact: bool = True

    def argument(self, name: str) -> Any:
        """An argument by the name that the schema gives it."""
        for place, each in enumerate(self.func._schema.arguments):
            if each.name == name:
                return self.args[place] if place < len(self.args) else self.kwargs.get(name, each.default_value)
        raise KeyError(name)

    def replaced(
        self, name: str, value: Any, change: Callable[[Any], Any] = lambda each: each
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Changed arguments, with another value of a named one."""
        args, kwargs = list(map(change, self.args)), {key: change(each) for key, each in self.kwargs.items()}
        place = next(place for place, each in enumerate(self.func._schema.arguments) if each.name == name)
        if place < len(args):
            args[place] = value
        else:
            kwargs[name] = value
        return tuple(args), kwargs

    def with_values(self, change: Callable[[Any], Any]) -> Any:
        """What the operator gives for changed arguments."""
        kwargs = {name: change(value) for name, value in self.kwargs.items()}
        return self.run(self.func, tuple(map(change, self.args)), kwargs)


Tile: TypeAlias = Callable[[TileCall, int, Span], Tensor]
"""The elements of one result, given its number, and their places; Untiled where that takes too much."""


def compute(tile: Tile | None, call: TileCall, slot: int, span: Span) -> Tensor:
    """The elements (len(span),) of one result; Untiled where a tile may not be computed alone."""
    is_made = any(isinstance(each, Operand) for each in call.kwargs.values())
    if tile is None or (is_made and tile is not elements):
        raise Untiled(f"{call.func} has no tiles")
    found = tile(call, slot, span)
    if found.shape != (len(span),):
        raise Untiled(f"{call.func} gives a tile of shape {tuple(found.shape)}, not of {len(span)} elements")
    return found


def elements(call: TileCall, slot: int, span: Span) -> Tensor:
    """Each element depends on those at its place, after broadcasting."""
    shape, places = call.shapes[slot], torch.arange(span.start, span.stop)

    def taken(value: Any) -> Any:
        if not isinstance(value, Operand):
            return value
        if not value.shape:  # stays without dimensions: it does not promote types
            return value.at(torch.zeros((), dtype=torch.int64))
        return value.at(places if value.shape == shape else broadcast(places, shape, value.shape))

    return result_of(call.with_values(taken), slot).reshape(-1)


def list_elements(call: TileCall, slot: int, span: Span) -> Tensor:
    """Operators on lists: the operator on one tensor of each list."""
    count = len(call.args[0])

    def cut(value: Any) -> Any:
        if isinstance(value, list | tuple):
            if len(value) != count:
                raise Untiled("lists of different lengths")
            return [value[slot]]
        return value

    def taken(value: Any) -> Any:
        if isinstance(value, list):
            return [taken(each) for each in value]
        if isinstance(value, Operand) and value.shape == (count,) and value is call.args[-1]:
            return value.at(torch.tensor([slot]))  # one number for each tensor of the lists
        if not isinstance(value, Operand):
            return value
        whole = call.shapes[slot]
        if value.shape == whole and value.shape:
            return value.at(torch.arange(span.start, span.stop))
        if value.shape:
            return value.at(broadcast(torch.arange(span.start, span.stop), whole, value.shape))
        return value.at(torch.zeros((), dtype=torch.int64))

    args = tuple(taken(cut(value)) for value in call.args)
    out = call.run(call.func, args, {name: taken(cut(value)) for name, value in call.kwargs.items()})
    return result_of(args[0] if out is None else out, 0).reshape(-1)


def lines(call: TileCall, slot: int, span: Span) -> Tensor:
    """Operands that have the result's shape but along ``dim``, in which lines depend on themselves alone.

    An index of one dimension belongs to all lines.
    """
    shape = call.shapes[slot]
    if not shape or not span:
        raise Untiled("it has no lines")
    axis = call.argument("dim") % len(shape)
    size, step = shape[axis], math.prod(shape[axis + 1 :])
    places = torch.arange(span.start, span.stop)
    firsts, number = torch.unique(places // (size * step) * step + places % step, return_inverse=True)

    def taken(value: Any) -> Any:
        if not isinstance(value, Operand):
            return value
        if [*value.shape[:axis], *value.shape[axis + 1 :]] != [*shape[:axis], *shape[axis + 1 :]]:
            raise Untiled("operands of different shapes")
        along = value.shape[axis]
        value.allow(len(firsts) * along)
        return value.at((firsts // step * along * step + firsts % step)[:, None] + torch.arange(along) * step)

    args, kwargs = call.replaced("dim", 1, taken)
    return result_of(call.run(call.func, args, kwargs), slot)[number, places // step % size]


def reduction(call: TileCall, slot: int, span: Span) -> Tensor:
    """Each element depends on one line, over one or several dimensions."""
    x, dims = call.args[0], call.argument("dim")
    several = isinstance(dims, list | tuple)
    if not x.shape or dims is None or (several and not dims):
        raise Untiled("it depends on all elements")
    listed = sorted({each % len(x.shape) for each in (dims if several else [dims])})
    kept = [axis for axis in range(len(x.shape)) if axis not in listed]
    strides = strides_of(x.shape)
    inner = [x.shape[axis] for axis in listed]
    if 0 in inner:
        raise Untiled("it has no elements")
    x.allow(len(span) * math.prod(inner))
    starts = weighted(torch.arange(span.start, span.stop), [x.shape[a] for a in kept], [strides[a] for a in kept])
    along = weighted(torch.arange(math.prod(inner)), inner, [strides[axis] for axis in listed])

    def taken(value: Any) -> Any:
        if isinstance(value, Operand) and value is not x:
            raise Untiled("it has other operands")
        return x.at(starts[:, None] + along) if value is x else value

    args, kwargs = call.replaced("dim", [1] if several else 1, taken)
    if any(each.name == "keepdim" for each in call.func._schema.arguments):
        args, kwargs = replace(call, args=args, kwargs=kwargs).replaced("keepdim", False)
    return result_of(call.run(call.func, args, kwargs), slot)


def layer_norm_slope(call: TileCall, slot: int, span: Span) -> Tensor:
    """The gradient of the input by rows; those of weight and bias by columns."""
    grad, x, shape, centre, scale, weight, bias, mask = call.args
    size, which = math.prod(shape), [number for number in range(3) if mask[number]][slot]
    count = math.prod(x.shape) // max(size, 1)
    if not count or not span or len(shape) == len(x.shape):
        raise Untiled("it has no rows")
    wanted = [number == which for number in range(3)]
    first, last = (0, count) if which else (span.start // size, (span.stop - 1) // size + 1)
    x.allow((last - first) * (len(span) if which else size))
    rows, columns = torch.arange(first, last), torch.arange(span.start, span.stop) if which else torch.arange(size)
    grid = rows[:, None] * size + columns
    flat = [None if each is None or which else each.whole().reshape(-1) for each in (weight, bias)]
    statistics = [each.at(rows)[:, None] for each in (centre, scale)]
    args = (grad.at(grid), x.at(grid), [len(columns)], *statistics, *flat, wanted)
    made = call.run(call.func, args, {})
    out: Tensor = next(each for each in made if each is not None).reshape(-1)
    return out if which else out[span.start - int(rows[0]) * size :][: len(span)]


def matrix_product(call: TileCall, slot: int, span: Span) -> Tensor:
    """Rows of the left factor and columns of the right one, for each matrix of a batch."""
    shape = call.shapes[slot]
    *before, a, b = call.args
    if not span or 0 in (*a.shape, *b.shape) or not {a.dtype, b.dtype} <= {torch.float32, *HALF}:
        raise Untiled("a product of this type has no tiles")
    if call.is_exact and exact.has_two_digits(
        *(torch.empty(each.shape, dtype=each.dtype, device="meta") for each in (a, b))
    ):
        raise Untiled("a product of this type and size has properties of all rows and columns")
    box = box_of(span, shape)
    *batch, rows, columns = (torch.arange(each.start, each.stop) for each in box)
    taken = [_broadcast_box(each, shape, [*batch, rows, columns]) for each in before]
    args = (*taken, a.box(*batch, rows, torch.arange(a.shape[-1])), b.box(*batch, torch.arange(b.shape[-2]), columns))
    return cut_out(call.run(call.func, args, call.kwargs), box, span, shape)


def view(call: TileCall, slot: int, span: Span) -> Tensor:
    """The elements that lie in the argument's memory where the result's do."""
    x = call.args[0]
    if not isinstance(x, Operand) or any(isinstance(each, Operand) for each in call.args[1:]):
        raise Untiled("it is no view of one tensor")
    out = call.func(torch.empty(x.shape, dtype=x.dtype, device="meta"), *call.args[1:], **call.kwargs)
    seen = out if isinstance(out, Tensor) else out[slot]
    if seen.dtype is not x.dtype or seen.is_complex():
        raise Untiled("it shows memory as another type")
    places = weighted(torch.arange(span.start, span.stop), seen.shape, seen.stride())
    return x.at(places + int(seen.storage_offset()))


def rows_by_number(call: TileCall, slot: int, span: Span) -> Tensor:
    """Embeddings: rows of a table."""
    table: Operand = call.args[0]
    index: Operand = call.args[1]
    places = torch.arange(span.start, span.stop)
    width = table.shape[-1]
    rows = within(index.at(places // width).to(torch.int64), table.shape[0])
    return table.at(rows * width + places % width)


def gathered(call: TileCall, slot: int, span: Span) -> Tensor:
    """``gather``: each element says where along one dimension it comes from."""
    return _picked(call, call.args[2].shape, span, lambda places, along: places)


def selected(call: TileCall, slot: int, span: Span) -> Tensor:
    """``index_select``: a list says where along one dimension elements come from."""
    return _picked(call, call.shapes[slot], span, lambda places, along: along)


def _picked(call: TileCall, shape: Sequence[int], span: Span, at: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    x, axis, index = call.args[:3]
    if not x.shape or not index.shape or len(shape) != len(x.shape):
        raise Untiled("it has no dimension")
    axis %= len(x.shape)
    places = torch.arange(span.start, span.stop)
    coordinates = list(coordinates_of(places, shape))
    coordinates[axis] = index.at(at(places, coordinates[axis])).to(torch.int64)
    for each, size in zip(coordinates, x.shape, strict=True):
        within(each, size)
    found: Tensor = x.at(joined(coordinates, x.shape))
    return found


def loss_slope(call: TileCall, slot: int, span: Span) -> Tensor:
    """``nll_loss_backward``: rows by their own class; of the prediction it takes the shape alone."""
    grad, x, target, weight, reduction, ignored, mass = call.args
    if len(x.shape) != 2 or not span:
        raise Untiled("it has no rows")
    width = x.shape[1]
    x.allow(((span.stop - 1) // width - span.start // width + 1) * width)
    rows = torch.arange(span.start // width, (span.stop - 1) // width + 1)
    slope = grad.at(rows) if grad.shape else grad.whole()
    blank = torch.zeros((len(rows), width), dtype=x.dtype)
    args = (slope, blank, target.at(rows), None if weight is None else weight.whole(), reduction, ignored, mass.whole())
    out: Tensor = call.run(call.func, args, {})
    return out.reshape(-1)[span.start - int(rows[0]) * width :][: len(span)]


def within(places: Tensor, size: int) -> Tensor:
    """These places, all from 0 to below the size; Untiled for others, which all of the operator decides."""
    if places.numel() and not 0 <= int(places.min()) <= int(places.max()) < size:
        raise Untiled("a place lies outside")
    return places


def box_of(span: Span, shape: Sequence[int]) -> list[range]:
    """The least box, by its places along each dimension, that holds all elements of a span."""
    first, last = ([int(each) for each in coordinates_of(torch.tensor(end), shape)] for end in (span[0], span[-1]))
    apart = next((axis for axis, ends in enumerate(zip(first, last, strict=True)) if ends[0] != ends[1]), len(shape))
    return [
        range(size) if axis > apart else range(low, high + 1)
        for axis, (low, high, size) in enumerate(zip(first, last, shape, strict=True))
    ]


def cut_out(found: Tensor, box: Sequence[range], span: Span, shape: Sequence[int]) -> Tensor:
    """The elements of a span of a result, from those of a box that holds them."""
    coordinates = coordinates_of(torch.arange(span.start, span.stop), shape)
    inside = [each - along.start for each, along in zip(coordinates, box, strict=True)]
    return found.reshape(-1)[joined(inside, list(map(len, box)))] if shape else found.reshape(-1)


def strides_of(shape: Sequence[int]) -> list[int]:
    """Of a dense tensor."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def coordinates_of(places: Tensor, shape: Sequence[int]) -> Sequence[Tensor]:
    """Places along each dimension of flattened places."""
    return [places // stride % max(size, 1) for size, stride in zip(shape, strides_of(shape), strict=True)]


def weighted(places: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Places in memory of the flattened places of a tensor."""
    found = torch.zeros_like(places)
    for each, stride in zip(coordinates_of(places, shape), strides, strict=True):
        found += each * stride
    return found


def joined(coordinates: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """Flattened places of places along each dimension."""
    found = torch.zeros_like(coordinates[0])
    for each, stride in zip(coordinates, strides_of(shape), strict=True):
        found += each * stride
    return found


def broadcast(places: Tensor, shape: Sequence[int], own: Sequence[int]) -> Tensor:
    """Where an operand that is broadcast to ``shape`` has the elements at these places."""
    if len(own) > len(shape):
        raise Untiled("an operand has more dimensions than the result")
    strides = [0 if size == 1 else stride for size, stride in zip(own, strides_of(own), strict=True)]
    return weighted(places, shape, [*[0] * (len(shape) - len(own)), *strides])


def _broadcast_box(value: Any, shape: Sequence[int], axes: Sequence[Tensor]) -> Any:
    """The part of an addend that belongs to a box of the result; lengths of one stay."""
    if not isinstance(value, Operand):
        return value
    mine = axes[len(shape) - len(value.shape) :] if value.shape else []
    first = torch.zeros(1, dtype=torch.int64)
    return value.box(*(first if size == 1 else axis for size, axis in zip(value.shape, mine, strict=True)))


def result_of(out: Any, slot: int) -> Tensor:
    """One result of a call."""
    found: Tensor = out if isinstance(out, Tensor) else out[slot]
    return found
