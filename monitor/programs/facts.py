"""What a program is made of: operators, inputs, constants, and the memory that it needs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firmware_sim.evidence import DTYPE_SIZES
from monitor.programs.calls import base_name
from monitor.programs.flop import compute_of
from monitor.programs.memory import Form, Memory

__all__ = ["Facts", "facts_of", "peak_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A program in numbers.

    Attributes:
        calls: number of operator calls.
        operators: how often it calls each.
        flop: two for each multiply-add of its products, however they are written.
        elementwise: elements that all other operators compute.
        inputs: dtype and shape of each batch tensor.
        constants: dtype and bytes of each constant, and whether its elements are all equal.
        state_bytes: of all tensors that it commits.
        largest: operator, dtype, shape and bytes of the largest tensor that a call makes; None without any.
        peak_bytes: most memory that is alive at once: state, batch, constants, and results until their last use.
        scalars: fractional numbers among its arguments; how many belong to updates of the optimizer.
    """

    calls: int
    operators: Mapping[str, int]
    flop: int
    elementwise: int
    inputs: Mapping[str, Mapping[str, Any]]
    constants: Sequence[Mapping[str, Any]]
    state_bytes: int
    largest: Mapping[str, Any] | None
    peak_bytes: int
    scalars: int
    update_scalars: int

    def to_json(self) -> dict[str, object]:
        """Return JSON-able values."""
        return {name: getattr(self, name) for name in self.__slots__}


def facts_of(program: Form, scalar_calls: Sequence[int]) -> Facts:
    """Look at a program; EvidenceError on memory or shapes that do not fit.

    Args:
        scalar_calls: number of the call that takes each scalar.
    """
    compute = compute_of(program)
    memory = Memory(program)
    largest, sizes = _results(program)
    inside = sum(any(first <= call < last for first, last in program.updates) for call in scalar_calls)
    return Facts(
        calls=len(program.calls),
        operators=dict(Counter(base_name(call["operator"]) for call in program.calls).most_common()),
        flop=compute.flop,
        elementwise=compute.elementwise,
        inputs={name: dict(layout) for name, layout in program.batch.items()},
        constants=[
            {"dtype": each.dtype, "bytes": each.length, "uniform": each.is_uniform} for each in program.constants
        ],
        state_bytes=sum(_bytes(place) for place in program.commit.values() if place is not None),
        largest=largest,
        peak_bytes=_peak(program, memory, sizes),
        scalars=len(program.scalars),
        update_scalars=inside,
    )


def peak_bytes(program: Form) -> int:
    """Most memory that is alive at once, as in ``Facts``; EvidenceError on memory that does not fit."""
    return _peak(program, Memory(program), _results(program)[1])


def _bytes(layout: Mapping[str, Any]) -> int:
    return int(math.prod(layout["shape"])) * DTYPE_SIZES[layout["dtype"]]


def _results(program: Form) -> tuple[dict[str, Any] | None, dict[str, int]]:
    """The largest tensor that a call returns or writes, and the bytes of each by its source."""
    largest: dict[str, Any] | None = None
    sizes = {f"batch:{name}": _bytes(layout) for name, layout in program.batch.items()}
    sizes |= {f"constant:{number}": each.length for number, each in enumerate(program.constants)}
    for number, call in enumerate(program.calls):
        for slot, layout in enumerate(call["results"]):
            size = sizes[f"node:{number}:{slot}"] = _bytes(layout)
            if largest is None or size > largest["bytes"]:
                largest = {
                    "operator": call["operator"],
                    "dtype": layout["dtype"],
                    "shape": layout["shape"],
                    "bytes": size,
                }
    return largest, sizes


def _peak(program: Form, memory: Memory, sizes: Mapping[str, int]) -> int:
    """Most bytes alive at once; a result lives from its call to the last call that reads or writes its memory."""
    last: dict[int, int] = {}
    for access in memory.accesses:
        for spot in (*access.inputs, *access.results):
            last[spot.region] = access.number
    kept = {spot.region for spot in memory.commit.values() if spot is not None}
    alive = sum(_bytes(place) for place in program.commit.values() if place is not None)
    alive += sum(size for source, size in sizes.items() if not source.startswith("node:"))
    peak = alive
    ends: dict[int, int] = {}
    for access in memory.accesses:
        for spot in () if access.is_view else access.results:
            size = sizes[memory.regions[spot.region].source]
            alive += size
            if spot.region not in kept:
                ends[last[spot.region]] = ends.get(last[spot.region], 0) + size
        peak = max(peak, alive)
        alive -= ends.pop(access.number, 0)
    return peak
