"""What may reach each tensor that a program commits, by the rules that ``monitor.programs.paths`` states.

What a region of a program's memory holds, piece by piece.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from firmware_sim.errors import EvidenceError
from monitor.programs.calls import base_name
from monitor.programs.memory import Access, Form, Memory, Spot
from monitor.programs.moves import MOVES, SHAPE_ONLY, ZEROS
from monitor.programs.parts import Part, parts_of, state_of
from monitor.programs.zero import is_zero, visible

__all__ = ["FOUND_INF", "GRADIENT", "LOSS", "OPTIMIZER", "SCALER", "Content", "Flow", "flows", "seeds"]


Value = TypeVar("Value")

_MOST_PIECES = 4096


class Content(Generic[Value]):
    """Values of the elements of a region, so many or without a known end; one value at first."""

    def __init__(self, value: Value, size: int | None = None) -> None:
        self._size = size
        self._starts: list[int] = [0]
        self._values: list[Value] = [value]

    def read(self, runs: Sequence[tuple[int, int]] | None) -> Iterator[Value]:
        """The values that stretches of elements hold, None standing for the whole."""
        if runs is None or len(self._values) == 1:
            yield from self._values
            return
        for first, last in runs:
            at = bisect_right(self._starts, first) - 1
            while at < len(self._starts) and self._starts[at] < last:
                yield self._values[at]
                at += 1

    def write(self, runs: Sequence[tuple[int, int]] | None, value: Value) -> None:
        """Give all elements of these stretches a value; None means the whole."""
        if runs is None:
            self._starts, self._values = [0], [value]
            return
        for first, last in runs:
            begin, end = self._cut(first), self._cut(last)
            self._starts[begin:end], self._values[begin:end] = [first], [value]

    def mix(self, change: Callable[[Value], Value]) -> None:
        """Change the value of every piece."""
        self._values = [change(value) for value in self._values]

    @property
    def is_full(self) -> bool:
        """Whether it has as many pieces as it may have."""
        return len(self._values) >= _MOST_PIECES

    def _cut(self, at: int) -> int:
        """Have a piece begin at an element; its number, the one after the last at the end."""
        if at == self._size:
            return len(self._starts)
        found = bisect_right(self._starts, at) - 1
        if self._starts[found] == at:
            return found
        self._starts.insert(found + 1, at)
        self._values.insert(found + 1, self._values[found])
        return found + 1


_BATCH_NORMS = frozenset({"native_batch_norm", "native_batch_norm_backward"})
_STATISTICS = ("running_mean", "running_var")
_COMMITTED, _READ = "commit", "a loss that is made of it"
_MOVING = MOVES | {"mean"}
"""What may be done with running statistics that stay running statistics: an instance norm averages them."""
_AVERAGING = frozenset({"add", "sub", "rsub", "mul", "div", "lerp", "where"})
"""The same, among running statistics and numbers alone."""
SCALER, SCALERS = "_amp_update_scale", 8
"""A scaler's operator, and of how many in a program each is taken to learn no more than a bit."""
FOUND_INF = "scaler:found_inf"
"""The source that represents what scalers were given."""
OPTIMIZER, GRADIENT = "optimizer/", "gradient/"
_COPYING = frozenset({"copy", "_to_copy", "clone"})
_MISFITS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Flow:
    """Influences on one tensor of the new state.

    Attributes:
        direct: each source (batch, constant, or tensor of the old state) that reaches it with all gradients zero, with
            the operator and the call that brings it.
        statistics: the same for sources that come as a batch norm's running statistics.
        graded: the same for sources that come through a gradient which must not end here.
        used: buffers that something else than batch norms, copies and averages computes with on the way.
        read: buffers that have to do with it in any way.
        elements: how many it has; None where unknown.
        slope: what brings it a gradient that must not end here, or must not be there; empty where nothing does.
        zero: it is zero with all gradients zero.
    """

    direct: Mapping[str, tuple[str, int | None]]
    statistics: Mapping[str, tuple[str, int | None]]
    graded: Mapping[str, tuple[str, int | None]]
    used: frozenset[str]
    read: frozenset[str]
    elements: int | None
    slope: str
    zero: bool = False

    @property
    def sources(self) -> Collection[str]:
        """All that reach it with all gradients zero."""
        return self.direct.keys() | self.statistics.keys()


LOSS = "loss"
"""The name, among the tensors of the new state, of the loss that a step commits to."""


@dataclass(frozen=True, slots=True)
class _Value:
    """What elements may depend on, as sets of sources (bits): directly, as statistics, and by any way at all.

    Attributes:
        graded: a gradient has to do with it.
        held: the same, where an update of the optimizer has put it into the optimizer's state.
        kept: gradients of steps before have to do with it, as sources, past all updates.
    """

    direct: int = 0
    statistics: int = 0
    used: int = 0
    zero: bool = False
    graded: bool = False
    held: bool = False
    kept: int = 0

    @property
    def all(self) -> int:
        return self.direct | self.statistics | self.used


def _merged(values: Iterable[_Value]) -> _Value:
    """What may be any of these."""
    found: _Value | None = None
    for value in values:
        if found is None or found is value:
            found = value
            continue
        found = _Value(
            found.direct | value.direct,
            found.statistics | value.statistics,
            found.used | value.used,
            found.zero and value.zero,
            found.graded or value.graded,
            found.held or value.held,
            found.kept | value.kept,
        )
    return found or _Value(zero=True)


def flows(
    program: Form,
    state: Mapping[str, Sequence[int]] | None = None,
    *,
    is_free: bool = False,
    zero: frozenset[str] = frozenset(),
) -> dict[str, Flow]:
    """Sources that reach each tensor which a program commits.

    Args:
        state: shapes of the declared state, under ``kind/name``.
        is_free: steps may give the program's numbers other values, so that none of them counts as zero.
        zero: gradients of the state that are zero as the program begins, if all gradients are.

    Raises:
        EvidenceError: a call names memory that is not its own, or has other arguments than its operator.
    """
    return _analysed(program, state, is_free, zero).flows()


def seeds(program: Form, state: Mapping[str, Sequence[int]] | None = None) -> frozenset[int]:
    """The calls that make the ones with which backward passes begin; EvidenceError as ``flows``.

    Those that need not be zero for all gradients to vanish are left out: ones like a weight, from which nothing but
    that weight's own gradient comes, and like what vanishes with the others, whose derivatives vanish too.
    """
    found = _analysed(program, state, False)
    return frozenset(found.seeds.keys() - found.idle)


def _analysed(
    program: Form, state: Mapping[str, Sequence[int]] | None, is_free: bool, zero: frozenset[str] = frozenset()
) -> _Analysis:
    try:
        memory = Memory(program, state)
        found = _Analysis(program, memory, is_free, zero)
        plain = found.no_seeds()
        return _Analysis(program, memory, is_free, zero, plain) if plain else found
    except _MISFITS as error:
        if isinstance(error, EvidenceError):
            raise
        raise EvidenceError("a call of the program has arguments that its operator does not take") from None


def _copies(memory: Memory) -> set[str]:
    """Buffers of the state, as sources, that a program leaves as copies of whole weights."""
    regions = memory.regions
    weights = {number for number, region in enumerate(regions) if region.source.startswith("state:weight/")}
    holding = set(weights)
    for access in memory.accesses:
        targets = [*access.results, *(access.inputs[slot] for slot in access.written)]
        for part in parts_of(access) if not access.is_view else ():
            slots = part.slots.get("src" if part.name == "copy" else "self", ()) if part.name in _COPYING else ()
            taken = [access.inputs[slot] for slot in slots]
            for spot in (targets[output] for output in part.outputs):
                whole = [each for each in taken if each.whole and spot.whole and each.elements == spot.elements]
                if any(each.region in holding for each in whole):
                    holding.add(spot.region)
                else:
                    holding -= {spot.region} - weights
    return {
        f"state:{name}"
        for name, spot in memory.commit.items()
        if name.startswith("buffer/") and spot is not None and spot.whole and spot.region in holding
    }


class _Analysis:
    """One pass over a program's calls.

    Args:
        zero: gradients of the state that are zero.
        plain: calls of ``ones_like`` that are no seeds.

    Attributes:
        seeds: calls of ``ones_like`` that are.
        idle: those of them that no gradient needs to be zero.
        trained: gradients of steps before, as sources, of which a loss is made.
    """

    def __init__(
        self, program: Form, memory: Memory, is_free: bool, zero: frozenset[str], plain: Collection[int] = ()
    ) -> None:
        self._program, self._memory, self._zero = program, memory, zero
        self._is_free, self._plain = is_free, plain
        self._updates = {call for first, last in program.updates for call in range(first, last)}
        self._has_scalers = sum(base_name(call["operator"]) == SCALER for call in program.calls) <= SCALERS
        self._sources: dict[str, int] = {}
        self._weights = self._buffers = self._before_seeds = self.trained = 0
        self.seeds: dict[int, tuple[int, bool]] = {}
        self.idle: set[int] = set()
        kinds: dict[int, set[str]] = {}
        for name, spot in memory.commit.items():
            if spot is not None:
                kinds.setdefault(spot.region, set()).add(name.partition("/")[0])
        self._updated = {region: kinds[region] for region in kinds if kinds[region] <= {"weight", "optimizer"}}
        self._copies = _copies(memory)
        self._contents = [Content(self._start(region.source), region.elements) for region in memory.regions]
        self._calls: list[list[tuple[int, str, int]]] = [[] for _ in memory.regions]
        for access in memory.accesses:
            self._take(access)

    def no_seeds(self) -> set[int]:
        """Those of the seeds with several elements that reach a later loss, or no gradient and no update."""
        ends = 0
        for name, spot in self._memory.commit.items():
            if spot is not None and not name.startswith("buffer/"):
                ends |= _merged(self._at(spot)).all
        return {
            call
            for call, (bit, is_one) in self.seeds.items()
            if not is_one and (self._before_seeds & bit or not ends & bit)
        }

    def flows(self) -> dict[str, Flow]:
        """What reaches each tensor of the new state, and the loss."""
        found = {name: self._flow(name, spot) for name, spot in self._memory.commit.items()}
        if self._program.loss is not None:
            found[LOSS] = self._flow(LOSS, self._memory.spot(self._program.loss))
        return found

    def _start(self, source: str) -> _Value:
        earlier = state_of(source)
        source = source if earlier is None else f"state:{earlier}"
        kind, _, name = source.partition(":")
        if kind == "node":
            return _Value(zero=True)
        if kind == "constant":
            constant = self._program.constants[int(name)]
            if constant.is_uniform:
                return _Value(zero=not any(constant.unit or b""))
        bit = self._bit(source)
        if kind != "state":
            return _Value(direct=bit, used=bit)
        if name.startswith("weight/"):
            self._weights |= bit
        if name.startswith("buffer/"):
            self._buffers |= bit
            if source in self._copies:
                self._weights |= bit
            return _Value(statistics=bit)
        is_slope = name.startswith(GRADIENT)
        kept = bit if is_slope else 0
        if name in self._zero:
            return _Value(used=bit, zero=True, graded=True, kept=kept)
        return _Value(direct=bit, used=bit, graded=is_slope, held=name.startswith(OPTIMIZER), kept=kept)

    def _bit(self, source: str) -> int:
        return self._sources.setdefault(source, 1 << len(self._sources))

    def _at(self, spot: Spot) -> Iterator[_Value]:
        return self._contents[spot.region].read(spot.runs)

    def _take(self, access: Access) -> None:
        if access.is_view:
            return
        targets = [*access.results, *(access.inputs[slot] for slot in access.written)]
        inputs = [_merged(self._at(spot)) for spot in access.inputs]
        for part in parts_of(access):
            if not self._is_free and access.number not in self._updates:
                part = replace(part, others={name: self._number(value) for name, value in part.others.items()})
            values = self._outcome(access, part, inputs)
            if "_backward" in part.name:
                values = {output: replace(value, graded=True) for output, value in values.items()}
            for output in part.outputs:
                value = values.get(output, values[-1])
                self._store(access, targets[output], value, fresh=output < len(access.results))

    def _number(self, argument: Any) -> Any:
        """A fractional number in place of its scalar; any other argument as it is."""
        if isinstance(argument, dict) and set(argument) == {"$scalar"}:
            return float.fromhex(self._program.scalars[argument["$scalar"]])
        return argument

    def _store(self, access: Access, spot: Spot, value: _Value, *, fresh: bool) -> None:
        kinds = self._updated.get(spot.region)
        if kinds is not None and access.number in self._updates:
            held = "weight" not in kinds and (value.graded or value.held)
            value = replace(value, graded=False, held=held, kept=0)
        content = self._contents[spot.region]
        bits = value.direct | value.statistics | (value.used if value.graded or value.held else 0)
        self._calls[spot.region].append((access.number, access.operator, bits))
        if fresh or spot.whole:
            content.write(None, value)
        elif spot.runs is not None and not content.is_full:
            content.write(spot.runs, value)
        else:
            content.mix(lambda old: _merged([old, value]))

    def _outcome(self, access: Access, part: Part, inputs: list[_Value]) -> dict[int, _Value]:
        """Values of a part's outputs by number; -1 means all others."""
        if part.name == "ones_like" and access.number not in self._plain:
            above = inputs[0].all
            if access.inputs[0].elements == 1 or above & self._weights:
                self.trained |= inputs[0].kept
            if above & self._weights:
                bit = self._bit(f"seed:{access.number}")
                is_one = access.inputs[0].elements == 1
                self.seeds[access.number] = bit, is_one
                source = self._memory.regions[access.inputs[0].region].source
                if not is_one and (inputs[0].zero or source.startswith("state:weight/")):
                    self.idle.add(access.number)
                self._before_seeds |= above
                return {-1: _Value(used=bit, zero=True, graded=True)}
            if above & self._buffers and access.inputs[0].elements == 1:
                return {-1: _Value(graded=True)}  # a loss of buffers alone, whose gradients no rule takes as zero
        zeros = [value.zero for value in inputs]
        if part.name in _BATCH_NORMS:
            return self._batch_norm(part, inputs, zeros, len(access.results))
        if part.name == SCALER and self._has_scalers and all(access.inputs[slot].elements == 1 for slot in part.read):
            own = [inputs[slot] for name in ("self", "growth_tracker") for slot in part.slots[name]]
            made = self._joined(own, own, False, False)
            return {-1: replace(made, direct=made.direct | self._bit(FOUND_INF))}
        seen = [inputs[slot] for slot in visible(part, zeros)]
        every = [inputs[slot] for slot in part.read] if part.name not in {"copy", "fill"} else seen
        if part.name in SHAPE_ONLY:
            return {-1: _Value(zero=part.name in ZEROS)}
        keeps = part.name in _MOVING or (
            part.name in _AVERAGING and not any(each.direct or each.graded or each.held for each in every)
        )
        return {number: self._joined(seen, every, keeps, zero) for number, zero in is_zero(part, zeros).items()}

    def _batch_norm(self, part: Part, inputs: list[_Value], zeros: list[bool], returned: int) -> dict[int, _Value]:
        """Running statistics may be read by a batch norm, and written by one in training."""
        mine = [slot for each in _STATISTICS for slot in part.slots.get(each, ())]
        seen = [
            replace(value, statistics=0) if slot in mine else value
            for slot, value in enumerate(inputs)
            if slot in part.read
        ]
        made = self._joined(seen, seen, False, is_zero(part, zeros)[-1])
        values = {-1: made}
        if part.name == "native_batch_norm":
            taken = [value for slot, value in enumerate(inputs) if slot in part.slots["input"]]
            fresh = 0
            for value in taken:
                fresh |= value.direct | value.statistics | (value.used if value.graded else 0)
            for output, slot in enumerate(mine, start=returned):
                old = inputs[slot]
                used = old.used
                for value in taken:
                    used |= value.used | value.statistics
                values[output] = _Value(old.direct, old.statistics | fresh, used, graded=old.graded, held=old.held)
        return values

    @staticmethod
    def _joined(seen: Iterable[_Value], every: Iterable[_Value], keeps: bool, zero: bool) -> _Value:
        direct = statistics = used = kept = 0
        graded = False
        for value in every:
            kept |= value.kept
            used |= value.used if keeps else value.used | value.statistics
            graded = graded or value.graded or value.held
        if not zero:
            for value in seen:
                direct |= value.direct if keeps else value.direct | value.statistics
                statistics |= value.statistics if keeps else 0
        return _Value(direct, statistics, used, zero, graded, kept=kept)

    def _flow(self, name: str, spot: Spot | None) -> Flow:
        if spot is None:
            return Flow({}, {}, {}, frozenset(), frozenset(), 0, "", zero=True)
        value = _merged(self._at(spot))
        kind = name.partition("/")[0]
        is_path = (
            value.graded if kind in {"weight", "optimizer"} else kind != "gradient" and (value.graded or value.held)
        )
        calls = self._calls[spot.region]
        return Flow(
            self._named(value.direct, calls),
            self._named(value.statistics & ~value.direct, calls),
            self._named(value.all & ~value.direct, calls) if is_path else {},
            frozenset(each.removeprefix("state:") for each in self._names(value.used & self._buffers)),
            frozenset(each.removeprefix("state:") for each in self._names(value.all & self._buffers)),
            spot.elements,
            (calls[-1][1] if calls else _COMMITTED) if is_path else _READ if self._is_trained(name) else "",
            value.zero,
        )

    def _is_trained(self, name: str) -> bool:
        """Whether a loss is made of a gradient that the step begins with: what it holds is then none."""
        return name.startswith(GRADIENT) and bool(self._sources.get(f"state:{name}", 0) & self.trained)

    def _named(self, bits: int, calls: Sequence[tuple[int, str, int]]) -> dict[str, tuple[str, int | None]]:
        """Each source with the last call that brings it."""
        found: dict[str, tuple[str, int | None]] = {}
        for name in self._names(bits):
            bit = self._sources[name]
            found[name] = next(
                ((operator, call) for call, operator, brought in reversed(calls) if brought & bit), (_COMMITTED, None)
            )
        return found

    def _names(self, bits: int) -> list[str]:
        return [name for name, bit in self._sources.items() if bits & bit and not name.startswith("seed:")]
