"""What a step does not need: tensors of the state that it overwrites before it reads them, and dead calls."""

from __future__ import annotations

from firmware_sim.errors import EvidenceError
from monitor.programs.calls import argument
from monitor.programs.memory import Access, Form, Memory, is_dense
from monitor.programs.parts import is_list, parts_of

__all__ = ["absent_state", "dead_calls", "first_writes", "unread", "written_state"]

_MISFITS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_OVERWRITING = frozenset({"zero", "fill", "copy"})
"""In place, they give every element of their first argument a new value, whatever it was."""


def unread(program: Form) -> frozenset[str]:
    """Names, ``kind/name``, of the tensors of the state whose old values no call, commit or loss of a program reads.

    A view reads nothing by itself. A call that writes a whole tensor and does not read it ends what the tensor was; any
    other call on its memory counts as reading it.

    Raises:
        EvidenceError: a call names memory that is not its own, or has other arguments than its operator.
    """
    try:
        return _unread(program, Memory(program))
    except _MISFITS:
        raise EvidenceError("a call of the program has arguments that its operator does not take") from None


def first_writes(program: Form) -> dict[str, tuple[int, int]]:
    """The first call that writes each tensor of the state, ``kind/name``, where it lies; raises as ``unread`` does.

    With it comes how many tensors it writes afterwards, where it writes one after another.
    """
    try:
        memory = Memory(program)
        found: dict[str, tuple[int, int]] = {}
        for access in memory.accesses:
            for place, slot in enumerate(access.written, start=1):
                source = memory.regions[access.inputs[slot].region].source
                if source.startswith("state:"):
                    left = len(access.written) - place if is_list(access.operator) else 0
                    found.setdefault(source.removeprefix("state:"), (access.number, left))
        return found
    except _MISFITS:
        raise EvidenceError("a call of the program has arguments that its operator does not take") from None


def written_state(program: Form) -> tuple[str, ...]:
    """Names, ``kind/name``, of the tensors of the state whose new value may be another than their old one.

    Kept is what lies where it lay, as it lay there, in memory that no call writes; raises as ``unread`` does. Those
    that are absent at the end are ``absent_state``.
    """
    try:
        memory = Memory(program)
        written = {access.inputs[slot].region for access in memory.accesses for slot in _written(access)}
        return tuple(
            name
            for name, spot in memory.commit.items()
            if spot is not None
            and (
                memory.regions[spot.region].source != f"state:{name}"
                or spot.region in written
                or spot.start != 0
                or not is_dense(program.commit[name] or {})
            )
        )
    except _MISFITS:
        raise EvidenceError("a call of the program has arguments that its operator does not take") from None


def absent_state(program: Form) -> frozenset[str]:
    """Names, ``kind/name``, of the tensors of the state that a program leaves absent, which counts as zeros.

    Gradients are none of them: clearing these changes nothing that is trained.
    """
    return frozenset(
        name for name, place in program.commit.items() if place is None and not name.startswith("gradient/")
    )


def _written(access: Access) -> tuple[int, ...]:
    """The inputs that a call writes: a normalisation by stored statistics is said to write them, and does not."""
    keeps = "batch_norm" in access.operator and argument(access.call, "training") is False
    return () if keeps else access.written


def _unread(program: Form, memory: Memory) -> frozenset[str]:
    read: set[int] = set()
    overwritten: set[int] = set()
    for access in memory.accesses:
        if access.is_view and not access.written:
            continue
        over = _overwritten(access)
        read |= {spot.region for slot, spot in enumerate(access.inputs) if slot not in over} - overwritten
        overwritten |= {access.inputs[slot].region for slot in over} - read
    ends = [*memory.commit.values(), None if program.loss is None else memory.spot(program.loss)]
    read |= {spot.region for spot in ends if spot is not None} - overwritten
    used = {memory.regions[number].source for number in read}
    return frozenset(name for name in program.commit if f"state:{name}" not in used)


def _overwritten(access: Access) -> frozenset[int]:
    """Which inputs of a call are whole tensors that it gives new values without reading them."""
    written = {slot for slot in access.written if access.inputs[slot].whole}
    if not written:
        return frozenset()
    targets: set[int] = set()
    sources: set[int] = set()
    for part in parts_of(access):
        if part.name not in _OVERWRITING:
            return frozenset()
        targets |= set(part.slots.get("self", ()))
        sources |= {slot for name, slots in part.slots.items() if name != "self" for slot in slots}
    return frozenset(slot for slot in targets & written - sources)


def dead_calls(program: Form) -> frozenset[int]:
    """Numbers of the calls whose results are used for nothing that a program commits or reads; raises as ``unread``.

    A replay cannot tell whether they ran. A gradient counts as committed also where it is dropped,
    as loops do with those of other losses: chips hold it, and may take a snapshot of it.
    """
    try:
        memory = Memory(program)
        ends = [*memory.commit.values(), None if program.loss is None else memory.spot(program.loss)]
        gradients = {n for n, region in enumerate(memory.regions) if region.source.startswith("state:gradient/")}
        needed = gradients.union(spot.region for spot in ends if spot is not None)
        dead: set[int] = set()
        for access in reversed(memory.accesses):
            made = {spot.region for spot in access.results} | {access.inputs[slot].region for slot in _written(access)}
            if access.call["results"] and not made & needed:
                dead.add(access.number)
                continue
            over = _overwritten(access)
            needed -= {access.inputs[slot].region for slot in over} - gradients
            needed |= {spot.region for slot, spot in enumerate(access.inputs) if slot not in over}
        return frozenset(dead)
    except _MISFITS:
        raise EvidenceError("a call of the program has arguments that its operator does not take") from None
