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

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from monitor.declaration.update_calls import NotBound
from monitor.declaration.values import (
    CLAMPS,
    FREE,
    HERE,
    KEEPING,
    SCALED,
    VALUES,
    ZERO,
    Made,
    Result,
    Scales,
    Stranger,
    Taken,
    Terms,
    Value,
    average_of,
    bytes_digest,
    combined,
    is_number,
    later,
    name_of_sums,
    names_in,
    number_of,
    scale,
    terms_of,
)
from monitor.programs.calls import ITEM, base_name, scalar_numbers
from monitor.programs.memory import Access, Memory, Spot, is_dense
from monitor.programs.parts import Part, parts_of, state_of
from monitor.programs.program import Program

__all__ = ["Marks", "Written", "declared_writes", "shares_of"]

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_OTHER_TYPE = "aten.view.dtype"
_TAKEN = ("weight/", "buffer/")
_JOINS, _PRODUCTS = frozenset({"cat", "stack"}), frozenset({"mm", "bmm", "mul"})
_BEFORE, _MIXED = "before:", "mixed:"
_POWERS = KEEPING | {"linalg_vector_norm", "norm", "clamp_min", "clamp", "expand"}


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
        known = {bytes_digest(each.to(dtype)) for each in weights for dtype, size in forms if size == each.numel()}
        strange = {(name, digest) for name, value in held.items() if (digest := bytes_digest(value)) not in known}
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
class Written:
    """A declared write: the tensors of the state that it takes, and its operators, without overloads."""

    sources: frozenset[str]
    operators: frozenset[str]


@dataclass(slots=True)
class _Region:
    value: Value
    operators: set[str] = field(default_factory=set)  # that wrote it, but for updates
    last: str = ""
    pieces: dict[object, Scales] = field(default_factory=dict)
    """Scales of what was last written in each place within it, and under None of the whole before."""

    def with_piece(self, spot: Spot, place: Mapping[str, Any], scales: Scales) -> Scales:
        """Scales of the whole once a place within it was written, where nothing of that place stays."""
        self.pieces.setdefault(None, self.value.scales)
        self.pieces[spot.start, str(place["dtype"]), tuple(place["shape"]), tuple(place["stride"])] = scales
        return ZERO.union(*self.pieces.values())


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
        spots = self._memory.commit
        ends = {
            name: self._read(spot, self._program.commit[name] or {}, ("end", name))
            for name, spot in spots.items()
            if spot is not None
        }
        held = {name: value for name, value in ends.items() if name.startswith(_TAKEN)}
        left = {name: later(each.scales, self._rescaled) for name, each in ends.items() if name not in self._scales}
        left |= {name: ZERO for name, spot in spots.items() if spot is None and name.startswith("gradient/")}
        changed = {name for name, spot in spots.items() if spot is None or self._is_changed(name, spot)}
        sums = {name: self._sums(name, value, changed) for name, value in held.items()}
        now = Marks(
            dirty=frozenset(name for name, value in held.items() if value.dirty),
            bent=frozenset(name for name, value in held.items() if self._is_bent(name, value)),
            moved=frozenset(name for name, value in held.items() if value.names & self._moving),
            made=frozenset((name, each) for name, value in ends.items() for each in value.made),
            added=frozenset((name, *found) for name, found in sums.items() if found is not None),
            strange=frozenset((name, _kept(name, value)) for name, value in held.items() if self._is_strange(value)),
            scales=frozenset((name, scales) for name, scales in left.items() if scales != FREE),
        )
        weights = {name for name in held if name.startswith("weight/")} - {f"weight/{name}" for name in unknown}
        written = {name: self._written(name, value) for name, value in held.items() if name in weights}
        return self._marks.then(now), {name: each for name, each in written.items() if each is not None}, self._taken

    def _is_bent(self, name: str, value: Value) -> bool:
        return not value.is_average or (value.clamped and name.removeprefix("weight/") not in self._governed)

    def _is_strange(self, value: Value) -> bool:
        return value.is_strange or not (value.is_average or value.dirty or value.names & self._moving)

    def _written(self, name: str, value: Value) -> Written | None:
        """The declared write of a weight, if there was one; NotBound where what it holds is of none."""
        spot = self._memory.commit[name]
        assert spot is not None
        region = self._regions[spot.region]
        if self._memory.regions[spot.region].source == f"state:{name}" and not region.operators:
            return None
        if value.dirty:
            cause = "from a gradient, the batch or the optimizer's state"
        elif name.removeprefix("weight/") in self._governed and (value.is_strange or not value.is_average):
            cause = "and not by a clamp of the whole between numbers or an average of weights"
        else:
            return Written(value.names, frozenset(region.operators))
        raise NotBound(f"{region.last or 'the step'} writes {name!a} outside the optimizer's updates, {cause}")

    def _is_changed(self, name: str, spot: Spot) -> bool:
        return spot.region in self._touched or self._memory.regions[spot.region].source != f"state:{name}"

    def _sums(
        self, name: str, value: Value, changed: set[str]
    ) -> tuple[frozenset[tuple[object, float]], frozenset[str]] | None:
        """What a tensor is the sum of, where a later write may find the same of the state and take it off again."""
        terms = {_BEFORE + name if each == name else each: factor for each, factor in (value.terms or {}).items()}
        added = [each for each in terms if isinstance(each, Result)]
        others = [str(each) for each in terms if each not in added]
        lasts = len(others) == 1 and (others[0] in (_BEFORE + name, _MIXED + name) or others[0].startswith(VALUES))
        lasts = lasts and bool(added) and not any(each.startswith(HERE) for each in added)
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

    def _start(self, source: str) -> Value:
        kind, _, name = source.partition(":")
        if kind == "constant":
            number = number_of(self._program.constants[int(name)])
            return Value(terms=None if number is None else {None: number}, scales=FREE if number != 0 else ZERO)
        if (earlier := state_of(source)) is not None:
            own: Terms | None = {("earlier", earlier): 1.0}
            own = None if earlier in self._marks.ever_bent else own
            made = frozenset(each for name, each in self._marks.ever_made if name == earlier)
            self._moving |= {earlier} & self._marks.ever_moved
            return Value(earlier in self._marks.ever_dirty, own, frozenset({earlier}), made=made)
        made = frozenset(each for held, each in self._marks.made if kind == "state" and held == name)
        scales = self._scaled.get(name, FREE) if kind == "state" else FREE
        if kind == "batch" or (kind == "state" and not name.startswith(_TAKEN)):
            return Value(dirty=True, made=made, scales=scales)
        if kind == "state":
            key = Stranger(self._strange[name]) if name in self._strange else name
            terms: Terms | None = None if name in self._marks.bent else {key: 1.0}
            scales = scale(name, 0) if name in self._scales else scales
            terms, names = self._added.get(name, (terms, frozenset()))
            return Value(name in self._marks.dirty, terms, names | {name}, made=made, scales=scales)
        return Value()

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
            self._taken = self._taken.union(*(value.made for value in inputs), (Made(each, SCALED) for each in scales))
        if access.operator == ITEM or access.number in self._bound:
            self._elsewhere.update(*(value.numbers for value in inputs))
        for part in parts_of(access):
            if part.name in CLAMPS:  # bounds close together are a number to write, and no share
                self._elsewhere.update(self._numbers_of[access.number])
            made = self._made(part, access, inputs)
            for output in part.outputs:
                self._store(access, targets[output], places[output], made, is_new=output < len(access.results))

    def _read(self, spot: Spot, place: Mapping[str, Any], where: object) -> Value:
        """What lies in a place; element by element as in its region only where it is all of it, row by row."""
        value = self._regions[spot.region].value
        if not _is_all(spot):
            self._elsewhere |= value.numbers
        number = value.terms is not None and set(value.terms) <= {None}
        if number or (_is_all(spot) and is_dense(place)):
            return value
        if value.terms is None:
            return value.opaque(where)
        seen = name_of_sums((spot.start, place["shape"], place["stride"]), [value.terms])
        moved = value.opaque("part:" + seen if not seen.startswith(HERE) else seen)
        return moved if moved.terms or not value.has_results else replace(moved, terms={Result(seen): 1.0})

    def _store(self, access: Access, spot: Spot, place: Mapping[str, Any], made: Value, *, is_new: bool) -> None:
        region, source = self._regions[spot.region], self._memory.regions[spot.region].source
        old, where = region.value, (access.number, source)
        self._touched.add(spot.region)
        whole = is_new or _is_all(spot)
        scales = made.scales if whole else region.with_piece(spot, place, made.scales)
        if whole or access.number in self._bound:
            region.pieces.clear()
        if access.number in self._bound:
            name = source.removeprefix("state:")
            if not name.startswith("weight/"):
                region.value = replace(made, dirty=True, terms=None, scales=FREE)
            else:  # an update makes of an average what the next one is made of
                terms: Terms | None = {where: 1.0} if old.is_average else None
                region.value = Value(old.dirty, terms, old.names | {name}, numbers=old.numbers)
            return
        aligned = is_dense(place)
        if not whole:
            self._elsewhere |= made.numbers
            clamped = old.clamped or made.clamped
            both = old.is_average and made.is_average and not clamped
            dirty, names = old.dirty or made.dirty, old.names | made.names
            numbers = old.numbers | made.numbers
            terms = average_of(where, (old, made)) if both else None
            graded = old.graded or made.graded
            made = Value(
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

    def _made(self, part: Part, access: Access, inputs: Sequence[Value]) -> Value:
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
        sizes = {access.inputs[slot].elements for slot in part.read if not is_number(inputs[slot])}
        targets = [*access.results, *(access.inputs[slot] for slot in access.written)]
        sizes |= {targets[output].elements for output in part.outputs} if sizes else set()
        types = {place["dtype"] for place in (*access.call["sources"], *access.call["results"])}
        taken = Taken(part, inputs, self._scalars, access.number, self._drops)
        terms = terms_of(taken) if len(sizes) < 2 and types <= _FLOATS else None
        clamped = part.name in CLAMPS or any(value.clamped for value in read)
        numbers = frozenset(self._numbers_of[access.number]).union(*(value.numbers for value in read))
        cut = any(value.cut for value in read)
        if part.name in _JOINS and types <= _FLOATS and all(value.is_average for value in read):
            self._elsewhere |= numbers
            terms, cut = average_of((access.number, part.outputs), read), True
        if terms is None and not dirty:
            terms = _result(taken, access)
        made = {each for value in read for each in value.made}
        numbered = {slot for slot in part.read if access.call["sources"][slot]["dtype"] in _FLOATS}
        scales = combined(part, [value.scales for value in inputs], numbered)
        if not read or part.name in {"copy", "fill"}:
            scales = read[0].scales if read else ZERO if terms == {None: 0.0} or "empty" in part.name else FREE
        maker = read[0].maker if part.name in KEEPING and read else access.operator
        graded = "_backward" in part.name or any(value.graded for value in read)
        power = _power(part.name, read)
        value = Value(dirty, terms, names, clamped, cut, numbers, frozenset(made), graded, maker, power, scales)
        return replace(value, made=frozenset()) if value.is_average else value


def _result(taken: Taken, access: Access) -> Terms | None:
    """What a product makes of known sums, turned where these are, under a name that tells it from any other."""
    part = taken.part
    read = [taken.values[slot].terms for slot in part.read]
    if part.name not in _PRODUCTS or None in read:
        return None
    others = {name: taken.number(name) for name in part.others}
    places = [access.call["sources"][slot] for slot in part.read]
    how = part.name, sorted(others.items()), [(place["dtype"], place["shape"]) for place in places]
    sums, by = list[Terms](), 1.0
    for terms in read:
        (name, factor), *more = (terms or {None: 1.0}).items()
        is_turned = name is not None and not more and factor == -1.0  # other factors would round
        sums.append({name: 1.0} if is_turned else terms or {})
        by = -by if is_turned else by
    return {Result(name_of_sums(how, sums)): by}


def _kept(name: str, value: Value) -> str:
    """The values that a tensor holds, where it is one digest's; else that they are mixed."""
    kept = [str(each) for each in value.terms or ()]
    return kept[0] if len(kept) == 1 and kept[0].startswith(VALUES) else _MIXED + name


def _power(name: str, read: Sequence[Value]) -> int:
    """How far a value is on the way to a spectral norm's unit vectors (Miyato et al. 2018, algorithm 1)."""
    if name == "mv":
        return int(read[0].is_average)
    if name == "div":
        return 2 if len(read) == 2 and all(value.power == 1 for value in read) else 0
    return read[0].power if name in _POWERS and len(read) == 1 else 0


def _is_all(spot: Spot) -> bool:
    return spot.whole and not spot.start
