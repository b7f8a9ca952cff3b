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
from inspector.dispute.messages import Failure
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
from monitor.numerics.operators.tiles import Run, Untiled
from monitor.numerics.rounded_tiles import RoundedCall
from monitor.programs.bits import same_bytes
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
    _require_results(parties, nodes, task)
    if task.stopped and len({node.outputs for node in nodes.values()}) == 1:
        text = "it says that the log stops it, but agrees on the result of each operator that it executed"
        return Ruling(guilty=(task.stopped,), operator=first.operator, text=text, case="objection")
    if _is_refused(nodes, task):
        with suppress(Untiled):
            return _rule_refusal(parties, nodes, agreed, task)
    is_plain = _rounds_nothing(nodes, first, task)
    if first.operator.startswith(BY_MEMORY):
        return _execute_in_memory(parties, nodes, agreed[0], task, is_plain)
    with suppress(Untiled):  # all of it then
        if is_plain:
            return _execute_tile(parties, nodes, agreed, task)
        if task.declared.numerics.startswith("rounded") and not _is_refused(nodes, task):
            return _execute_rounded_tile(parties, nodes, agreed, task)
    inputs = _whole(first, agreed)
    if task.log is not None:
        return _execute_logged(nodes, inputs, task, task.log)
    return _execute_for_each(parties, nodes, inputs, task)


def _row_of(node: Node) -> Row:
    found = find(operator_of(node.operator))
    return row_named(node.operator) if found is None else found.row


def _is_refused(nodes: dict[str, Node], task: StepTask) -> bool:
    """Whether the party that was stopped says that the log stops it there."""
    return bool(task.stopped) and _refuses(nodes[task.stopped])


def _require_results(parties: Parties, nodes: dict[str, Node], task: StepTask) -> None:
    """Failure of a party that states no results, but for one that is stopped, at the last operator that it has."""
    for party in parties:
        node = nodes[party.name]
        is_stopped = party.name == task.stopped and node.index == party.trace(task.step).size - 1
        if _refuses(node) and not is_stopped:
            raise Failure(party.name, f"it states no result of operator {node.index} of step {task.step}")


def _refuses(node: Node) -> bool:
    return REFUSED in node.outputs or refusal(node.outputs) is not None


def _rounds_nothing(nodes: dict[str, Node], node: Node, task: StepTask) -> bool:
    """Whether the call has the same bits under ``exact`` numerics, whatever a log says, and no party denies it."""
    declared = task.declared.numerics
    if not declared.startswith("rounded"):
        return declared == "exact"
    return _row_of(node).is_log_free and not _is_refused(nodes, task)


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
    node, slot = nodes[parties[0].name], _first_result(nodes)
    call, logs = _rounded_call(node, task), _logs(parties, node, task)
    if false := {name: text for name, log in logs.items() if (text := call.fault(log))}:
        return _against_logs(node, task, false)
    denied: dict[str, str] = {}

    def settle(name: str) -> Computed:
        def settled(make: Callable[[Run], Tensor], span: range) -> Tensor | None:
            try:
                return call.compute(make, slot, span, logs[name])[0]
            except numerics.LogContradiction as error:
                denied[name] = str(error)
                return None

        return tiles_of(node, slot, inputs, call.tile, settled, is_exact=False)

    by_parts = Reduced(parties, task.step, node, slot, inputs, call.declared, logs).decide
    if task.log is not None:
        ruling = _rule_tile(parties, nodes, slot, task, settle(task.recorder), by_parts)
        return replace(_against_logs(node, task, denied), tile=ruling.tile) if denied else ruling
    ruling = _rule_tiles(parties, nodes, slot, task, {name: settle(name) for name in logs}, by_parts)
    if ruling.guilty:
        return replace(ruling, text="; ".join([ruling.text, *denied.values()]))
    text = f"both roundings of {node.operator} are lawful, so the labs recorded independently from here on"
    return replace(ruling, text=text, case=INDEPENDENT, tile=None)


def _rule_refusal(parties: Parties, nodes: dict[str, Node], inputs: list[Source], task: StepTask) -> Ruling:
    """The element at which a party says that the log stops it; Untiled where it names none that can be had alone."""
    node = nodes[task.stopped]
    call, logs = _rounded_call(node, task), _logs(parties, node, task)
    log = logs[task.recorder]
    if fault := call.fault(log):
        return _against_logs(node, task, {task.recorder: fault})
    at = _place_of_refusal(call, node)
    if call.rounds == "never" or at is None or at[1] >= math.prod(call.shapes[at[0]]):
        if not call.names_elements:
            raise Untiled("no element is named")
        text = f"{task.stopped} names no element of {node.operator} at which the log of {task.recorder} stops it"
        return Ruling(guilty=(task.stopped,), operator=node.operator, text=text, case="objection")
    slot, place = at
    where, lawful = named(slot, range(place, place + 1)), list[bool]()

    def settled(make: Callable[[Run], Tensor], span: range) -> Tensor:
        found, is_lawful = call.compute(make, slot, span, log)
        lawful.append(is_lawful)
        return found

    try:
        found = Reduced(parties, task.step, node, slot, inputs, call.declared, logs).lawful(place)
        wrong: tuple[str, ...] = ()
    except Untiled:
        computed = tiles_of(node, slot, inputs, call.tile, settled, is_exact=False)
        try:
            value = computed(range(place, place + 1), OF_AN_ELEMENT)
        except numerics.LogContradiction as error:
            return replace(_against_logs(node, task, {task.recorder: str(error)}), tile=where)
        found, wrong = all(lawful) or None, _wrong(parties, nodes, slot, place, value, task)
    if isinstance(found, TileRuling):
        return _found(node, found)
    if found is None:
        raise Untiled("what the recorder states of other elements counts, too")
    if not found:
        return replace(_against_logs(node, task, {task.recorder: where}), tile=where)
    text = f"the log of {task.recorder} stops no honest device at {where}"
    text = "; ".join([text, *(f"that is not what {name} states" for name in wrong)])
    guilty = tuple(name for name in nodes if name == task.stopped or name in wrong)
    return Ruling(guilty=guilty, operator=node.operator, text=text, case="output", executed=1, tile=where)


def _place_of_refusal(call: RoundedCall, node: Node) -> tuple[int, int] | None:
    """The result, and its element, by which a refusal is ruled on.

    Of a call that rounds inside it matters only whether it rounds anything: each element shows that, or none does.
    """
    if call.rounds != "inside":
        return refusal(node.outputs)
    if not call.rounds_alike:
        raise Untiled("another tensor of the list may round")
    return 0, 0


def _wrong(
    parties: Parties, nodes: dict[str, Node], slot: int, place: int, value: Tensor | None, task: StepTask
) -> tuple[str, ...]:
    """The recorder, if it states another element."""
    recorder = next(party for party in parties if party.name == task.recorder)
    node = nodes[recorder.name]
    where, layout = Where(task.step, node.index, "out", slot), node.results[slot]
    stated = Committed([recorder], Allowance(), where, node.outputs[slot], layout).fetch(torch.tensor([place]))
    return () if value is not None and same_bytes(stated, value) else (recorder.name,)


def _logs(parties: Parties, node: Node, task: StepTask) -> dict[str, bytes]:
    """What the log that each party took says of a call."""
    if task.log is None:
        return {party.name: party.rounding_entries(task.step, node.index) for party in parties}
    entries = numerics.entries_in(task.declared.numerics, task.log, node.index)
    return {party.name: entries for party in parties}


def _against_logs(node: Node, task: StepTask, faults: Mapping[str, str]) -> Ruling:
    """Against who wrote a log that no honest device can have written."""
    guilty = tuple(faults) if task.log is None else (task.recorder,)
    says = "; ".join(dict.fromkeys(f"{text:.200}" for text in faults.values()))
    text = f"no honest device can have written what the log of {', '.join(guilty)} says of {node.operator}: {says}"
    return Ruling(guilty=guilty, operator=node.operator, text=text, case="log", executed=1)


def _rounded_call(node: Node, task: StepTask) -> RoundedCall:
    if any(str(each["dtype"]).startswith("complex") for each in (*node.results, *node.sources)):
        raise Untiled("complex numbers are rounded in another form")
    blank = [torch.empty(each["shape"], dtype=getattr(torch, each["dtype"]), device="meta") for each in node.sources]
    args, kwargs = restore_arguments(node.arguments, blank)
    shapes = [tuple(each["shape"]) for each in node.results]
    keys = functools.partial(task.keys, node.index)
    return RoundedCall(task.declared.numerics, operator_of(node.operator), args, kwargs, shapes, keys)


def _first_result(nodes: dict[str, Node]) -> int:
    """The first result that differs; EvidenceError where none does."""
    one, other = nodes.values()
    pairs = enumerate(zip(one.outputs, other.outputs, strict=True))
    found = next((slot for slot, (mine, theirs) in pairs if mine != theirs), None)
    if found is None:
        raise EvidenceError(f"the parties state the same results of {one.operator}")
    return found


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
        text = f"a device can round {node.operator} so that the log stops it, and another so that it does not"
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
