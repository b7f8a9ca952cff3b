"""Output tiles: some elements of an operator's result, computed from the inputs that these depend on alone.

Law: under ``exact`` numerics a tile has the bits that the whole result has in its place. Operators on elements and on
lines compute each one alone. A product of FP32 matrices takes scale and wide path from a row and a column alone
(``exact.matmul``); one of BF16 takes outlier channels from all of them, so it has no tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from firmware_sim.errors import ChipwitnessError

__all__ = [
    "Operand",
    "Span",
    "Tile",
    "TileCall",
    "Untiled",
    "compute",
    "elements",
    "gathered",
    "layer_norm",
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
        """Elements at flattened places of any shape, in that shape; Untiled if they are too many."""
        if places.numel() > self.most:
            raise Untiled(f"a tile would take {places.numel()} elements of an input")
        return self.fetch(places.reshape(-1)).reshape(places.shape)

    def box(self, *axes: Tensor) -> Tensor:
        """The elements at all combinations of places along the axes; Untiled if they are too many."""
        if math.prod(len(axis) for axis in axes) > self.most:
            raise Untiled("a tile would take too many elements of an input")
        places = torch.zeros((1,) * len(axes), dtype=torch.int64)
        for number, (axis, stride) in enumerate(zip(axes, _strides(self.shape), strict=True)):
            places = places + (axis * stride).reshape(*(-1 if number == other else 1 for other in range(len(axes))))
        return self.at(places)

    def whole(self) -> Tensor:
        """All of it."""
        if math.prod(self.shape) > self.most:
            raise Untiled("a tile would take all of an input")
        return self.at(torch.arange(math.prod(self.shape)).reshape(self.shape))


Span: TypeAlias = range
"""Places of a tile's elements in the flattened result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileCall:
    """One call of an operator, with operands in place of tensors.

    Attributes:
        shapes: of its results, written arguments among them.
        run: calls an operator under the declared numerics.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shapes: Sequence[tuple[int, ...]]
    run: Callable[[OpOverload, tuple[Any, ...], Mapping[str, Any]], Any]

    def argument(self, name: str) -> Any:
        """An argument by the name that the schema gives it."""
        for place, each in enumerate(self.func._schema.arguments):
            if each.name == name:
                return self.args[place] if place < len(self.args) else self.kwargs.get(name, each.default_value)
        raise KeyError(name)

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
        raise Untiled(f"{call.func} gives {tuple(found.shape)} where a tile has {len(span)} elements")
    return found


def elements(call: TileCall, slot: int, span: Span) -> Tensor:
    """Each element depends on those at its place, after broadcasting."""
    shape, places = call.shapes[slot], torch.arange(span.start, span.stop)

    def taken(value: Any) -> Any:
        if not isinstance(value, Operand):
            return value
        if not value.shape:  # stays without dimensions: it does not promote types
            return value.at(torch.zeros((), dtype=torch.int64))
        return value.at(places if value.shape == shape else _broadcast(places, shape, value.shape))

    return _flat(call.with_values(taken))


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
            return value.at(_broadcast(torch.arange(span.start, span.stop), whole, value.shape))
        return value.at(torch.zeros((), dtype=torch.int64))

    args = tuple(taken(cut(value)) for value in call.args)
    out = call.run(call.func, args, {name: taken(cut(value)) for name, value in call.kwargs.items()})
    return _flat(args[0][0] if out is None else out[0])


def lines(call: TileCall, slot: int, span: Span) -> Tensor:
    """Operands of the result's shape, in which lines along ``dim`` depend on themselves alone."""
    shape = call.shapes[slot]
    if not shape or not span:
        raise Untiled("it has no lines")
    axis = call.argument("dim") % len(shape)
    size, step = shape[axis], math.prod(shape[axis + 1 :])
    places = torch.arange(span.start, span.stop)
    starts = places - places // step % size * step
    firsts, number = torch.unique(starts, return_inverse=True)
    grid = firsts[:, None] + torch.arange(size) * step

    def taken(value: Any) -> Any:
        if isinstance(value, Operand) and value.shape != shape:
            raise Untiled("operands of different shapes")
        return value.at(grid) if isinstance(value, Operand) else value

    args = list(map(taken, call.args))
    args[_position(call.func, "dim")] = 1
    out = call.run(call.func, tuple(args), {name: taken(value) for name, value in call.kwargs.items()})
    return _result(out, slot)[number, places // step % size]


def reduction(call: TileCall, slot: int, span: Span) -> Tensor:
    """Each element depends on one line, over one or several dimensions."""
    x, position = call.args[0], _position(call.func, "dim")
    dims = call.args[position] if position < len(call.args) else call.kwargs.get("dim")
    several = isinstance(dims, list | tuple)
    if not x.shape or dims is None or (several and not dims):
        raise Untiled("it depends on all elements")
    listed = sorted({each % len(x.shape) for each in (dims if several else [dims])})
    kept = [axis for axis in range(len(x.shape)) if axis not in listed]
    strides = _strides(x.shape)
    starts = _weighted(torch.arange(span.start, span.stop), [x.shape[a] for a in kept], [strides[a] for a in kept])
    inner = [x.shape[axis] for axis in listed]
    if 0 in inner:
        raise Untiled("it has no elements")
    along = _weighted(torch.arange(math.prod(inner)), inner, [strides[axis] for axis in listed])
    if len(starts) * len(along) > x.most:
        raise Untiled("a tile would take too many elements of an input")
    args = [x.at(starts[:, None] + along), *call.args[1:]]
    kwargs = {name: value for name, value in call.kwargs.items() if name not in ("dim", "keepdim")}
    if any(isinstance(each, Operand) for each in (*args[1:], *kwargs.values())):
        raise Untiled("it has other operands")
    args = [*args[:position], [1] if several else 1]  # what follows is keepdim
    return _result(call.run(call.func, tuple(args), kwargs), slot)


def layer_norm(call: TileCall, slot: int, span: Span) -> Tensor:
    """Normalised rows, their means and their scales."""
    x, shape, weight, bias, eps = call.args
    size = math.prod(shape)
    if not size or not span:
        raise Untiled("it has no rows")
    width = size if slot == 0 else 1
    rows = torch.arange(span.start // width, (span.stop - 1) // width + 1)
    flat = [None if each is None else each.whole().reshape(-1) for each in (weight, bias)]
    args = (x.at(_rows(rows, size)), [size], *flat, eps)
    out = _result(call.run(call.func, args, {}), slot).reshape(-1)
    return out[span.start - int(rows[0]) * width :][: len(span)]


def layer_norm_slope(call: TileCall, slot: int, span: Span) -> Tensor:
    """The gradient of the input by rows; those of weight and bias by columns."""
    grad, x, shape, centre, scale, weight, bias, mask = call.args
    size, which = math.prod(shape), [number for number in range(3) if mask[number]][slot]
    count = math.prod(x.shape) // max(size, 1)
    if not count or not span or len(shape) == len(x.shape):
        raise Untiled("it has no rows")
    wanted = [number == which for number in range(3)]
    if which:
        rows, columns = torch.arange(count), torch.arange(span.start, span.stop)
    else:
        rows, columns = torch.arange(span.start // size, (span.stop - 1) // size + 1), torch.arange(size)
    if len(rows) * len(columns) > x.most:
        raise Untiled("a tile would take too many elements of an input")
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
    a, b = [each for each in call.args if isinstance(each, Operand)][-2:]
    if not span or 0 in (*a.shape, *b.shape) or {a.dtype, b.dtype} != {torch.float32}:
        raise Untiled("a product of this type has properties of all rows and columns")
    height, width = shape[-2:]
    parts = []
    for matrix in range(span.start // (height * width), (span.stop - 1) // (height * width) + 1):
        begin = matrix * height * width
        low, high = max(span.start - begin, 0), min(span.stop - begin, height * width)
        parts.append(_product(call, shape, matrix, range(low, high)))
    return torch.cat(parts)


def _product(call: TileCall, shape: tuple[int, ...], matrix: int, span: Span) -> Tensor:
    """Places within one matrix of the result."""
    width = shape[-1]
    first, last = span.start // width, (span.stop - 1) // width
    left = span.start % width if first == last else 0
    right = (span.stop - 1) % width + 1 if first == last else width
    rows, columns = torch.arange(first, last + 1), torch.arange(left, right)
    batch = [torch.tensor([matrix])] * (len(shape) - 2)
    *before, a, b = call.args
    taken = [_broadcast_box(each, shape, [*batch, rows, columns]) for each in before]
    args = (*taken, a.box(*batch, rows, torch.arange(a.shape[-1])), b.box(*batch, torch.arange(b.shape[-2]), columns))
    out: Tensor = call.run(call.func, args, call.kwargs)
    start = span.start - first * width - left
    return out.reshape(-1)[start : start + len(span)]


def view(call: TileCall, slot: int, span: Span) -> Tensor:
    """The elements that lie in the argument's memory where the result's do."""
    x = call.args[0]
    if not isinstance(x, Operand) or any(isinstance(each, Operand) for each in call.args[1:]):
        raise Untiled("it is no view of one tensor")
    out = call.func(torch.empty(x.shape, dtype=x.dtype, device="meta"), *call.args[1:], **call.kwargs)
    seen = out if isinstance(out, Tensor) else out[slot]
    if seen.dtype is not x.dtype or seen.is_complex():
        raise Untiled("it shows memory as another type")
    places = _weighted(torch.arange(span.start, span.stop), seen.shape, seen.stride())
    return x.at(places + int(seen.storage_offset()))


def rows_by_number(call: TileCall, slot: int, span: Span) -> Tensor:
    """Embeddings: rows of a table."""
    table: Operand = call.args[0]
    index: Operand = call.args[1]
    width = table.shape[-1]
    places = torch.arange(span.start, span.stop)
    return table.at(index.at(places // width).to(torch.int64) * width + places % width)


def gathered(call: TileCall, slot: int, span: Span) -> Tensor:
    """``gather``: each element says where along one dimension it comes from."""
    x: Operand = call.args[0]
    axis, index = call.args[1:3]
    if not x.shape or not index.shape:
        raise Untiled("it has no dimension")
    places = torch.arange(span.start, span.stop)
    coordinates = list(_coordinates(places, index.shape))
    coordinates[axis % len(x.shape)] = index.at(places).to(torch.int64)
    return x.at(_joined(coordinates, x.shape))


def selected(call: TileCall, slot: int, span: Span) -> Tensor:
    """``index_select``: a list says where along one dimension elements come from."""
    x: Operand = call.args[0]
    axis, index = call.args[1:3]
    if not x.shape or not index.shape:
        raise Untiled("it has no dimension")
    axis %= len(x.shape)
    coordinates = list(_coordinates(torch.arange(span.start, span.stop), call.shapes[slot]))
    coordinates[axis] = index.at(coordinates[axis]).to(torch.int64)
    return x.at(_joined(coordinates, x.shape))


def loss_slope(call: TileCall, slot: int, span: Span) -> Tensor:
    """``nll_loss_backward``: rows by their own class; of the prediction it takes the shape alone."""
    grad, x, target, weight, reduction, ignored, mass = call.args
    if len(x.shape) != 2 or not span:
        raise Untiled("it has no rows")
    width = x.shape[1]
    rows = torch.arange(span.start // width, (span.stop - 1) // width + 1)
    if len(rows) * width > x.most:
        raise Untiled("a tile would take too many elements of an input")
    slope = grad.at(rows) if grad.shape else grad.whole()
    blank = torch.zeros((len(rows), width), dtype=x.dtype)
    args = (slope, blank, target.at(rows), None if weight is None else weight.whole(), reduction, ignored, mass.whole())
    out: Tensor = call.run(call.func, args, {})
    return out.reshape(-1)[span.start - int(rows[0]) * width :][: len(span)]


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _coordinates(places: Tensor, shape: Sequence[int]) -> Sequence[Tensor]:
    return [places // stride % max(size, 1) for size, stride in zip(shape, _strides(shape), strict=True)]


def _weighted(places: Tensor, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Places in memory of the flattened places of a tensor."""
    found = torch.zeros_like(places)
    for each, stride in zip(_coordinates(places, shape), strides, strict=True):
        found += each * stride
    return found


def _joined(coordinates: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    found = torch.zeros_like(coordinates[0])
    for each, stride in zip(coordinates, _strides(shape), strict=True):
        found += each * stride
    return found


def _broadcast(places: Tensor, shape: Sequence[int], own: Sequence[int]) -> Tensor:
    """Where an operand that is broadcast to ``shape`` has the elements at these places."""
    if len(own) > len(shape):
        raise Untiled("an operand has more dimensions than the result")
    strides = [0 if size == 1 else stride for size, stride in zip(own, _strides(own), strict=True)]
    return _weighted(places, shape, [*[0] * (len(shape) - len(own)), *strides])


def _broadcast_box(value: Any, shape: Sequence[int], axes: Sequence[Tensor]) -> Any:
    """The part of an addend that belongs to a box of the result; lengths of one stay."""
    if not isinstance(value, Operand):
        return value
    mine = axes[len(shape) - len(value.shape) :] if value.shape else []
    first = torch.zeros(1, dtype=torch.int64)
    return value.box(*(first if size == 1 else axis for size, axis in zip(value.shape, mine, strict=True)))


def _rows(rows: Tensor, size: int) -> Tensor:
    return rows[:, None] * size + torch.arange(size)


def _position(func: OpOverload, name: str) -> int:
    return next(place for place, each in enumerate(func._schema.arguments) if each.name == name)


def _result(out: Any, slot: int) -> Tensor:
    found: Tensor = out if isinstance(out, Tensor) else out[slot]
    return found


def _flat(out: Any) -> Tensor:
    found: Tensor = out if isinstance(out, Tensor) else out[0]
    return found.reshape(-1)
