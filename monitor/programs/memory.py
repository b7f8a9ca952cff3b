"""Whose memory a program's calls read and write, without any arithmetic.

A *region* is one storage: a tensor of the state, of the batch, a constant, or what a call made. Views lie in the region
of what they view. A recorder names the last writer of the memory that a call reads; here it is traced to its region.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from firmware_sim.errors import EvidenceError
from monitor.programs.calls import is_view, operator_of, written_slots
from monitor.programs.trace import in_numbers, reach

__all__ = ["Access", "Form", "Memory", "Region", "Spot", "is_dense"]

_MOST_RUNS = 1024
_MISFITS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class _Constant(Protocol):
    @property
    def dtype(self) -> str: ...

    @property
    def elements(self) -> int: ...

    @property
    def length(self) -> int: ...

    @property
    def is_uniform(self) -> bool: ...

    @property
    def unit(self) -> bytes | None: ...


class Form(Protocol):
    """A program, as ``monitor.programs.program`` holds it."""

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]: ...

    @property
    def scalars(self) -> Sequence[str]: ...

    @property
    def batch(self) -> Mapping[str, Mapping[str, Any]]: ...

    @property
    def constants(self) -> Sequence[_Constant]: ...

    @property
    def commit(self) -> Mapping[str, Mapping[str, Any] | None]: ...

    @property
    def updates(self) -> Sequence[tuple[int, int]]: ...

    @property
    def loss(self) -> Mapping[str, Any] | None: ...


@dataclass(frozen=True, slots=True)
class Region:
    """One storage: the source that it began as, and its elements; None where nothing says how many.

    Elements are real numbers throughout; a complex number is two.
    """

    source: str
    elements: int | None


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a tensor lies: its region, its first element there, how many it has, and whether that is the whole.

    Attributes:
        runs: stretches of the region's elements that it covers, from the first to the one after the last; None where
            it is the whole, or they are too many.
    """

    region: int
    start: int
    elements: int
    whole: bool
    runs: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """Reads, writes and results of one call.

    Attributes:
        operator: full name of the overload.
        call: the call itself.
        inputs: where each tensor input lies.
        written: which inputs it writes.
        results: for each returned tensor its elements, and its region unless it is a view.
    """

    number: int
    operator: str
    call: Mapping[str, Any]
    inputs: tuple[Spot, ...]
    written: tuple[int, ...]
    results: tuple[Spot, ...]
    is_view: bool


class Memory:
    """All regions of a program, and the accesses of its calls in order.

    Args:
        program: the step.
        state: shape in real numbers (``in_numbers``) of each tensor of the declared state, under ``kind/name``; by
            default what the program commits.

    Raises:
        EvidenceError: a call names a view as if it were separate memory, or reaches beyond a tensor's memory.
    """

    def __init__(self, program: Form, state: Mapping[str, Sequence[int]] | None = None) -> None:
        self.regions: list[Region] = []
        self._spots: dict[str, Spot] = {}
        self._sizes = {
            name: math.prod(in_numbers(place)["shape"]) for name, place in program.commit.items() if place is not None
        } | {name: math.prod(shape) for name, shape in (state or {}).items()}
        for name, layout in program.batch.items():
            self._add(f"batch:{name}", math.prod(in_numbers(layout)["shape"]))
        for number, constant in enumerate(program.constants):
            shape = in_numbers({"dtype": constant.dtype, "shape": [constant.elements]})["shape"]
            self._add(f"constant:{number}", math.prod(shape))
        try:
            self.accesses = tuple(self._access(number, call) for number, call in enumerate(program.calls))
            self.commit = {name: None if place is None else self.spot(place) for name, place in program.commit.items()}
        except _MISFITS:
            raise EvidenceError("a call of the program has arguments that its operator does not take") from None

    def spot(self, place: Mapping[str, Any]) -> Spot:
        """Where a place lies; EvidenceError if it is not inside one region."""
        source = place["source"]
        base = self._spots.get(source)
        if base is None:
            if not source.startswith("state:"):
                raise EvidenceError("the program names a view as if it were separate memory")
            base = self._add(source, self._sizes.get(source.removeprefix("state:")))
        place, size = in_numbers(place), self.regions[base.region].elements
        start, elements = base.start + place["offset"], math.prod(place["shape"])
        if start < 0 or (size is not None and start + reach(place["shape"], place["stride"]) > size):
            raise EvidenceError(f"the program reaches beyond the memory of {source!a}")
        if elements == size and not _overlaps(place):
            return Spot(base.region, start, elements, True)
        return Spot(base.region, start, elements, False, _runs(place, start))

    def _add(self, source: str, elements: int | None) -> Spot:
        self.regions.append(Region(source, elements))
        spot = self._spots[source] = Spot(len(self.regions) - 1, 0, elements or 0, True)
        return spot

    def _access(self, number: int, call: Mapping[str, Any]) -> Access:
        func = operator_of(call["operator"])
        inputs = tuple(self.spot(place) for place in call["sources"])
        written = tuple(written_slots(call))
        returned = call["results"][: len(call["results"]) - len(written)]
        if len(returned) + len(written) != len(call["results"]):
            raise EvidenceError(f"call {number} ({func}) has fewer results than it writes")
        views = is_view(func) and bool(inputs)
        results = []
        for slot, layout in enumerate(map(in_numbers, returned)):
            elements = math.prod(layout["shape"])
            if views:
                results.append(Spot(inputs[0].region, 0, elements, False))
            else:
                results.append(self._add(f"node:{number}:{slot}", reach(layout["shape"], layout["stride"])))
        for slot, position in enumerate(written, start=len(returned)):
            self._spots[f"node:{number}:{slot}"] = inputs[position]
        return Access(number, call["operator"], call, inputs, written, tuple(results), views)


def _runs(place: Mapping[str, Any], start: int) -> tuple[tuple[int, int], ...] | None:
    """Stretches of memory that a tensor covers, in order; None where they are many."""
    if not all(place["shape"]):
        return ()
    length = 1
    outer: list[tuple[int, int]] = []
    for step, size in sorted(zip(place["stride"], place["shape"], strict=True)):
        if size == 1 or step == 0:
            continue
        if step <= length and not outer:
            length += (size - 1) * step
        else:
            outer.append((step, size))
    if math.prod(size for _, size in outer) > _MOST_RUNS:
        return None
    starts = [start]
    for step, size in outer:
        starts = [first + number * step for number in range(size) for first in starts]
    return tuple((first, first + length) for first in sorted(starts))


def _overlaps(place: Mapping[str, Any]) -> bool:
    """Tell whether some elements of a place may be one in memory: sorted by stride, one does not step over the last."""
    end = 1
    for step, size in sorted(zip(place["stride"], place["shape"], strict=True)):
        if size > 1:
            if step < end:
                return True
            end = step * (size - 1) + end
    return False


def is_dense(place: Mapping[str, Any]) -> bool:
    """Whether the elements of a place lie in memory row by row."""
    size = math.prod(place["shape"])
    if not size:
        return True
    for count, step in zip(place["shape"], place["stride"], strict=True):
        size //= count
        if count > 1 and step != size:
            return False
    return True
