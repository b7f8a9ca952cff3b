"""What a region of the state holds: a sum of other values in the same places, as far as operators show one.

How often a gradient scaler's scale is in a value: what an update takes must not be multiplied by one.

A value is a sum of products. Of each product the power of each scale is kept, and of nothing else: ``{}`` for what has
no scale in it. A value without any product is zero. A scale that was written since is another one: dividing by the next
one does not take it out again, for the quotient of the two would be a rate that nothing declares.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from monitor.programs.parts import Part

__all__ = [
    "CLAMPS",
    "FREE",
    "HERE",
    "KEEPING",
    "SCALED",
    "VALUES",
    "ZERO",
    "Made",
    "Result",
    "Scales",
    "Stranger",
    "Taken",
    "Terms",
    "Value",
    "average_of",
    "bytes_digest",
    "combined",
    "is_number",
    "later",
    "name_of_sums",
    "names_in",
    "number_of",
    "scale",
    "terms_of",
]


Power = tuple[str, int, int]
"""A scale by its name, the call that wrote it (0: a step before), and its exponent."""
Scales = frozenset[frozenset[Power]]
"""The products that a value is a sum of."""

ZERO: Scales = frozenset()
FREE: Scales = frozenset({frozenset()})
"""What no scale is in."""

_GONE = -1
"""In place of a call: the scale was written since, or the value is no product of it. Nothing takes it off again."""
_FEW_PRODUCTS = 8
_SUMS = """
add sub rsub lerp cat stack where index_put index_copy index_add scatter scatter_add masked_fill masked_scatter
index_fill put slice_scatter select_scatter
"""
_ADDING = frozenset(_SUMS.split())
_TIMES = frozenset({"mul", "mm", "bmm", "mv", "dot", "vdot", "outer", "matmul"})
_BENDS = """
pow float_power square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sigmoid tanh erf sin cos sign sgn clamp clamp_min
clamp_max hardtanh minimum maximum softmax remainder fmod atan2 addcdiv round floor ceil trunc tan asin acos atan sinh
cosh asinh acosh atanh erfc erfinv logit gelu silu mish softplus elu glu hardswish hardsigmoid hardshrink softshrink
threshold log_sigmoid_forward log_softmax logsumexp logcumsumexp logaddexp logaddexp2 xlogy floor_divide prod cumprod
var std var_mean std_mean native_layer_norm native_group_norm native_batch_norm native_dropout det inverse matrix_exp
scatter_reduce index_reduce lgamma digamma polygamma
"""
_BENDING = frozenset(_BENDS.split())
"""Made of a value that has a scale in it, these are no product of the scale."""
_KEEPING = frozenset({"clone", "_to_copy", "contiguous", "detach", "neg", "sum", "mean"})
"""These leave zeros zero, as adding and multiplying do."""
_FACTORS: Mapping[str, tuple[str, str]] = {
    "addmm": ("mat1", "mat2"),
    "addmv": ("mat", "vec"),
    "baddbmm": ("batch1", "batch2"),
    "addbmm": ("batch1", "batch2"),
    "addcmul": ("tensor1", "tensor2"),
    "addr": ("vec1", "vec2"),
}


def scale(name: str, written: int) -> Scales:
    """A scale itself, as the call left it."""
    return frozenset({frozenset({(name, written, 1)})})


def combined(part: Part, inputs: Sequence[Scales], numbers: Collection[int]) -> Scales:
    """The scales in what an operator makes.

    Args:
        inputs: those in each input of its call.
        numbers: the inputs that hold numbers with a fraction; others are places and masks.
    """
    read = [inputs[slot] for slot in part.read]
    if part.name in _FACTORS:
        pair = [_together(inputs[slot] for slot in part.slots.get(each, ())) for each in _FACTORS[part.name]]
        return _few(_together([*(inputs[slot] for slot in part.slots.get("self", ())), _product(pair)]))
    if part.name in _ADDING:
        return _few(_together(inputs[slot] for slot in part.read if slot in numbers))
    if part.name == "reciprocal":
        return _together(map(_inverse, read))
    if part.name == "div" and len(read) == 2:
        return _few(_product([read[0], _inverse(read[1])]))
    if part.name in _TIMES:
        return _few(_product(read))
    found = _together(each for each in read if each != FREE)
    if not found:
        return ZERO if part.name in _KEEPING and FREE not in read else FREE
    is_product = sum(slot in numbers and inputs[slot] not in (FREE, ZERO) for slot in part.read) > 1
    return _bent(found) if is_product or part.name.lstrip("_") in _BENDING else _few(found)


def later(found: Scales, written: Mapping[str, int]) -> Scales:
    """The same once the step has ended, in which calls have written scales."""
    return frozenset(
        frozenset((name, 0, power) if call == written.get(name, 0) else (name, _GONE, 1) for name, call, power in each)
        for each in found
    )


def names_in(found: Scales) -> frozenset[str]:
    """The scales that are in a value."""
    return frozenset(name for each in found for name, _, _ in each)


def _together(values: Iterable[Scales]) -> Scales:
    return ZERO.union(*values)


def _product(factors: Sequence[Scales]) -> Scales:
    found = FREE
    for factor in factors:
        found = frozenset(_times(one, other) for one in found for other in factor)
    return found


def _times(one: frozenset[Power], other: frozenset[Power]) -> frozenset[Power]:
    powers: dict[tuple[str, int], int] = {}
    for name, call, power in (*one, *other):
        powers[name, call] = 1 if call == _GONE else powers.get((name, call), 0) + power
    return frozenset((*key, power) for key, power in powers.items() if power)


def _inverse(value: Scales) -> Scales:
    inverse = (
        frozenset((name, call, 1 if call == _GONE else -power) for name, call, power in each) for each in value or FREE
    )
    return frozenset(inverse)


def _bent(value: Scales) -> Scales:
    gone = frozenset((name, _GONE, 1) for name in names_in(value))
    return frozenset({gone})


def _few(value: Scales) -> Scales:
    """Few products as they are; of many that something is in which nothing takes off again."""
    return value if len(value) <= _FEW_PRODUCTS else _bent(value)


Terms = Mapping[object, float]
"""Values that are added up, by their names, with factors; ``None`` names a number."""
_CLOSE = 1e-6
"""Factors of an average may be this far from adding up to 1."""
_LEAST, _MOST = 1e-8, 8.0
HERE, VALUES = "here:", "values:"
SCALED = "a scale"
KEEPING = frozenset({"clone", "copy", "detach", "alias", "lift_fresh", "lift_fresh_copy", "_to_copy", "contiguous"})
_BOUNDS = ("min", "max", "min_val", "max_val", "scalar", "scalars")
CLAMPS = frozenset({"clamp", "clamp_min", "clamp_max", "hardtanh"})
_OTHERS = ("other", "scalar", "scalars")


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that a write made of weights, its operator, and whether a gradient, or that or a batch, had part in it.

    A gradient scaler's scale that an update's gradients are still multiplied by is one too.
    """

    name: str
    operator: str
    dirty: bool = False
    graded: bool = False

    @property
    def is_scale(self) -> bool:
        """Whether it is a scale that is still in what an update takes."""
        return self.operator == SCALED


@dataclass(frozen=True, slots=True)
class Value:
    """What a region holds.

    Attributes:
        dirty: it depends on a gradient, a batch or the optimizer's state.
        terms: its elements as a sum of others in the same places, by their names, with factors; ``None`` for a number,
            and None instead of all where it is no such sum.
        names: tensors of the state that it depends on.
        numbers: scalars of the program that it was made with.
        clamped, cut: it was made of what was clamped, or of another part of a tensor: both write number by number.
        made: what was made of weights, and it depends on.
        graded: an operator of a backward pass had part in it.
        maker: operator that made it, but for copies.
        scales: products of gradient scalers' scales in it.
        power: 1 for a product of a weight with a vector, and for its size; 2 for the unit vector of the two.
    """

    dirty: bool = False
    terms: Terms | None = None
    names: frozenset[str] = frozenset()
    clamped: bool = False
    cut: bool = False
    numbers: frozenset[int] = frozenset()
    made: frozenset[Made] = frozenset()
    graded: bool = False
    maker: str = ""
    power: int = 0
    scales: Scales = FREE

    @property
    def is_average(self) -> bool:
        terms = self.terms
        if terms is None or terms.get(None) or (self.clamped and self.cut):
            return False
        if self.has_results:
            return False
        return min(terms.values(), default=-1.0) >= -_CLOSE and abs(sum(terms.values()) - 1) <= _CLOSE

    @property
    def has_results(self) -> bool:
        return any(isinstance(name, Result) for name in self.terms or ())

    @property
    def is_strange(self) -> bool:
        return any(isinstance(name, Stranger) for name in self.terms or ())

    @property
    def is_lawful(self) -> bool:
        """Whether it is an average of what weights were and of one value more, such as that of its start."""
        return self.is_average and sum(isinstance(name, Stranger) for name in self.terms or ()) < 2

    def opaque(self, name: object) -> Value:
        """The same in other places, of which nothing is known any more but whether it is an average."""
        moved = replace(self, cut=True)
        return replace(moved, terms=average_of(name, [self]) if moved.is_average else None)


class Result(str):
    """The result of an operator other than a sum; the string is a digest of the operator and its inputs."""

    __slots__ = ()


class Stranger(str):
    """Values that are none of a weight's."""

    __slots__ = ()


def average_of(name: object, made_of: Iterable[Value]) -> Terms:
    """An average of which nothing else is known, under a name."""
    return {Stranger(name) if any(value.is_strange for value in made_of) else name: 1.0}


@dataclass(frozen=True, slots=True)
class Taken:
    """What an operator takes, by the names in its schema.

    Attributes:
        values: of all inputs of the call.
        scalars: the step's.
        call: its number.
        drops: parts of a sum with a factor of 0 are left out.
    """

    part: Part
    values: Sequence[Value]
    scalars: Sequence[float]
    call: int
    drops: bool

    def terms(self, name: str) -> Terms | None:
        """A tensor, or a number, as a sum."""
        slots = self.part.slots.get(name)
        if slots is not None:
            return self.values[slots[0]].terms if len(slots) == 1 else None
        number = self.number(name)
        return None if number is None else {None: number}

    def factor(self, name: str) -> float | None:
        """The one number that it is in all places."""
        terms = self.terms(name)
        return terms.get(None, 0.0) if terms is not None and set(terms) <= {None} else None

    def number(self, name: str, default: float | None = None) -> float | None:
        """A number that is an argument, or of a list that of this output."""
        value = self.part.others.get(name, default)
        if isinstance(value, list):
            value = value[self.part.outputs[0]] if self.part.outputs[0] < len(value) else None
        if isinstance(value, dict) and set(value) == {"$scalar"}:
            return self.scalars[value["$scalar"]]
        return float(value) if isinstance(value, int | float) else None


def terms_of(taken: Taken) -> Terms | None:
    """What an operator makes, as a sum of what it takes in the same places; None where it is no such sum."""
    rule = _RULES.get(taken.part.name)
    return None if rule is None else rule(taken)


def _clamped(taken: Taken) -> Terms | None:
    part = taken.part
    given = [taken.number(each) for each in _BOUNDS if part.others.get(each) is not None]
    bounds = [each for each in given if each is not None]
    own = taken.values[part.slots["self"][0]]
    is_plain = len(bounds) == len(given) > 0 and set(part.slots) == {"self"}
    if not is_plain or not own.is_average or own.cut or (len(bounds) == 2 and not bounds[0] < bounds[1]):
        return None
    return average_of((taken.call, part.outputs), [own])


def _added(taken: Taken) -> Terms | None:
    name, scale = taken.part.name, taken.number("alpha", 1.0)
    other = next((each for each in _OTHERS if taken.terms(each) is not None), "other")
    first, second = ("self", other) if name != "rsub" else (other, "self")
    by = None if scale is None else scale if name == "add" else -scale
    return _sum(taken.terms(first), taken.terms(second), by, drops=taken.drops)


def _multiplied(taken: Taken) -> Terms | None:
    part, is_product = taken.part, taken.part.name == "mul"
    others = [each for each in _OTHERS if each in part.slots or each in part.others]
    for mine, theirs in (("self", others), *((each, ["self"]) for each in others if is_product)):
        by = next((found for each in theirs if (found := taken.factor(each)) is not None), None)
        if by is not None:
            return _part(taken.terms(mine), by if is_product else 1 / by if by else None)
    return None


def _between(taken: Taken) -> Terms | None:
    by, end = taken.factor("weight"), taken.terms("end" if "end" in taken.part.slots else "tensors1")
    return None if by is None else _sum(_part(taken.terms("self"), 1 - by), end, by, drops=taken.drops)


_RULES: Mapping[str, Callable[[Taken], Terms | None]] = {
    **dict.fromkeys(KEEPING, lambda taken: taken.terms("self")),
    "copy": lambda taken: taken.terms("src"),
    **dict.fromkeys(CLAMPS, _clamped),
    **dict.fromkeys(("zero", "zeros_like", "new_zeros", "zeros"), lambda _: {None: 0.0}),
    "ones_like": lambda _: {None: 1.0},
    "fill": lambda taken: taken.terms("value"),
    **dict.fromkeys(("full_like", "full"), lambda taken: taken.terms("fill_value")),
    **dict.fromkeys(("add", "sub", "rsub"), _added),
    "neg": lambda taken: _scaled(taken.terms("self"), -1.0),
    **dict.fromkeys(("mul", "div"), _multiplied),
    "lerp": _between,
}
"""The operators that make sums."""


def name_of_sums(how: object, of: Sequence[Terms]) -> str:
    """A name for what is made of known sums, which begins with ``here:`` where one program alone knows them."""
    text = repr((how, [sorted(map(repr, terms.items())) for terms in of]))
    lasts = all(each is None or (isinstance(each, str) and not each.startswith(HERE)) for terms in of for each in terms)
    return ("" if lasts else HERE) + sha256(text.encode()).hexdigest()


def bytes_digest(value: Tensor) -> str:
    """A digest of a tensor's type and numbers."""
    numbers = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{VALUES}{value.dtype} {sha256(numbers).hexdigest()}"


def is_number(value: Value) -> bool:
    return value.terms is not None and set(value.terms) <= {None}


def _scaled(terms: Terms | None, by: float | None) -> Terms | None:
    return None if terms is None or by is None else _tame({name: factor * by for name, factor in terms.items()})


def _tame(terms: Terms) -> Terms | None:
    """Terms of which none is rounded away next to another and comes back as zero; None for any other."""
    if set(terms) <= {None}:
        return terms
    return terms if None not in terms and all(_LEAST <= abs(factor) <= _MOST for factor in terms.values()) else None


def _sum(
    one: Terms | None,
    other: Terms | None,
    by: float | None,
    *,
    drops: bool = False,
) -> Terms | None:
    scaled = _part(other, by)
    if one is None or scaled is None:
        return None
    if one == {None: 0.0} or scaled == {None: 0.0}:
        return scaled if one == {None: 0.0} else one
    found = {name: one.get(name, 0.0) + scaled.get(name, 0.0) for name in {**one, **scaled}}
    return _tame({each: by for each, by in found.items() if by or not (drops or isinstance(each, Result))})


def _part(terms: Terms | None, by: float | None) -> Terms | None:
    """Terms times a factor; nothing where that is 0."""
    return {None: 0.0} if terms is not None and by == 0 else _scaled(terms, by)


def number_of(constant: Any) -> float | None:
    """The one number that all elements of a constant are."""
    if not constant.is_uniform or not constant.elements or constant.tensor().is_complex():
        return None
    return float(constant.tensor().reshape(-1)[0])
