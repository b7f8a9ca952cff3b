"""Phase 2 of a dispute: the first operator of one step at which two provers part, and who is wrong about it.

What both took the step from is agreed: the state before it, its batch and its program. The referee executes at most one
operator (Arun et al. 2025, section 3): of one that has tiles, under ``exact`` numerics, one tile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from firmware_sim import limits
from firmware_sim.errors import ChipwitnessError, EvidenceError
from firmware_sim.evidence import DTYPE_SIZES, canonical
from inspector.dispute.memory import BY_MEMORY, strided_place, written_place
from inspector.dispute.messages import CheckedProver, Failure, Traffic
from inspector.dispute.openings import Allowance, Committed, Input, Known, Placed, Source, Where, hash_of, state_tensor
from inspector.dispute.reduction import Reduced
from inspector.dispute.state import decide_state
from inspector.dispute.tiles import ByParts, Computed, TileRuling, decide_tile, first_difference, named, tiles_of
from monitor import numerics
from monitor.declaration.statement import Declaration
from monitor.numerics.operators import Row, find, row_named
from monitor.numerics.operators.tiles import Untiled
from monitor.programs.calls import ITEM
from monitor.programs.capture import digest_reads, read_value
from monitor.programs.constants import Constant
from monitor.programs.interpreter import loss_of
from monitor.programs.keys import RepeatedKeys
from monitor.programs.program import Program, operator_of
from monitor.programs.trace import (
    COMMIT_STATE,
    Node,
    layout_of,
    reach,
    restore_arguments,
    tensor_digest,
    written_arguments,
)
from monitor.replay.steps import execution_of
from monitor.replay.tracing import ABSENT, REFUSED, specification
from monitor.sharding import Layout
from monitor.transcript import Execution

__all__ = ["INDEPENDENT", "Ruling", "StepTask", "compare", "settle_operator", "settle_operators"]

INDEPENDENT = "both roundings are lawful"
"""Case of a ruling between parties that recorded for themselves, and may both be right."""

_Parties: TypeAlias = tuple[CheckedProver, CheckedProver]

_IMPOSSIBLE = (EvidenceError, IndexError, ValueError)
"""What stops a replay, too."""
_MOST_WRITES = 64
"""Writes of parts of one memory, one after another, that a referee looks at to find an input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    """Who is wrong, about which operator, and in which of the decision cases; no one where nothing decides.

    Attributes:
        tile: the elements that were computed, where not all were.
    """

    guilty: tuple[str, ...]
    operator: str | None
    text: str
    case: str
    executed: int = 0
    tile: str | None = None


def compare(right: Mapping[str, bool], operator: str, what: str, tile: str | None = None) -> Ruling:
    """Rule against each party that is not right about ``what``."""
    guilty = tuple(name for name, is_right in right.items() if not is_right)
    text = f"the {what} of {operator} that {', '.join(guilty) or 'no one'} states is not what the task gives"
    text = text if tile is None else f"{text}, in {tile}"
    return Ruling(guilty=guilty, operator=operator, text=text, case=what, tile=tile)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTask:
    """One step as both parties were to take it.

    Attributes:
        batch: opens the step's batch; EvidenceError where no party shows it.
        constant: opens a constant of the program by its number; EvidenceError where no party shows it.
        log: the rounding log that both obeyed; None where each recorded on its own.
        recorder: the party that wrote it.
        stopped: a party that says that the step cannot be taken under the log; its trace ends with the operator at
            which it stopped.
    """

    step: int
    declared: Declaration
    layout: Layout
    program: Program
    execution: Execution
    batch: Callable[[], Mapping[str, Tensor]]
    constant: Callable[[int], Constant]
    log: bytes | None = None
    recorder: str = ""
    stopped: str = ""

    def specification(self) -> list[dict[str, Any]]:
        """Specification of the step's operators, equal for all honest provers."""
        return specification(self.program, self.declared, self.execution)

    def source(self, kind: str, name: str) -> Tensor:
        """A tensor that the step reads and no operator made: of the batch, or a constant."""
        if kind == "batch":
            return self.batch()[name]
        if kind == "constant":
            return self.constant(int(name)).tensor()
        raise EvidenceError(f"a step reads no {kind}")

    def keys(self, index: int) -> RepeatedKeys:
        """Keys for a random operator."""
        keys = RepeatedKeys(self.declared.seed, self.step)
        keys.expect(self.program.calls[index]["draws"])
        return keys


def settle_operators(parties: _Parties, task: StepTask, traffic: Traffic) -> Ruling:
    """Find the first operator about which the parties differ, and rule on it.

    Raises:
        Failure: a party gives no valid answer, and has lost.
        EvidenceError: neither shows what has to be known.
    """
    expected = task.specification()
    for party in parties:
        _check_trace(party, task, len(expected))
    shortest = min(party.trace(task.step).size for party in parties)
    index = _first_operator(parties, task.step, shortest, traffic)
    if index is None:
        return _settle_values(parties, task)
    traffic.rounds += 1
    return settle_operator(parties, index, task, expected[index])


def _check_trace(party: CheckedProver, task: StepTask, size: int) -> None:
    """The trace has as many operators as the program and ends with the state that the step commits to.

    That of a party that was stopped is shorter, and ends with the operator that it cannot execute.
    """
    step = task.step
    if party.name == task.stopped:
        if party.trace(step).size > size:
            raise Failure(
                party.name, f"its step {step} has {party.trace(step).size} operators, but the program has {size}"
            )
        return
    if party.trace(step).size != size:
        raise Failure(party.name, f"its step {step} has {party.trace(step).size} operators, but the program has {size}")
    last = party.node(step, size - 1)
    if last.operator != COMMIT_STATE or last.outputs != (str(party.leaf(step).state.root),):
        raise Failure(party.name, f"its operators of step {step} do not end with the state that it commits to")


def _first_operator(parties: _Parties, step: int, size: int, traffic: Traffic) -> int | None:
    """Bisect over prefix roots, which differ from the first different operator on."""
    same, different = 0, size
    if parties[0].trace(step).root == parties[1].trace(step).root:
        return None
    while different - same > 1:
        middle = (same + different) // 2
        traffic.rounds += 1
        agree = parties[0].prefix(step, middle) == parties[1].prefix(step, middle)
        traffic.search.append(("operator", middle, size, agree))
        if agree:
            same = middle
        else:
            different = middle
    return different - 1


def _settle_values(parties: _Parties, task: StepTask) -> Ruling:
    """The loss, and the values read, that the operators give on which both agree, against what each states."""
    leaves = {party.name: party.leaf(task.step) for party in parties}
    read = {name: execution_of(leaf).reads for name, leaf in leaves.items()}
    found = []
    if len({leaf.loss for leaf in leaves.values()}) > 1:
        place, right = task.program.loss, {name: not leaf.loss for name, leaf in leaves.items()}
        if place is not None:
            true = tensor_digest(_source(parties, dict(place), task, Allowance()).whole())
            right = {name: bool(x.loss) and tensor_digest(loss_of(x.loss)) == true for name, x in leaves.items()}
        found.append(compare(right, "the step", "loss"))
    if len(set(read.values())) > 1:
        places = [call["sources"][0] for call in task.program.calls if call["operator"] == ITEM]
        sources = [_source(parties, place, task, Allowance()) for place in places]
        values = digest_reads([read_value(each.whole().item()) for each in sources])
        found.append(compare({name: each == values for name, each in read.items()}, "the step", "value read"))
    if not found:
        text = (
            "the labs agree on every operator, state, loss and value read; at least one states a different value that "
        )
        return Ruling(guilty=(), operator=None, text=f"{text}it did not use", case="loss")
    guilty = tuple(party.name for party in parties if any(party.name in each.guilty for each in found))
    return replace(found[0], guilty=guilty, text="; ".join(each.text for each in found))


def settle_operator(parties: _Parties, index: int, task: StepTask, expected: dict[str, Any]) -> Ruling:
    nodes = {party.name: party.node(task.step, index) for party in parties}
    operator = str(expected["operator"])
    first, second = nodes.values()
    # Compared as bytes, since 1 and 1.0 are equal in Python.
    specifications = {name: canonical.encode(node.specification()) for name, node in nodes.items()}
    wanted = canonical.encode(expected)
    if len(set(specifications.values())) > 1:
        right = {name: stated == wanted for name, stated in specifications.items()}
        return compare(right, operator, "specification")
    if wanted not in specifications.values():
        names = tuple(party.name for party in parties)
        return Ruling(guilty=names, operator=operator, text="both left the program", case="specification")
    for slot, (mine, theirs) in enumerate(zip(first.inputs, second.inputs, strict=True)):
        if mine != theirs:
            return _compare_inputs(parties, nodes, slot, task)
    return _execute(parties, nodes, task)


def _compare_inputs(parties: _Parties, nodes: dict[str, Node], slot: int, task: StepTask) -> Ruling:
    """An input that the parties take otherwise from its agreed source: its first chunk that differs decides."""
    node, allowance = nodes[parties[0].name], Allowance()
    place = node.sources[slot]
    source = _source(parties, place, task, allowance)
    claims = _claims(parties, nodes, "in", slot, place, task, allowance)
    span, hashes = first_difference(claims)
    if hashes is None:
        true = tensor_digest(source.whole())
        return compare({name: each.inputs[slot] == true for name, each in nodes.items()}, node.operator, "input")
    wanted = hash_of(source.fetch(torch.arange(span.start, span.stop)))
    right = {name: each == wanted for name, each in hashes.items()}
    return compare(right, node.operator, "input", named(slot, span, "input"))


def _claims(
    parties: _Parties,
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


def _source(
    parties: _Parties, place: Mapping[str, Any], task: StepTask, allowance: Allowance, writes: int = 0
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
        return Placed(source, layout, place, lambda: _source(parties, earlier, task, allowance, writes + 1))
    if kind == "state":
        source = state_tensor(parties, allowance, task.declared, task.step - 1, name)
    else:
        source = Known(task.source(kind, name))
    return Placed(
        source, layout_of(torch.empty(source.shape, dtype=getattr(torch, source.dtype), device="meta")), place
    )


def _execute(parties: _Parties, nodes: dict[str, Node], task: StepTask) -> Ruling:
    """Case 3: equal inputs, different outputs. Each party's own rounding entries are honoured if they are lawful."""
    first = nodes[parties[0].name]
    allowance = Allowance()
    agreed = _agreed_inputs(parties, first, task, allowance)
    if first.operator == COMMIT_STATE:
        return _found(first, decide_state(parties, task.step, task.declared, first.arguments["names"], agreed))
    is_plain = _rounds_nothing(parties, nodes, task)
    if first.operator.startswith(BY_MEMORY):
        return _execute_in_memory(parties, nodes, agreed[0], task, is_plain)
    if is_plain:
        try:
            return _execute_tile(parties, nodes, agreed, task)
        except Untiled:
            pass  # all of it then
    inputs = _whole(first, agreed)
    if task.log is not None:
        return _execute_logged(nodes, inputs, task, task.log)
    return _execute_for_each(parties, nodes, inputs, task)


def _row_of(node: Node) -> Row:
    found = find(operator_of(node.operator))
    return row_named(node.operator) if found is None else found.row


def _rounds_nothing(parties: _Parties, nodes: dict[str, Node], task: StepTask) -> bool:
    """Whether the call's bits are the same under ``exact`` numerics: always, or no log says anything about it."""
    first, declared = nodes[parties[0].name], task.declared.numerics
    if not declared.startswith("rounded"):
        return declared == "exact"
    if not _row_of(first).is_log_free or any(REFUSED in each.outputs for each in nodes.values()):
        return False
    if task.log is not None:
        return first.index not in numerics.logged_calls(declared, task.log)
    logs = [party.rounding_entries(task.step, first.index) for party in parties]
    return not any(numerics.logged_calls(declared, entries) for entries in logs)


def _execute_for_each(parties: _Parties, nodes: dict[str, Node], inputs: list[Tensor], task: StepTask) -> Ruling:
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


def _execute_tile(parties: _Parties, nodes: dict[str, Node], inputs: list[Source], task: StepTask) -> Ruling:
    """The first tile of the first result that differs; Untiled where that cannot be computed alone."""
    node = nodes[parties[0].name]

    def run(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return numerics.execute("exact", func, args, dict(kwargs), entries=None, keys=task.keys(node.index))

    slot = _first_result(nodes)
    computed = tiles_of(node, slot, inputs, operator_of(node.operator), run)
    return _rule_tile(parties, nodes, slot, task, computed, Reduced(parties, task.step, node, slot, inputs).decide)


def _first_result(nodes: dict[str, Node]) -> int:
    """The first result that differs."""
    one, other = nodes.values()
    return next(slot for slot, pair in enumerate(zip(one.outputs, other.outputs, strict=True)) if pair[0] != pair[1])


def _rule_tile(
    parties: _Parties, nodes: dict[str, Node], slot: int, task: StepTask, computed: Computed, *by_parts: ByParts
) -> Ruling:
    node = nodes[parties[0].name]
    claims = _claims(parties, nodes, "out", slot, node.results[slot], task, Allowance())
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


def _execute_in_memory(parties: _Parties, nodes: dict[str, Node], x: Source, task: StepTask, is_plain: bool) -> Ruling:
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
        refuses = name == task.stopped and each.outputs == (REFUSED,) * len(each.results)
        if each.outputs != out and (is_lawful or not refuses):
            guilty.append(name)
    if guilty:
        text = f"executing {node.operator} on the agreed inputs does not give what {', '.join(guilty)} states"
    else:
        text = f"a device can round {node.operator} so that the log stops it, and another so that it does not"
    return Ruling(guilty=tuple(guilty), operator=node.operator, text=text, case="output", executed=1)


def _agreed_inputs(parties: _Parties, node: Node, task: StepTask, allowance: Allowance) -> list[Source]:
    def input_of(slot: int, place: Mapping[str, Any]) -> Source:
        where = Where(task.step, node.index, "in", slot)
        own = Committed(parties, allowance, where, node.inputs[slot], place)
        return Input(own, lambda: _source(parties, place, task, allowance))

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
