"""One element of a result from equal parts of what it is reduced over, for results that depend on too much for a tile.

A part has two kinds of whole numbers. Some combine by their maximum: magnitudes and flags. The others add up, and
depend on the maxima of all parts: the digits of a product depend on the scales of its row and column. The combined
numbers give the bits of the result under ``exact`` numerics (``exact.matmul``, ``exact.sums``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from monitor.numerics.kernels.bits import canonical_nan
from monitor.numerics.operators import linear, reductions
from monitor.numerics.operators.tiles import Operand, TileCall, Untiled, broadcast, coordinates_of, strides_of, weighted
from monitor.numerics.reference.matmul import quantise_row
from monitor.numerics.reference.resolution import round_fraction

__all__ = [
    "INFINITE",
    "MOST_PARTS",
    "Part",
    "Parted",
    "Reduction",
    "averaged",
    "combined",
    "exact_sum",
    "flags",
    "is_euclidean",
    "loss",
    "magnitudes",
    "norm",
    "number_of",
    "part_of",
    "product",
    "product_of",
    "spans",
    "split",
    "summed",
]

MOST_PARTS = 1 << 10
INFINITE = 0x7F80_0000
"""Bits of an infinity; those of a NaN's magnitude are larger."""
_UNIT = 172
"""A finite FP32 number is a whole number, below 2^24, times 2^(e - 24), e being its exponent, -148 at least."""


class Part(NamedTuple):
    """Numbers of one part, or of all: those of which the largest counts, and those that add up."""

    most: tuple[int, ...]
    sums: tuple[int, ...]


Values: TypeAlias = Sequence[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parted:
    """An element as a reduction over terms.

    Attributes:
        terms: how many.
        taken: the operands' elements, each (n,), of a range of the terms.
        most: their numbers of which the largest counts.
        sums: their numbers that add up, given the largest ones of all parts.
        value: the element, (1,), from the combined numbers.
        widths: how many numbers of each kind a part has.
        is_lawful: whether no honest replayer can object to what a log says of the element, given the combined numbers;
            None where one may.
    """

    terms: int
    taken: Callable[[range], Values]
    most: Callable[[Values], tuple[int, ...]]
    sums: Callable[[Values, tuple[int, ...]], tuple[int, ...]]
    value: Callable[[Part], Tensor]
    widths: tuple[int, int]
    is_lawful: Callable[[Part], bool | None] = lambda whole: True


Reduction: TypeAlias = Callable[[TileCall, int, int], Parted]
"""The element of a result, given its number, at a flattened place; Untiled where it is not reduced in parts."""


def spans(terms: int, count: int) -> list[range]:
    """The terms of each of so many equal parts."""
    return [range(terms * number // count, terms * (number + 1) // count) for number in range(count)]


def part_of(parted: Parted, span: range, most: tuple[int, ...]) -> Part:
    """The numbers of a part, given the largest of all parts."""
    values = parted.taken(span)
    return Part(parted.most(values), parted.sums(values, most))


def combined(parts: Sequence[Part]) -> Part:
    """The numbers of all parts."""
    mosts, sums = zip(*parts, strict=True)
    return Part(tuple(map(max, zip(*mosts, strict=True))), tuple(map(sum, zip(*sums, strict=True))))


def product(call: TileCall, slot: int, place: int) -> Parted:
    """Of a product of matrices: a row and a column, term by term."""
    *before, a, b = call.args
    shape = call.shapes[slot]
    _require_fp32(*before, a, b)
    if 0 in (*a.shape, *b.shape):
        raise Untiled("it has no terms")
    *batch, row, column = (int(each) for each in coordinates_of(torch.tensor(place), shape))
    first = sum(number * stride for number, stride in zip(batch, strides_of(a.shape), strict=False))
    other = sum(number * stride for number, stride in zip(batch, strides_of(b.shape), strict=False))
    inner, width = a.shape[-1], b.shape[-1]

    def taken(span: range) -> Values:
        terms = torch.arange(span.start, span.stop)
        return a.at(first + row * inner + terms), b.at(other + terms * width + column)

    def value(whole: Part) -> Tensor:
        return product_of(_Given(_dot(whole)), call, slot, place)

    return Parted(terms=inner, taken=taken, most=magnitudes, sums=_digits, value=value, widths=(2, 6))


def product_of(backend: Any, call: TileCall, slot: int, place: int) -> Tensor:
    """The element, (1,), of a product of matrices by a backend that has its sum already."""
    *before, _, _ = call.args
    shape, blank = call.shapes[slot], torch.zeros((1, 1))
    addends = [each.at(broadcast(torch.tensor([place]), shape, each.shape)).reshape(1, 1) for each in before]
    code: Callable[..., Tensor] = linear.product if not before else linear.addmm if len(shape) == 2 else linear.baddbmm
    return _settled(code(backend, *addends, blank, blank, **call.kwargs))


def summed(call: TileCall, slot: int, place: int) -> Parted:
    """Of ``sum``: the elements along its dimensions."""
    return _added(call, slot, place, reductions.sum_over)


def averaged(call: TileCall, slot: int, place: int) -> Parted:
    """Of ``mean``: the same, divided by their number."""
    return _added(call, slot, place, reductions.mean)


def _added(call: TileCall, slot: int, place: int, code: Callable[..., Tensor]) -> Parted:
    x: Operand = call.args[0]
    terms, taken = _along(call, x, place)

    def value(whole: Part) -> Tensor:
        like = torch.zeros(()).expand(x.shape)
        return _settled(code(_Given(_total(whole.most, whole.sums[0])), like, *call.args[1:], **call.kwargs))

    return Parted(terms=terms, taken=taken, most=flags, sums=_exact_sums, value=value, widths=(3, 1))


def norm(call: TileCall, slot: int, place: int) -> Parted:
    """Of the Euclidean norm, or that of each of a list: squares of elements, each scaled by the largest of all."""
    if not is_euclidean(call.argument):
        raise Untiled("a norm of another order")
    x = call.args[0] if isinstance(call.args[0], Operand) else call.args[0][slot]
    terms, taken = _along(call, x, place)

    def sums(values: Values, most: tuple[int, ...]) -> tuple[int, ...]:
        if most[0] >= INFINITE:
            return (0,)
        small = torch.div(values[0], reductions.norm_scale(number_of(most[0])))
        return _exact_sums([small * small], ())

    def value(whole: Part) -> Tensor:
        (top,) = whole.most
        flags = (int(top > INFINITE), int(top == INFINITE), 0)
        given: Any = _Given(_total(flags, whole.sums[0]))
        return _settled(reductions.vector_norm(given, number_of(top)))

    return Parted(terms=terms, taken=taken, most=magnitudes, sums=sums, value=value, widths=(1, 1))


def is_euclidean(argument: Callable[[str], Any]) -> bool:
    """Whether a norm, given its arguments by their names, is that of order 2."""
    try:
        return argument("ord") in (2, None)
    except KeyError:
        return argument("p") in (2, None)


def loss(call: TileCall, slot: int, place: int) -> Parted:
    """Of ``nll_loss_forward`` that is reduced: for each sample the element of its class, and its weight."""
    x, target, weight, how, ignored = call.args
    _require_fp32(x, *([] if weight is None else [weight]))
    if len(x.shape) != 2 or how == 0 or not x.size:
        raise Untiled("it is not reduced")

    def taken(span: range) -> Values:
        rows = torch.arange(span.start, span.stop)
        classes = target.at(rows).to(torch.int64)
        safe = torch.where(classes == ignored, 0, classes)
        if bool(((safe < 0) | (safe >= x.shape[1])).any()):
            raise Untiled("a target is outside the classes")
        weights = torch.ones(len(rows)) if weight is None else weight.at(safe)
        weights = torch.where(classes == ignored, 0.0, weights)
        picked = -x.at(rows * x.shape[1] + safe) * weights
        return torch.where(weights == 0, 0.0, picked), weights

    def most(values: Values) -> tuple[int, ...]:
        return *flags(values[:1]), *flags(values[1:])

    def value(whole: Part) -> Tensor:
        total, mass = _total(whole.most[:3], whole.sums[0]), _total(whole.most[3:], whole.sums[1])
        return _settled(mass if slot else torch.div(total, mass) if how == 1 else total)

    return Parted(terms=x.shape[0], taken=taken, most=most, sums=_exact_sums, value=value, widths=(6, 2))


def _names(call: TileCall) -> list[str]:
    return [each.name for each in call.func._schema.arguments]


def _require_fp32(*operands: Any) -> None:
    if not all(isinstance(each, Operand) and each.dtype is torch.float32 for each in operands):
        raise Untiled("operands of another type than FP32")


def _along(call: TileCall, x: Operand, place: int) -> tuple[int, Callable[[range], Values]]:
    """How many terms an element has, and what takes some of them."""
    _require_fp32(x)
    if "dtype" in _names(call) and call.argument("dtype") not in (None, torch.float32):
        raise Untiled("it gives another type")
    if not x.shape or not x.size:
        raise Untiled("it has no terms")
    dims = call.argument("dim") if "dim" in _names(call) else None
    listed = reductions.all_dims(torch.empty(x.shape, device="meta"), dims)
    strides = strides_of(x.shape)
    kept = [axis for axis in range(len(x.shape)) if axis not in listed]
    inner, steps = [x.shape[axis] for axis in listed], [strides[axis] for axis in listed]
    start = weighted(torch.tensor(place), [x.shape[axis] for axis in kept], [strides[axis] for axis in kept])

    def taken(span: range) -> Values:
        return (x.at(start + weighted(torch.arange(span.start, span.stop), inner, steps)),)

    return math.prod(inner), taken


@dataclass(frozen=True, slots=True)
class _Given:
    """A backend that has summed already."""

    result: Tensor

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        return self.result.reshape(1, 1)

    def sum(self, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
        return self.result.reshape(())


def _settled(value: Tensor) -> Tensor:
    found = value.reshape(1).clone()
    canonical_nan(found)
    return found


def number_of(bits: int) -> Tensor:
    """(1,), the FP32 number of these bits."""
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


def magnitudes(values: Values) -> tuple[int, ...]:
    """Bits of the largest magnitude of each operand's elements."""
    return tuple(int((each.contiguous().view(torch.int32) & 0x7FFF_FFFF).max()) for each in values)


def flags(values: Values) -> tuple[int, ...]:
    """Whether a NaN, an infinity, a negative infinity is among one operand's elements."""
    (x,) = values
    return int(x.isnan().any()), int((x == math.inf).any()), int((x == -math.inf).any())


def _total(flags: Sequence[int], total: int) -> Tensor:
    """The FP32 sum, rounded once, as ``exact.sums`` has it."""
    nan, high, low = flags
    if nan or high or low:
        return torch.tensor(math.nan if nan or (high and low) else math.inf if high else -math.inf)
    return torch.tensor(round_fraction(Fraction(total, 1 << _UNIT)))


def _exact_sums(values: Values, most: tuple[int, ...]) -> tuple[int, ...]:
    """Sum of the finite elements of each operand, in units of 2^-172."""
    found = []
    for each in values:
        fraction, exponent = split(each[each.isfinite()])
        found.append(exact_sum(fraction, exponent + (_UNIT - 24)))
    return tuple(found)


def split(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers below 2^24 and exponents e: x is the one times 2^(e - 24)."""
    fraction, exponent = np.frexp(x.numpy().astype(np.float64))
    return (fraction * (1 << 24)).astype(np.int64), np.where(fraction == 0, 0, exponent).astype(np.int64)


def exact_sum(numbers: np.ndarray, shifts: np.ndarray) -> int:
    """Sum of numbers below 2^48, each times two to the power of its shift."""
    total = 0
    for shift in np.unique(shifts):
        mine = numbers[shifts == shift]
        total += sum(int(mine[at : at + (1 << 14)].sum()) for at in range(0, len(mine), 1 << 14)) << int(shift)
    return total


def _digits(values: Values, most: tuple[int, ...]) -> tuple[int, ...]:
    """What a product sums: V, of row and column the non-zero elements and the small ones, and the exact dot product."""
    if max(most) >= INFINITE:
        return (0,) * 6
    whole, counts = [], []
    for x, top in zip(values, most, strict=True):
        q = np.rint(np.ldexp(x.numpy().astype(np.float64), _shift(top))).astype(np.int64)
        is_small = (x.numpy() != 0) & (np.abs(q) * 6 < _largest(top))
        counts += [int((x.numpy() != 0).sum()), int(is_small.sum())]
        whole.append((q, (q + 128) % 256 - 128))
    (q, low), (r, other) = whole
    (a, e), (b, f) = map(split, values)
    terms = (q * r - low * other) // 256
    return exact_sum(terms, np.zeros_like(terms)), *counts, exact_sum(a * b, e + f + 2 * (_UNIT - 24))


def _shift(top: int) -> int:
    return quantise_row([float(number_of(top))])[1]


def _largest(top: int) -> int:
    return abs(quantise_row([float(number_of(top))])[0][0])


def _dot(whole: Part) -> Tensor:
    """An element of a product from its combined numbers, as ``exact.matmul`` has it."""
    total, *counts, dot = whole.sums
    if max(whole.most) >= INFINITE:
        return torch.tensor(math.nan)
    if any(8 * small > 7 * filled for filled, small in zip(counts[::2], counts[1::2], strict=True)):
        return torch.tensor(round_fraction(Fraction(dot, 1 << 2 * _UNIT)))
    return torch.tensor(round_fraction(Fraction(float(total)) * Fraction(2) ** (8 - sum(map(_shift, whole.most)))))
