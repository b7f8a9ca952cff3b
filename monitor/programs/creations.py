"""When the tensors that an optimizer makes in an update come into their regions: at the calls that make them.

The state that a step begins with lies where the chips hold it. What a step makes anew lies outside that until the step
ends, but for state of an optimizer that the step before left absent: once the call that makes it has run, its region
holds it, and what writes it writes there. So a replay finds in the programs alone what a chip saw in between.
"""

from __future__ import annotations

from collections import Counter

from monitor.programs.calls import operator_of
from monitor.programs.flop import makes
from monitor.programs.memory import Access, Form, Memory, is_dense

__all__ = ["births"]

_LAYOUT = ("dtype", "shape", "stride")


def births(program: Form, memory: Memory) -> dict[int, str]:
    """Calls of the optimizer's updates that make a tensor of its new state, by number, with its name ``optimizer/…``.

    That is a call that returns nothing else, or the first that takes a constant which calls write. The tensor is all of
    its memory, row by row, and nothing reads afterwards what its region held before.

    Raises:
        EvidenceError, LookupError, TypeError, ValueError: a call has other arguments than its operator.
    """
    first: dict[int, int] = {}
    last: dict[str, int] = {}
    written: set[int] = set()
    for access in memory.accesses:
        for each in access.inputs:
            first.setdefault(each.region, access.number)
            last[memory.regions[each.region].source] = access.number
        written |= {access.inputs[slot].region for slot in access.written}
    ends = [*memory.commit.values(), None if program.loss is None else memory.spot(program.loss)]
    last |= {memory.regions[spot.region].source: len(program.calls) for spot in ends if spot is not None}
    owners = Counter(spot.region for spot in memory.commit.values() if spot is not None)
    found: dict[int, str] = {}
    for name, spot in memory.commit.items():
        place = program.commit[name]
        if not name.startswith("optimizer/") or spot is None or place is None or owners[spot.region] > 1:
            continue
        kind, _, origin = memory.regions[spot.region].source.partition(":")
        if kind == "node":
            number = int(origin.partition(":")[0])
            call = program.calls[number]
            is_made = makes(operator_of(call["operator"])) and [{key: place[key] for key in _LAYOUT}] == call["results"]
        else:
            number = first.get(spot.region, -1)
            is_made = (
                kind == "constant"
                and spot.region in written
                and _touched(memory.accesses[number]) == [spot.region]
                and program.constants[int(origin)].dtype == place["dtype"]
            )
        is_update = any(start <= number < stop for start, stop in program.updates)
        is_whole = spot.whole and spot.start == 0 and is_dense(place)
        if is_made and is_update and is_whole and last.get(f"state:{name}", -1) <= number:
            found[number] = name
    return found


def _touched(access: Access) -> list[int]:
    """Regions of what a call returns and writes."""
    return [each.region for each in (*access.results, *(access.inputs[slot] for slot in access.written))]
