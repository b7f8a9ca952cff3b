"""The last level of a dispute: one operator on agreed inputs, and whose result is what it gives.

The referee executes one operator at most; where that has tiles, one tile of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from firmware_sim import limits
from firmware_sim.errors import ChipwitnessError, EvidenceError
from firmware_sim.evidence import DTYPE_SIZES
from inspector.dispute.memory import BY_MEMORY, strided_place, written_place
from inspector.dispute.openings import Allowance, Committed, Input, Known, Placed, Source, Where, state_tensor
from inspector.dispute.reduction import Reduced
from inspector.dispute.ruling import INDEPENDENT, Parties, Ruling, StepTask
from inspector.dispute.state import decide_state
from inspector.dispute.tiles import (
    OF_AN_ELEMENT,
    ByParts,
    Computed,
    TileRuling,
    decide_tile,
    named,
    tile_of,
    tiles_of,
)
from monitor import numerics
from monitor.numerics.operators import Row, find, row_named
from monitor.numerics.operators.tiles import Run, Tile, Untiled
from monitor.numerics.rounded_tiles import Rounds, is_well_formed, rounded_tile, tile_of_rounded
from monitor.programs.program import operator_of
from monitor.programs.trace import (
    COMMIT_STATE,
    Node,
    layout_of,
    reach,
    restore_arguments,
    tensor_digest,
    written_arguments,
)
from monitor.replay.tracing import ABSENT, REFUSED, refusal

__all__ = ["claims_of", "execute", "source_of"]

_IMPOSSIBLE = (EvidenceError, IndexError, ValueError)
"""What stops a replay, too."""
_MOST_WRITES = 64
"""Writes of parts of one memory, one after another, that a referee looks at to find an input."""


def claims_of(
    parties: Parties,
    nodes: dict[str, Node],
    side: str,
    slot: int,
    layout: Mapping[str, Any],
    task: StepTask,
    allowance: Allowance,
) -> dict[str, Committed]:
    """What each party alone opens of its own tensor."""
    found = {}
    for party in parties:
        node = nodes[party.name]
        digest = (node.inputs if side == "in" else node.outputs)[slot]
        found[party.name] = Committed([party], allowance, Where(task.step, node.index, side, slot), digest, layout)
    return found


def source_of(
    parties: Parties, place: Mapping[str, Any], task: StepTask, allowance: Allowance, writes: int = 0
) -> Source:
    """An input as it lies in the memory of its source, on which both agree.

    Args:
        writes: how many later writes have left parts of it.
    """
    if writes > _MOST_WRITES:
        raise EvidenceError("an input consists of the results of too many writes")
    kind, _, name = str(place["source"]).partition(":")
    if kind == ABSENT:
        return Known(torch.zeros(place["shape"], dtype=getattr(torch, place["dtype"])))
    if kind == "node":
        index, slot = (int(part) for part in name.split(":"))
        node = parties[0].node(task.step, index)
        where, layout = Where(task.step, index, "out", slot), node.results[slot]
        source: Source = Committed(parties, allowance, where, node.outputs[slot], layout)
        wrote = written_place(node, slot)
        if wrote is None:
            return Placed(source, layout, place)
        earlier = {**place, "source": wrote["source"], "offset": wrote["offset"] + place["offset"]}
        return Placed(source, layout, place, lambda: source_of(parties, earlier, task, allowance, writes + 1))
    if kind == "state":
        source = state_tensor(parties, allowance, task.declared, task.step - 1, name)
    else:
        source = Known(task.source(kind, name))
    return Placed(
        source, layout_of(torch.empty(source.shape, dtype=getattr(torch, source.dtype), device="meta")), place
    )


def execute(parties: Parties, nodes: dict[str, Node], task: StepTask) -> Ruling:
    """Case 3: equal inputs, different outputs. Each party's own rounding entries are honoured if they are lawful."""
    first = nodes[parties[0].name]
    allowance = Allowance()
    agreed = _agreed_inputs(parties, first, task, allowance)
    if first.operator == COMMIT_STATE:
        return _found(first, decide_state(parties, task.step, task.declared, first.arguments["names"], agreed))
    is_plain = _rounds_nothing(parties, nodes, task)
    if first.operator.startswith(BY_MEMORY):
        return _execute_in_memory(parties, nodes, agreed[0], task, is_plain)
    with suppress(Untiled):  # all of it then
        if is_plain:
            return _execute_tile(parties, nodes, agreed, task)
        if task.declared.numerics.startswith("rounded"):
            rule = _rule_refusal if _is_refused(nodes) else _execute_rounded_tile
            return rule(parties, nodes, agreed, task)
    inputs = _whole(first, agreed)
    if task.log is not None:
        return _execute_logged(nodes, inputs, task, task.log)
    return _execute_for_each(parties, nodes, inputs, task)


def _row_of(node: Node) -> Row:
    found = find(operator_of(node.operator))
    return row_named(node.operator) if found is None else found.row


def _is_refused(nodes: dict[str, Node]) -> bool:
    """Whether a party says that a log stops it there."""
    return any(_refuses(each) for each in nodes.values())


def _refuses(node: Node) -> bool:
    return REFUSED in node.outputs or refusal(node.outputs) is not None


def _rounds_nothing(parties: Parties, nodes: dict[str, Node], task: StepTask) -> bool:
    """Whether the call's bits are the same under ``exact`` numerics: always, or no log says anything about it."""
    first, declared = nodes[parties[0].name], task.declared.numerics
    if not declared.startswith("rounded"):
        return declared == "exact"
    if not _row_of(first).is_log_free or _is_refused(nodes):
        return False
    if task.log is not None:
        return first.index not in numerics.logged_calls(declared, task.log)
    logs = [party.rounding_entries(task.step, first.index) for party in parties]
    return not any(numerics.logged_calls(declared, entries) for entries in logs)


def _execute_for_each(parties: Parties, nodes: dict[str, Node], inputs: list[Tensor], task: StepTask) -> Ruling:
    """What the operator gives on its inputs, with the rounding entries of each party that states another result."""
    first, rounded = nodes[parties[0].name], task.declared.numerics.startswith("rounded")
    guilty: list[str] = []
    reached: dict[str, tuple[str, ...]] = {}
    reasons = []
    for party in parties:
        entries = party.rounding_entries(task.step, first.index) if rounded else None
        try:
            reached[party.name] = _outputs(first, inputs, task, entries)
        except EvidenceError as error:
            reasons.append(str(error))
        except (ChipwitnessError, LookupError, RuntimeError, TypeError, ValueError) as error:
            text = f"this referee cannot execute {first.operator} on the agreed inputs: {error!s:.200}"
            return Ruling(guilty=(), operator=first.operator, text=text, case="output")
        if reached.get(party.name) != nodes[party.name].outputs:
            guilty.append(party.name)
    text = f"executing {first.operator} on the agreed inputs does not give what {', '.join(guilty)} states"
    if not guilty:
        text = f"both roundings of {first.operator} are lawful, so the labs recorded independently from here on"
    return Ruling(
        guilty=tuple(guilty),
        operator=first.operator,
        text="; ".join([text, *reasons]),
        case="output" if guilty else INDEPENDENT,
        executed=1,
    )


def _execute_tile(parties: Parties, nodes: dict[str, Node], inputs: list[Source], task: StepTask) -> Ruling:
    """The first tile of the first result that differs; Untiled where that cannot be computed alone."""
    node = nodes[parties[0].name]

    def run(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return numerics.execute("exact", func, args, dict(kwargs), entries=None, keys=task.keys(node.index))

    slot = _first_result(nodes)
    tile = tile_of(operator_of(node.operator))
    computed = tiles_of(node, slot, inputs, tile, lambda make, span: make(run))
    return _rule_tile(parties, nodes, slot, task, computed, Reduced(parties, task.step, node, slot, inputs).decide)


def _execute_rounded_tile(parties: Parties, nodes: dict[str, Node], inputs: list[Source], task: StepTask) -> Ruling:
    """The same under the log that both obeyed, or under each party's own; Untiled as above."""
    node, slot, declared = nodes[parties[0].name], _first_result(nodes), task.declared.numerics
    tile, rounds = _rounded_tile_of(node)
    size = math.prod(node.results[slot]["shape"])
    denied: dict[str, str] = {}

    def settle(name: str, entries: bytes) -> Computed:
        def settled(make: Callable[[Run], Tensor], span: range) -> Tensor | None:
            try:
                return rounded_tile(
                    declared, make, span, size, entries, rounds=rounds, slot=slot, keys=lambda: task.keys(node.index)
                )[0]
            except numerics.LogContradiction as error:
                denied[name] = str(error)
                return None

        return tiles_of(node, slot, inputs, tile, settled)

    logs = (
        {party.name: party.rounding_entries(task.step, node.index) for party in parties}
        if task.log is None
        else dict.fromkeys(nodes, numerics.entries_in(declared, task.log, node.index))
    )
    by_parts = Reduced(parties, task.step, node, slot, inputs, declared, logs).decide
    if task.log is None:
        ruling = _rule_tiles(
            parties, nodes, slot, task, {name: settle(name, log) for name, log in logs.items()}, by_parts
        )
        if ruling.guilty:
            return replace(ruling, text="; ".join([ruling.text, *denied.values()]))
        text = f"both roundings of {node.operator} are lawful, so the labs recorded independently from here on"
        return replace(ruling, text=text, case=INDEPENDENT, tile=None)
    ruling = _rule_tile(parties, nodes, slot, task, settle(task.recorder, logs[task.recorder]), by_parts)
    if denied:
        text = f"under the log of {task.recorder} {node.operator} cannot be computed: {denied[task.recorder]:.200}"
        return replace(ruling, guilty=(task.recorder,), text=text, case="log")
    return ruling


def _rule_refusal(parties: Parties, nodes: dict[str, Node], inputs: list[Source], task: StepTask) -> Ruling:
    """The element at which a party says that the log stops it; Untiled where it names none that can be had alone."""
    node, declared = nodes[parties[0].name], task.declared.numerics
    tile, rounds = _rounded_tile_of(node)
    if task.log is None:
        raise Untiled("there is no log")
    log = numerics.entries_in(declared, task.log, node.index)
    if rounds == "inside" and numerics.logged_calls(declared, log):
        raise Untiled("the log is about what has another form")
    at = _refused_at(nodes, node, task, rounds, log)
    if isinstance(at, Ruling):
        return at
    slot, place = at
    size, lawful = math.prod(node.results[slot]["shape"]), list[bool]()

    def settled(make: Callable[[Run], Tensor], span: range) -> Tensor:
        keys = functools.partial(task.keys, node.index)
        found, is_lawful = rounded_tile(declared, make, span, size, log, rounds=rounds, slot=slot, keys=keys)
        lawful.append(is_lawful)
        return found

    try:
        found = Reduced(parties, task.step, node, slot, inputs, declared, dict.fromkeys(nodes, log)).lawful(place)
    except Untiled:
        try:
            tiles_of(node, slot, inputs, tile, settled)(range(place, place + 1), OF_AN_ELEMENT)
            found = all(lawful) or None
        except numerics.LogContradiction:
            found = False
    if isinstance(found, TileRuling):
        return _found(node, found)
    where = named(slot, range(place, place + 1))
    if found is False:
        return replace(_against_log(node, task), tile=where)
    text = f"the log of {task.recorder} stops no honest device at {where}"
    guilty, text = ((task.stopped,), text) if found else ((), _either_way(node))
    return Ruling(guilty=guilty, operator=node.operator, text=text, case="output", executed=1, tile=where)


def _refused_at(
    nodes: dict[str, Node], node: Node, task: StepTask, rounds: Rounds, log: bytes
) -> tuple[int, int] | Ruling:
    """The result and the element that the party names; a ruling where the form of the log decides, or it names none."""
    sizes = [math.prod(each["shape"]) for each in node.results]
    if not is_well_formed(task.declared.numerics, rounds, _arguments(node), sizes, log):
        return _against_log(node, task)
    at = refusal(nodes[task.stopped].outputs)
    if at is not None and at[1] < sizes[at[0]]:
        return at
    if rounds != "once":
        raise Untiled("no element is named")
    text = f"{task.stopped} names no element of {node.operator} at which the log of {task.recorder} stops it"
    return Ruling(guilty=(task.stopped,), operator=node.operator, text=text, case="objection")


def _against_log(node: Node, task: StepTask) -> Ruling:
    text = f"no honest device can have written what the log of {task.recorder} says of {node.operator}"
    return Ruling(guilty=(task.recorder,), operator=node.operator, text=text, case="log", executed=1)


def _arguments(node: Node) -> tuple[Any, ...]:
    """Positional arguments, of which tensors do not count."""
    return restore_arguments(node.arguments, [torch.empty(0)] * len(node.sources))[0]


def _rounded_tile_of(node: Node) -> tuple[Tile | None, Rounds]:
    if any(str(each["dtype"]).startswith("complex") for each in node.results):
        raise Untiled("complex numbers are rounded in another form")
    return tile_of_rounded(operator_of(node.operator), _arguments(node))


def _either_way(node: Node) -> str:
    return f"a device can round {node.operator} so that the log stops it, and another so that it does not"


def _first_result(nodes: dict[str, Node]) -> int:
    """The first result that differs."""
    one, other = nodes.values()
    return next(slot for slot, pair in enumerate(zip(one.outputs, other.outputs, strict=True)) if pair[0] != pair[1])


def _rule_tile(
    parties: Parties, nodes: dict[str, Node], slot: int, task: StepTask, computed: Computed, *by_parts: ByParts
) -> Ruling:
    return _rule_tiles(parties, nodes, slot, task, dict.fromkeys(nodes, computed), *by_parts)


def _rule_tiles(
    parties: Parties,
    nodes: dict[str, Node],
    slot: int,
    task: StepTask,
    computed: Mapping[str, Computed],
    *by_parts: ByParts,
) -> Ruling:
    """By what each party's tile is to be."""
    node = nodes[parties[0].name]
    claims = claims_of(parties, nodes, "out", slot, node.results[slot], task, Allowance())
    return _found(node, decide_tile(slot, claims, computed, *by_parts))


def _found(node: Node, decided: TileRuling) -> Ruling:
    """The ruling about an output."""
    guilty = tuple(name for name, is_right in decided.right.items() if not is_right)
    text = f"executing {node.operator} on the agreed inputs does not give what {', '.join(guilty)} states"
    return Ruling(
        guilty=guilty,
        operator=node.operator,
        text=f"{text}, in {decided.tile}",
        case="output",
        executed=1,
        tile=decided.tile,
    )


def _execute_in_memory(parties: Parties, nodes: dict[str, Node], x: Source, task: StepTask, is_plain: bool) -> Ruling:
    """``as_strided`` by the memory of its input, where that has no gaps and the operator does not leave it."""
    node = nodes[parties[0].name]
    place = node.sources[0]
    try:
        wanted = strided_place(node, lambda index: parties[0].node(task.step, index))
        seen = Placed(x, place, wanted)
        if not is_plain:
            raise EvidenceError("and its log is about it")
        if not seen.is_simple or math.prod(place["shape"]) != reach(place["shape"], place["stride"]):
            raise EvidenceError("its input has gaps")
    except (EvidenceError, KeyError, TypeError, ValueError) as error:
        text = f"{node.operator} reads memory that its input does not show ({error!s:.100}): inspect both runs"
        return Ruling(guilty=(), operator=node.operator, text=text, case="output")
    return _rule_tile(parties, nodes, 0, task, lambda span, most: seen.fetch(torch.arange(span.start, span.stop)))


def _execute_logged(nodes: dict[str, Node], inputs: list[Tensor], task: StepTask, log: bytes) -> Ruling:
    """Equal inputs and one log, which may be at fault itself; a party that obeyed it has the outputs that it gives.

    A party that says that no device can obey it is wrong if no honest device could be stopped by it.
    """
    node = nodes[task.recorder]
    entries = numerics.entries_in(task.declared.numerics, log, node.index)
    try:
        out, is_lawful = _referee(node, inputs, task, entries)
    except _IMPOSSIBLE as error:
        text = (
            f"{task.recorder} states what {node.operator} gives, but under its log that operator cannot be computed: "
            f"{error!s:.200}"
        )
        return Ruling(guilty=(task.recorder,), operator=node.operator, text=text, case="log", executed=1)
    guilty = []
    for name, each in nodes.items():
        refuses = name == task.stopped and _refuses(each)
        if each.outputs != out and (is_lawful or not refuses):
            guilty.append(name)
    if guilty:
        text = f"executing {node.operator} on the agreed inputs does not give what {', '.join(guilty)} states"
    else:
        text = _either_way(node)
    return Ruling(guilty=tuple(guilty), operator=node.operator, text=text, case="output", executed=1)


def _agreed_inputs(parties: Parties, node: Node, task: StepTask, allowance: Allowance) -> list[Source]:
    def input_of(slot: int, place: Mapping[str, Any]) -> Source:
        where = Where(task.step, node.index, "in", slot)
        own = Committed(parties, allowance, where, node.inputs[slot], place)
        return Input(own, lambda: source_of(parties, place, task, allowance))

    return [input_of(slot, place) for slot, place in enumerate(node.sources)]


def _whole(node: Node, inputs: list[Source]) -> list[Tensor]:
    """All operands; EvidenceError, before any is asked for, where they are more than a game's evidence holds."""
    held = sum(math.prod(each.shape) * DTYPE_SIZES[each.dtype] for each in inputs)
    try:
        limits.OPERANDS_BYTES.check(held)
    except EvidenceError as error:
        raise EvidenceError(f"{node.operator} is not computed in tiles: {error}") from None
    return [each.whole() for each in inputs]


def _outputs(node: Node, inputs: list[Tensor], task: StepTask, entries: bytes | None) -> tuple[str, ...]:
    """Execute one operator and return the digests of its results and of the arguments that it wrote."""
    func, args, kwargs = _call(node, inputs)
    keys = task.keys(node.index)
    out = numerics.execute(task.declared.numerics, func, args, kwargs, entries=entries, keys=keys)
    return _digests(node, func, args, kwargs, out)


def _referee(node: Node, inputs: list[Tensor], task: StepTask, entries: bytes) -> tuple[tuple[str, ...], bool]:
    """The same under a log's part, and whether no honest device can object to it."""
    func, args, kwargs = _call(node, inputs)
    keys = task.keys(node.index)
    out, is_lawful = numerics.referee(task.declared.numerics, func, args, kwargs, entries=entries, keys=keys)
    return _digests(node, func, args, kwargs, out), is_lawful


def _call(node: Node, inputs: list[Tensor]) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs]
    args, kwargs = restore_arguments(node.arguments, copies)
    return operator_of(node.operator), args, kwargs


def _digests(node: Node, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[str, ...]:
    if row_named(node.operator).unset:
        out.zero_()
    written = written_arguments(func, args, kwargs)
    results = [tensor for tensor in _flat(out) if not any(tensor is other for other in written)]
    return tuple(tensor_digest(tensor) for tensor in (*results, *written))


def _flat(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _flat(item)] if isinstance(value, list | tuple) else []
