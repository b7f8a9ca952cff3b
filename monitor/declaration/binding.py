"""Binds the numbers of a step's program to the declared optimizer: call by call, on the same tensors.

A program says which of its calls are updates of the optimizer. An update is bound if its last calls are those of the
reference, on the same tensors: the same operators, constants and whole weights, results of the same earlier calls,
one gradient for each weight. Calls before them belong to a closure. A program is bound if all its updates are, if
nothing else in it writes the optimizer's state, and if what else writes weights are declared writes (``writes``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch

from firmware_sim.errors import EvidenceError
from monitor.declaration.reference import Update
from monitor.declaration.statement import Declaration
from monitor.declaration.update_calls import Contradicted, NotBound
from monitor.programs.calls import ITEM, is_view, operator_of, scalar_numbers, written_slots
from monitor.programs.program import Program
from monitor.programs.trace import in_numbers, layout_of

__all__ = ["Binding", "ProgramWrites", "bind", "calls_of"]

_PARTS = {"complex64": "float32", "complex128": "float64"}
"""As what optimizers update complex weights."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Which scalars and constants of a program must equal which of the reference, and the calls of its updates."""

    scalars: Mapping[int, int]
    constants: frozenset[tuple[int, int]]
    calls: frozenset[int]


class ProgramWrites:
    """Writes of a program's calls, and the owner of each source's memory.

    Attributes:
        updates: for each of the program's updates, the weights that it writes, and how.
        touched: for each of them, the weights of which it writes the value or the optimizer's state.
        present: weights for which the optimizer holds state when the step begins.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self._written: list[list[str]] = []  # owners of what each call writes, in the order of its results
        for call in program.calls:
            self._written.append([self.owner(call["sources"][slot]["source"]) for slot in written_slots(call)])
        self.updates = tuple(self._update(first, last) for first, last in program.updates)
        self.touched = tuple(
            frozenset(name for owners in self._written[first:last] for owner in owners if (name := _governs(owner)))
            for first, last in program.updates
        )
        named = {source for source in self._sources() if source.startswith("state:optimizer/")}
        self.present = frozenset(name.removeprefix("state:optimizer/").rpartition("/")[0] for name in named)

    def owner(self, source: str) -> str:
        """The tensor in whose memory a source lies: of state, batch or constants, or one that a call made.

        It is empty where a source is a view that a call returned; a recorder names whose memory that is.
        """
        if not source.startswith("node:"):
            return source
        _, number, slot = source.split(":")
        call, written = self.program.calls[int(number)], self._written[int(number)]
        position = int(slot) - (len(call["results"]) - len(written))
        if position >= 0:
            return written[position]
        return "" if is_view(operator_of(call["operator"])) else source

    def check_elsewhere(self, bound: Collection[int], unknown: Collection[str]) -> None:
        """NotBound if a call outside ``bound`` writes the optimizer's state, or a view hides what it is.

        Of ``unknown`` weights nothing is said.
        """
        if not all(self.owner(source) for source in self._sources()):
            raise NotBound("the program names a view as if it were separate memory")
        for number, owners in enumerate(self._written):
            for owner in owners:
                weight = _governs(owner) if owner.startswith("state:optimizer/") else None
                if number not in bound and weight is not None and weight not in unknown:
                    operator = self.program.calls[number]["operator"]
                    raise NotBound(
                        f"{operator} writes {owner.removeprefix('state:')!a} outside the optimizer's updates"
                    )

    def values_read(self, values: Sequence[str]) -> list[Sequence[str]]:
        """Of the values that a step read, those of each update; EvidenceError unless there is one for each read."""
        reads = [number for number, call in enumerate(self.program.calls) if call["operator"] == ITEM]
        if values and len(values) != len(reads):
            raise EvidenceError(f"the transcript states {len(values)} values for a step that reads {len(reads)}")
        return [values[bisect_left(reads, first) : bisect_left(reads, last)] for first, last in self.program.updates]

    def _update(self, first: int, last: int) -> Update:
        owners = {owner for owners in self._written[first:last] for owner in owners}
        weights = {owner.removeprefix("state:weight/") for owner in owners if owner.startswith("state:weight/")}
        foreach = any(call["operator"].startswith("aten._foreach_") for call in self.program.calls[first:last])
        return Update(frozenset(weights), foreach)

    def _sources(self) -> Iterator[str]:
        for call in self.program.calls:
            yield from (place["source"] for place in call["sources"])
        yield from (place["source"] for place in self.program.commit.values() if place is not None)


def bind(
    writes: ProgramWrites, reference: Program, task: Declaration, unknown: frozenset[str] = frozenset()
) -> Binding:
    """Find the numbers of the program's updates in the reference.

    Args:
        unknown: weights of optimizers whose updates the reference does not have.

    Raises:
        NotBound: the program's updates, its other writes or its new state are not the reference's; Contradicted where
            an update makes other calls.
    """
    return _Binding(writes, reference, task, unknown).bound()


class _Binding:
    def __init__(self, writes: ProgramWrites, reference: Program, task: Declaration, unknown: frozenset[str]) -> None:
        self._writes, self._program, self._reference = writes, writes.program, reference
        self._theirs, self._unknown = ProgramWrites(reference), unknown
        self._layouts = {
            f"state:{entry.kind}/{entry.name}": _whole(entry.dtype, entry.shape)
            for entry in task.state
            if entry.kind != "gradient"
        }
        self._partner: dict[int, int] = {}  # a call of the reference -> the program's
        self._constants: set[tuple[int, int]] = set()

    def bound(self) -> Binding:
        mine, theirs = _scalars_of(self._program), _scalars_of(self._reference)
        found: dict[int, int] = {}
        known = [not touched & self._unknown for touched in self._writes.touched]
        updates = compress(self._program.updates, known)
        for (first, last), (start, stop) in zip(updates, self._reference.updates, strict=True):
            begin = last - (stop - start)
            if begin < first:
                raise Contradicted(
                    f"an update has {last - first} calls, but the declared optimizer makes {stop - start}"
                )
            self._gradients: dict[str, Mapping[str, Any]] = {}
            self._begin = begin
            for offset in range(stop - start):
                self._partner[start + offset] = begin + offset
                self._match(begin + offset, start + offset)
                found.update(zip(mine[begin + offset], theirs[start + offset], strict=True))
        self._writes.check_elsewhere(set(self._partner.values()), self._unknown)
        self._check_commit()
        return Binding(found, frozenset(self._constants), frozenset(self._partner.values()))

    def _match(self, number: int, partner: int) -> None:
        mine, theirs = self._program.calls[number], self._reference.calls[partner]
        if mine["operator"] != theirs["operator"]:
            raise Contradicted(
                f"call {number} of an update is {mine['operator']}, but the declared optimizer calls "
                f"{theirs['operator']}"
            )
        if _plain(mine["arguments"]) != _plain(theirs["arguments"]) or len(mine["sources"]) != len(theirs["sources"]):
            raise Contradicted(
                f"{mine['operator']} (call {number}) does not have the arguments that the declared optimizer gives it"
            )
        for place, other in zip(mine["sources"], theirs["sources"], strict=True):
            if not self._is_same(place, other):
                raise NotBound(
                    f"{mine['operator']} (call {number}) takes {place['source']!a}, but the declared optimizer takes "
                    f"{other['source']!a}"
                )

    def _is_same(self, place: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        """Tell whether a place of the program is what the reference reads in its place."""
        source, wanted = place["source"], other["source"]
        if place["dtype"] != other["dtype"]:
            return False
        kind = wanted.partition(":")[0]
        if wanted.startswith("state:gradient/"):
            weight = self._layouts["state:weight/" + wanted.removeprefix("state:gradient/")]
            mine = _numbers(place)
            made_here = source.startswith("node:") and _number(source) >= self._begin
            is_same = self._gradients.setdefault(wanted, mine) == mine
            return is_same and not made_here and mine["shape"] == _numbers(weight)["shape"]
        owner = self._theirs.owner(wanted)
        if owner.startswith("state:weight/"):  # a declared write may have been the last to write there
            return self._writes.owner(source) == owner and _covers(place, self._layouts.get(owner))
        if kind == "state":
            return source == wanted and _covers(place, self._layouts.get(source))
        if kind == "constant":
            return source.startswith("constant:") and self._is_alike(_number(source), _number(wanted))
        _, call, slot = wanted.split(":")
        number = self._partner[int(call)]
        made = self._program.calls[number]["results"][int(slot)]
        theirs = self._reference.calls[int(call)]["results"][int(slot)]
        # Where the reference has the weight's own shape, the same part of a result is taken; elsewhere all of it.
        alike = made == theirs and {**place, "source": ""} == {**other, "source": ""}
        return source == f"node:{number}:{slot}" and (alike or _covers(place, made))

    def _is_alike(self, mine: int, theirs: int) -> bool:
        one, other = self._program.constants[mine], self._reference.constants[theirs]
        self._constants.add((mine, theirs))
        return (one.dtype, one.elements) == (other.dtype, other.elements)

    def _check_commit(self) -> None:
        """The optimizer's state is what its updates made; of weights ``writes`` tells."""
        for name, place in self._program.commit.items():
            weight = _governs(f"state:{name}")
            if not name.startswith("optimizer/") or place is None or weight in self._unknown:
                continue
            other = self._reference.commit.get(name)
            same = (
                self._is_same(place, other)
                if other is not None
                else place["source"] == f"state:{name}" and _covers(place, self._layouts.get(f"state:{name}"))
            )
            if not same:
                raise NotBound(f"{name!a} of the new state is not what the optimizer's updates computed")


def _governs(owner: str) -> str | None:
    """The weight whose value or optimizer state a tensor is, if it is either."""
    kind, _, name = owner.removeprefix("state:").partition("/")
    if not owner.startswith("state:") or kind not in ("weight", "optimizer"):
        return None
    return name if kind == "weight" else name.rpartition("/")[0]


def calls_of(program: Program) -> list[int]:
    """Number of the call that takes each scalar."""
    return [call for call, numbers in enumerate(_scalars_of(program)) for _ in numbers]


def _scalars_of(program: Program) -> list[list[int]]:
    return [list(scalar_numbers(call["arguments"])) for call in program.calls]


def _number(source: str) -> int:
    return int(source.split(":")[1])


def _plain(value: Any) -> Any:
    """Arguments without the numbers of their scalars."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return (type(value).__name__, value)  # 1, 1.0 and True are three arguments
    if set(value) == {"$scalar"}:
        return {"$scalar": 0}
    return {name: _plain(item) for name, item in value.items()}


def _covers(place: Mapping[str, Any], layout: Mapping[str, Any] | None) -> bool:
    """Tell whether a place is all of what its source is, which may be complex numbers as real ones."""
    if layout is None or place["offset"] != 0:
        return False
    mine, whole = _numbers(place), _numbers(layout)
    return all(mine[key] == whole[key] for key in layout)


def _numbers(layout: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**in_numbers(layout), "dtype": _PARTS.get(layout["dtype"], layout["dtype"])}


def _whole(dtype: str, shape: tuple[int, ...]) -> dict[str, object]:
    return layout_of(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
