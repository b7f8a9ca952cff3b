"""Writes of weights outside the optimizer's updates: which of them leave what is declared of the updates true.

A *declared write* takes the state alone: no gradient, no batch, no optimizer's state, in this step or in any before it.

- A weight of no parameter group may be written by any formula of the state: a target network, a momentum encoder, a
  base into which an adapter is merged.
- A weight that the optimizer updates keeps what its numbers say only where a write cannot enlarge an update. So it may
  be clamped between numbers as a whole, and replaced by an average: a sum of earlier values of weights, and of averages
  of such, whose factors are not negative and add up to 1. An extrapolation, a decay or a factor is none.
- Any other tensor may hold anything. But one that is *made* of weights, and is neither a copy nor an average of them,
  moves at no declared rate. Where an update takes a gradient that such a tensor has a part in, it is named. The unit
  vectors of a spectral norm are none, nor is what a later write takes off again, such as a merged adapter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from monitor.declaration.reference import NotBound
from monitor.declaration.scales import FREE, ZERO, Scales, combined, later, names_in, scale
from monitor.programs.calls import ITEM, base_name, scalar_numbers
from monitor.programs.memory import Access, Memory, Spot, is_dense
from monitor.programs.parts import Part, parts_of
from monitor.programs.program import Program
from monitor.programs.recalled_weights import state_of

__all__ = ["Marks", "Written", "declared_writes", "shares_of"]

_CLOSE = 1e-6
"""Factors of an average may be this far from adding up to 1."""
_LEAST, _MOST = 1e-8, 8.0
_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_KEEPING = frozenset({"clone", "copy", "detach", "alias", "lift_fresh", "lift_fresh_copy", "_to_copy", "contiguous"})
_OTHER_TYPE = "aten.view.dtype"
_BOUNDS = ("min", "max", "min_val", "max_val", "scalar", "scalars")
_CLAMPS = frozenset({"clamp", "clamp_min", "clamp_max", "hardtanh"})
_TAKEN = ("weight/", "buffer/")
_JOINS, _PRODUCTS = frozenset({"cat", "stack"}), frozenset({"mm", "bmm", "mul"})
_HERE, _BEFORE, _VALUES, _MIXED = "here:", "before:", "values:", "mixed:"
_SCALED = "a scale"
_POWERS = _KEEPING | {"linalg_vector_norm", "norm", "clamp_min", "clamp", "expand"}


@dataclass(frozen=True, slots=True)
class Marks:
    """What is known of the state between two steps.

    Attributes:
        dirty: tensors that hold what came from a gradient, a batch or the optimizer's state otherwise than by updates.
        bent: tensors that hold something else than averages of what weights were.
        moved: tensors that depend on weights of parameter groups.
        made: tensors that depend on what is made of weights, each with a tensor that was.
        added: tensors to which something was added that may be taken off again, with their sums.
        scales: tensors that have a gradient scaler's scale in them, or are zero, each with its products.
        strange: tensors that began as no copy of a weight of a parameter group, or are averages with such, each with
            the values that it holds.
        ever_dirty, ever_bent, ever_moved, ever_made: those of which this was so after any step; an earlier value may
            come back.
    """

    dirty: frozenset[str] = frozenset()
    bent: frozenset[str] = frozenset()
    moved: frozenset[str] = frozenset()
    made: frozenset[tuple[str, Made]] = frozenset()
    added: frozenset[tuple[str, frozenset[tuple[object, float]], frozenset[str]]] = frozenset()
    strange: frozenset[tuple[str, str]] = frozenset()
    scales: frozenset[tuple[str, Scales]] = frozenset()
    ever_dirty: frozenset[str] = frozenset()
    ever_bent: frozenset[str] = frozenset()
    ever_moved: frozenset[str] = frozenset()
    ever_made: frozenset[tuple[str, Made]] = frozenset()

    @classmethod
    def of_start(cls, start: Mapping[str, Tensor], governed: Collection[str]) -> Marks:
        """What is known of the state that a run begins with, under ``kind/name``."""
        held = {name: value.detach().cpu() for name, value in start.items() if name.startswith(_TAKEN)}
        weights = [held.pop(f"weight/{name}") for name in governed]
        forms = {(value.dtype, value.numel()) for value in held.values()}
        known = {_bytes_digest(each.to(dtype)) for each in weights for dtype, size in forms if size == each.numel()}
        strange = {(name, digest) for name, value in held.items() if (digest := _bytes_digest(value)) not in known}
        zero = {(name, ZERO) for name, value in start.items() if name.startswith("gradient/") and not value.any()}
        return cls(strange=frozenset(strange), scales=frozenset(zero), ever_bent=frozenset(name for name, _ in strange))

    def then(self, now: Marks) -> Marks:
        """What is known once the state is so."""
        return replace(
            now,
            ever_dirty=self.ever_dirty | now.dirty,
            ever_bent=self.ever_bent | now.bent,
            ever_moved=self.ever_moved | now.moved,
            ever_made=self.ever_made | now.made,
        )


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
        return self.operator == _SCALED


@dataclass(frozen=True, slots=True)
class Written:
    """A declared write: the tensors of the state that it takes, and its operators, without overloads."""

    sources: frozenset[str]
    operators: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Value:
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
    terms: Mapping[object, float] | None = None
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
        return any(isinstance(name, _Result) for name in self.terms or ())

    @property
    def is_strange(self) -> bool:
        return any(isinstance(name, _Stranger) for name in self.terms or ())

    @property
    def is_lawful(self) -> bool:
        """Whether it is an average of what weights were and of one value more, such as that of its start."""
        return self.is_average and sum(isinstance(name, _Stranger) for name in self.terms or ()) < 2

    def opaque(self, name: object) -> _Value:
        """The same in other places, of which nothing is known any more but whether it is an average."""
        moved = replace(self, cut=True)
        return replace(moved, terms=_one(name, [self]) if moved.is_average else None)


class _Result(str):
    """The result of an operator other than a sum; the string is a digest of the operator and its inputs."""

    __slots__ = ()


class _Stranger(str):
    """Values that are none of a weight's."""

    __slots__ = ()


def _one(name: object, made_of: Iterable[_Value]) -> Mapping[object, float]:
    """An average of which nothing else is known, under a name."""
    return {_Stranger(name) if any(value.is_strange for value in made_of) else name: 1.0}


@dataclass(slots=True)
class _Region:
    value: _Value
    operators: set[str] = field(default_factory=set)  # that wrote it, but for updates
    last: str = ""


def declared_writes(
    program: Program,
    memory: Memory,
    scalars: Sequence[float],
    bound: Collection[int],
    governed: Collection[str],
    marks: Marks,
    unknown: frozenset[str] = frozenset(),
) -> tuple[Marks, dict[str, Written], frozenset[Made]]:
    """What a step's declared writes are, what is known of the state after it, and what its updates take of made ones.

    Args:
        scalars: the step's.
        bound: calls that are updates as declared.
        governed: names of the weights in parameter groups.
        marks: what was known before.
        unknown: weights of unknown optimizers; nothing is said of these.

    Raises:
        NotBound: it writes a weight otherwise.
    """
    found = _Analysis(program, memory, scalars, frozenset(bound), marks, governed=frozenset(governed))
    return found.judged(unknown)


def shares_of(
    program: Program, memory: Memory, scalars: Sequence[float], updates: Collection[int], marks: Marks
) -> frozenset[int]:
    """The scalars that do nothing but say how much an average takes of each: of an average of weights that is kept.

    They reach no gradient, no update, no loss and no value that is read: only weights and buffers that are, in the
    end, sums of what tensors of the state were, with factors that are not negative and add up to 1. Each is of tensors
    as a whole: a number for each part of a tensor could write there whatever lies between two others.

    Args:
        scalars: the step's.
        updates: calls of optimizers.
        marks: what was known before; between what began otherwise than weights, a number chooses what it likes.
    """
    return _Analysis(program, memory, scalars, frozenset(updates), Marks(strange=marks.strange), drops=True).shares()


class _Analysis:
    def __init__(
        self,
        program: Program,
        memory: Memory,
        scalars: Sequence[float],
        bound: frozenset[int],
        marks: Marks,
        *,
        drops: bool = False,  # of an average's parts those with a factor of 0
        governed: frozenset[str] = frozenset(),
    ) -> None:
        self._governed = governed
        self._moving = marks.moved | {f"weight/{name}" for name in governed}
        self._added = {name: (dict(terms), names) for name, terms, names in marks.added}
        self._ends = {spot.region: name for name, spot in memory.commit.items() if spot and name.startswith(_TAKEN)}
        self._scales = {
            name for name in memory.commit if f"{name.removesuffix('_scale')}_growth_tracker" in memory.commit
        }
        self._strange, self._scaled = dict(marks.strange), dict(marks.scales)
        self._rescaled: dict[str, int] = {}
        self._touched, self._taken = set[int](), frozenset[Made]()
        self._drops, self._elsewhere = drops, set[int]()
        self._numbers_of = [tuple(scalar_numbers(call["arguments"])) for call in program.calls]
        self._program, self._memory, self._scalars, self._bound, self._marks = program, memory, scalars, bound, marks
        self._regions = [_Region(self._start(region.source)) for region in memory.regions]

    def judged(self, unknown: frozenset[str]) -> tuple[Marks, dict[str, Written], frozenset[Made]]:
        for access in self._memory.accesses:
            self._take(access)
        governed, dirty, bent, written = self._governed, set(), set(), {}
        moved, made, added, strange, scales = set(), set(), set(), set(), set()
        changed = {name for name, spot in self._memory.commit.items() if spot is None or self._is_changed(name, spot)}
        for name, spot in self._memory.commit.items():
            if spot is None:
                scales |= {(name, ZERO)} if name.startswith("gradient/") else set()
                continue
            held = self._read(spot, self._program.commit[name] or {}, "end")
            made |= {(name, each) for each in held.made}
            left = later(held.scales, self._rescaled)
            scales |= {(name, left)} if left != FREE and name not in self._scales else set()
            if not name.startswith(_TAKEN):
                continue
            region, place = self._regions[spot.region], self._program.commit[name] or {}
            value = self._read(spot, place, ("end", name))
            is_own = self._memory.regions[spot.region].source == f"state:{name}"
            if value.dirty:
                dirty.add(name)
            if not value.is_average or (value.clamped and name.removeprefix("weight/") not in governed):
                bent.add(name)
            if value.names & self._moving:
                moved.add(name)
            is_foreign = not value.is_average and not value.dirty and not value.names & self._moving
            if value.is_strange or is_foreign:
                kept = [str(each) for each in value.terms or ()]
                strange.add((name, kept[0] if len(kept) == 1 and kept[0].startswith(_VALUES) else _MIXED + name))
            if (sums := self._sums(name, value, changed)) is not None:
                added.add((name, *sums))
            is_said = name.startswith("weight/") and name.removeprefix("weight/") not in unknown
            if not is_said or (is_own and not region.operators):
                continue
            if value.dirty or (name.removeprefix("weight/") in governed and (value.is_strange or not value.is_average)):
                cause = (
                    "from a gradient, the batch or the optimizer's state"
                    if value.dirty
                    else "and not by a clamp of the whole between numbers or an average of weights"
                )
                operator = region.last or "the step"
                raise NotBound(f"{operator} writes {name!a} outside the optimizer's updates, {cause}")
            written[name] = Written(value.names, frozenset(region.operators))
        now = Marks(
            dirty=frozenset(dirty),
            bent=frozenset(bent),
            moved=frozenset(moved),
            made=frozenset(made),
            added=frozenset(added),
            strange=frozenset(strange),
            scales=frozenset(scales),
        )
        return self._marks.then(now), written, self._taken

    def _is_changed(self, name: str, spot: Spot) -> bool:
        return spot.region in self._touched or self._memory.regions[spot.region].source != f"state:{name}"

    def _sums(
        self, name: str, value: _Value, changed: set[str]
    ) -> tuple[frozenset[tuple[object, float]], frozenset[str]] | None:
        """What a tensor is the sum of, where a later write may find the same of the state and take it off again."""
        terms = {_BEFORE + name if each == name else each: factor for each, factor in (value.terms or {}).items()}
        added = [each for each in terms if isinstance(each, _Result)]
        others = [str(each) for each in terms if each not in added]
        lasts = len(others) == 1 and (others[0] in (_BEFORE + name, _MIXED + name) or others[0].startswith(_VALUES))
        lasts = lasts and bool(added) and not any(each.startswith(_HERE) for each in added)
        lasts = lasts and not (value.names - {name}) & changed
        return (frozenset(terms.items()), value.names) if lasts else None

    def shares(self) -> frozenset[int]:
        for access in self._memory.accesses:
            self._take(access)
        shares = set[int]()
        for name, spot in self._memory.commit.items():
            if spot is not None:
                value = self._regions[spot.region].value
                (shares if value.is_lawful and name.startswith(_TAKEN) else self._elsewhere).update(value.numbers)
        if self._program.loss is not None:
            self._elsewhere |= self._regions[self._memory.spot(self._program.loss).region].value.numbers
        return frozenset(shares - self._elsewhere)

    def _start(self, source: str) -> _Value:
        kind, _, name = source.partition(":")
        if kind == "constant":
            number = _number_of(self._program.constants[int(name)])
            return _Value(terms=None if number is None else {None: number}, scales=FREE if number != 0 else ZERO)
        if (earlier := state_of(source)) is not None:
            own: Mapping[object, float] | None = {("earlier", earlier): 1.0}
            own = None if earlier in self._marks.ever_bent else own
            made = frozenset(each for name, each in self._marks.ever_made if name == earlier)
            self._moving |= {earlier} & self._marks.ever_moved
            return _Value(earlier in self._marks.ever_dirty, own, frozenset({earlier}), made=made)
        made = frozenset(each for held, each in self._marks.made if kind == "state" and held == name)
        scales = self._scaled.get(name, FREE) if kind == "state" else FREE
        if kind == "batch" or (kind == "state" and not name.startswith(_TAKEN)):
            return _Value(dirty=True, made=made, scales=scales)
        if kind == "state":
            key = _Stranger(self._strange[name]) if name in self._strange else name
            terms: Mapping[object, float] | None = None if name in self._marks.bent else {key: 1.0}
            scales = scale(name, 0) if name in self._scales else scales
            terms, names = self._added.get(name, (terms, frozenset()))
            return _Value(name in self._marks.dirty, terms, names | {name}, made=made, scales=scales)
        return _Value()

    def _take(self, access: Access) -> None:
        if access.is_view and not access.written:
            if access.operator == _OTHER_TYPE:  # bits of a number are no number
                region = self._regions[access.inputs[0].region]
                region.value = replace(region.value, terms=None)
            return
        targets = [*access.results, *(access.inputs[slot] for slot in access.written)]
        places = [*access.call["results"][: len(access.results)], *(access.call["sources"][i] for i in access.written)]
        inputs = [
            self._read(spot, place, (access.number, slot))
            for slot, (spot, place) in enumerate(zip(access.inputs, access.call["sources"], strict=True))
        ]
        if access.number in self._bound:
            scales = names_in(frozenset().union(*(value.scales for value in inputs)))
            self._taken = self._taken.union(*(value.made for value in inputs), (Made(each, _SCALED) for each in scales))
        if access.operator == ITEM or access.number in self._bound:
            self._elsewhere.update(*(value.numbers for value in inputs))
        for part in parts_of(access):
            if part.name in _CLAMPS:  # bounds close together are a number to write, and no share
                self._elsewhere.update(self._numbers_of[access.number])
            made = self._made(part, access, inputs)
            for output in part.outputs:
                self._store(access, targets[output], places[output], made, is_new=output < len(access.results))

    def _read(self, spot: Spot, place: Mapping[str, Any], where: object) -> _Value:
        """What lies in a place; element by element as in its region only where it is all of it, row by row."""
        value = self._regions[spot.region].value
        if not _is_all(spot):
            self._elsewhere |= value.numbers
        number = value.terms is not None and set(value.terms) <= {None}
        if number or (_is_all(spot) and is_dense(place)):
            return value
        if value.terms is None:
            return value.opaque(where)
        seen = _digest((spot.start, place["shape"], place["stride"]), [value.terms])
        moved = value.opaque("part:" + seen if not seen.startswith(_HERE) else seen)
        return moved if moved.terms or not value.has_results else replace(moved, terms={_Result(seen): 1.0})

    def _store(self, access: Access, spot: Spot, place: Mapping[str, Any], made: _Value, *, is_new: bool) -> None:
        region, source = self._regions[spot.region], self._memory.regions[spot.region].source
        old, where = region.value, (access.number, source)
        self._touched.add(spot.region)
        if access.number in self._bound:
            name = source.removeprefix("state:")
            if not name.startswith("weight/"):
                region.value = replace(made, dirty=True, terms=None, scales=FREE)
            else:  # an update makes of an average what the next one is made of
                terms: Mapping[object, float] | None = {where: 1.0} if old.is_average else None
                region.value = _Value(old.dirty, terms, old.names | {name}, numbers=old.numbers)
            return
        whole = is_new or _is_all(spot)
        aligned = is_dense(place)
        if not whole:
            self._elsewhere |= made.numbers
            clamped = old.clamped or made.clamped
            both = old.is_average and made.is_average and not clamped
            dirty, names = old.dirty or made.dirty, old.names | made.names
            numbers = old.numbers | made.numbers
            terms = _one(where, (old, made)) if both else None
            graded, scales = old.graded or made.graded, old.scales | made.scales
            made = _Value(
                dirty, terms, names, clamped, True, numbers, old.made | made.made, graded, made.maker, scales=scales
            )
        elif not aligned:
            made = made.opaque(where)
        name = self._ends.get(spot.region, "")
        is_free = bool(name) and name.removeprefix("weight/") not in self._governed
        if is_free and made.power < 2 and not made.is_average and made.names & self._moving:
            made = replace(made, made=made.made | {Made(name, made.maker or access.operator, made.dirty, made.graded)})
        if name in self._scales or source.removeprefix("state:") in self._scales:
            written = name if name in self._scales else source.removeprefix("state:")
            self._rescaled[written] = access.number + 1
            made = replace(made, scales=scale(written, access.number + 1))
        region.value = made
        region.operators.add(base_name(access.operator))
        region.last = access.operator

    def _made(self, part: Part, access: Access, inputs: Sequence[_Value]) -> _Value:
        """What an operator makes of its inputs."""
        read = [inputs[slot] for slot in part.read]
        if part.name.startswith("native_batch_norm") and (part.others.get("training") or part.others.get("train")):
            kept = {slot for each in ("running_mean", "running_var") for slot in part.slots.get(each, ())}
            read = [replace(inputs[slot], made=frozenset()) if slot in kept else inputs[slot] for slot in part.read]
        if part.name in {"copy", "fill"}:
            read = [inputs[slot] for slot in part.slots.get("src" if part.name == "copy" else "value", ())]
        if part.name in {"zero", "zeros_like", "empty_like", "ones_like", "full_like", "new_zeros", "new_empty"}:
            read = []
        dirty = any(value.dirty for value in read)
        names = frozenset().union(*(value.names for value in read))
        sizes = {access.inputs[slot].elements for slot in part.read if not _is_number(inputs[slot])}
        targets = [*access.results, *(access.inputs[slot] for slot in access.written)]
        sizes |= {targets[output].elements for output in part.outputs} if sizes else set()
        types = {place["dtype"] for place in (*access.call["sources"], *access.call["results"])}
        terms = self._terms(part, inputs, access) if len(sizes) < 2 and types <= _FLOATS else None
        clamped = part.name in _CLAMPS or any(value.clamped for value in read)
        numbers = frozenset(self._numbers_of[access.number]).union(*(value.numbers for value in read))
        cut = any(value.cut for value in read)
        if part.name in _JOINS and types <= _FLOATS and all(value.is_average for value in read):
            self._elsewhere |= numbers
            terms, cut = _one((access.number, part.outputs), read), True
        if terms is None and not dirty:
            terms = self._result(part, inputs, access)
        made = {each for value in read for each in value.made}
        numbered = {slot for slot in part.read if access.call["sources"][slot]["dtype"] in _FLOATS}
        scales = combined(part, [value.scales for value in inputs], numbered)
        if not read or part.name in {"copy", "fill"}:
            scales = read[0].scales if read else ZERO if terms == {None: 0.0} or "empty" in part.name else FREE
        maker = read[0].maker if part.name in _KEEPING and read else access.operator
        graded = "_backward" in part.name or any(value.graded for value in read)
        power = _power(part.name, read)
        value = _Value(dirty, terms, names, clamped, cut, numbers, frozenset(made), graded, maker, power, scales)
        return replace(value, made=frozenset()) if value.is_average else value

    def _result(self, part: Part, inputs: Sequence[_Value], access: Access) -> Mapping[object, float] | None:
        """What a product makes of known sums, turned where these are, under a name that tells it from any other."""
        read = [inputs[slot].terms for slot in part.read]
        if part.name not in _PRODUCTS or None in read:
            return None
        others = {name: self._number(part, name) for name in part.others}
        places = [access.call["sources"][slot] for slot in part.read]
        how = part.name, sorted(others.items()), [(place["dtype"], place["shape"]) for place in places]
        taken, by = [], 1.0
        for terms in read:
            (name, factor), *more = (terms or {None: 1.0}).items()
            is_turned = name is not None and not more and factor == -1.0  # other factors would round
            taken.append({name: 1.0} if is_turned else terms or {})
            by = -by if is_turned else by
        return {_Result(_digest(how, taken)): by}

    def _terms(self, part: Part, inputs: Sequence[_Value], access: Access) -> Mapping[object, float] | None:
        def of(name: str) -> Mapping[object, float] | None:
            slots = part.slots.get(name)
            if slots is not None:
                return inputs[slots[0]].terms if len(slots) == 1 else None
            number = self._number(part, name)
            return None if number is None else {None: number}

        def factor(name: str) -> float | None:
            terms = of(name)
            return terms.get(None, 0.0) if terms is not None and set(terms) <= {None} else None

        def total(
            one: Mapping[object, float] | None, other: Mapping[object, float] | None, by: float | None
        ) -> Mapping[object, float] | None:
            return _sum(one, other, by, drops=self._drops)

        name = part.name
        if name in _KEEPING:
            return of("src" if name == "copy" else "self")
        if name in _CLAMPS:
            bounds = [self._number(part, each) for each in _BOUNDS if part.others.get(each) is not None]
            tensors = [each for each in part.slots if each != "self"]
            own = inputs[part.slots["self"][0]]
            lawful = bounds and None not in bounds and not tensors and own.is_average and not own.cut
            if len(bounds) == 2 and not bounds[0] < bounds[1]:  # type: ignore[operator]
                return None
            return _one((access.number, part.outputs), [own]) if lawful else None
        if name in {"zero", "zeros_like", "new_zeros", "zeros"}:
            return {None: 0.0}
        if name == "ones_like":
            return {None: 1.0}
        if name in {"fill", "full_like", "full"}:
            return of("value" if name == "fill" else "fill_value")
        if name in {"add", "sub"}:
            other = next((each for each in ("other", "scalar", "scalars") if of(each) is not None), "other")
            scale = self._number(part, "alpha", 1.0)
            return total(of("self"), of(other), None if scale is None else scale if name == "add" else -scale)
        if name == "rsub":
            scale = self._number(part, "alpha", 1.0)
            one, other_terms = of("self"), of("other")
            return None if scale is None else total(other_terms, one, -scale)
        if name == "neg":
            return _scaled(of("self"), -1.0)
        if name in {"mul", "div"}:
            others = [each for each in ("other", "scalar", "scalars") if each in part.slots or each in part.others]
            for mine, theirs in (("self", others), *((each, ["self"]) for each in others)):
                by = next((found for each in theirs if (found := factor(each)) is not None), None)
                if by is not None and (name == "mul" or mine == "self"):
                    return _part(of(mine), by if name == "mul" else 1 / by if by else None)
            return None
        if name == "lerp":
            by = factor("weight")
            end = of("end") if "end" in part.slots else of("tensors1")
            return None if by is None else total(_part(of("self"), 1 - by), end, by)
        return None

    def _number(self, part: Part, name: str, default: float | None = None) -> float | None:
        value = part.others.get(name, default)
        if isinstance(value, list):
            value = value[part.outputs[0]] if part.outputs[0] < len(value) else None
        if isinstance(value, dict) and set(value) == {"$scalar"}:
            return self._scalars[value["$scalar"]]
        return float(value) if isinstance(value, int | float) else None


def _power(name: str, read: Sequence[_Value]) -> int:
    """How far a value is on the way to a spectral norm's unit vectors (Miyato et al. 2018, algorithm 1)."""
    if name == "mv":
        return int(read[0].is_average)
    if name == "div":
        return 2 if len(read) == 2 and all(value.power == 1 for value in read) else 0
    return read[0].power if name in _POWERS and len(read) == 1 else 0


def _is_all(spot: Spot) -> bool:
    return spot.whole and not spot.start


def _digest(how: object, of: Sequence[Mapping[object, float]]) -> str:
    """A name for what is made of known sums, which begins with ``here:`` where one program alone knows them."""
    text = repr((how, [sorted(map(repr, terms.items())) for terms in of]))
    lasts = all(
        each is None or (isinstance(each, str) and not each.startswith(_HERE)) for terms in of for each in terms
    )
    return ("" if lasts else _HERE) + sha256(text.encode()).hexdigest()


def _bytes_digest(value: Tensor) -> str:
    """A digest of a tensor's type and numbers."""
    numbers = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{_VALUES}{value.dtype} {sha256(numbers).hexdigest()}"


def _is_number(value: _Value) -> bool:
    return value.terms is not None and set(value.terms) <= {None}


def _scaled(terms: Mapping[object, float] | None, by: float | None) -> Mapping[object, float] | None:
    return None if terms is None or by is None else _tame({name: factor * by for name, factor in terms.items()})


def _tame(terms: Mapping[object, float]) -> Mapping[object, float] | None:
    """Terms of which none is rounded away next to another and comes back as zero; None for any other."""
    if set(terms) <= {None}:
        return terms
    return terms if None not in terms and all(_LEAST <= abs(factor) <= _MOST for factor in terms.values()) else None


def _sum(
    one: Mapping[object, float] | None,
    other: Mapping[object, float] | None,
    by: float | None,
    *,
    drops: bool = False,
) -> Mapping[object, float] | None:
    scaled = _part(other, by)
    if one is None or scaled is None:
        return None
    if one == {None: 0.0} or scaled == {None: 0.0}:
        return scaled if one == {None: 0.0} else one
    found = {name: one.get(name, 0.0) + scaled.get(name, 0.0) for name in {**one, **scaled}}
    return _tame({each: by for each, by in found.items() if by or not (drops or isinstance(each, _Result))})


def _part(terms: Mapping[object, float] | None, by: float | None) -> Mapping[object, float] | None:
    """Terms times a factor; nothing where that is 0."""
    return {None: 0.0} if terms is not None and by == 0 else _scaled(terms, by)


def _number_of(constant: Any) -> float | None:
    """The one number that all elements of a constant are."""
    if not constant.is_uniform or not constant.elements or constant.tensor().is_complex():
        return None
    return float(constant.tensor().reshape(-1)[0])
