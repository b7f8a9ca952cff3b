"""What a region of the state holds: a sum of other values in the same places, as far as operators show one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from monitor.declaration.scales import FREE, Scales
from monitor.programs.parts import Part

__all__ = [
    "CLAMPS",
    "HERE",
    "KEEPING",
    "SCALED",
    "VALUES",
    "Made",
    "Result",
    "Stranger",
    "Taken",
    "Terms",
    "Value",
    "average_of",
    "bytes_digest",
    "is_number",
    "name_of_sums",
    "number_of",
    "terms_of",
]

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
