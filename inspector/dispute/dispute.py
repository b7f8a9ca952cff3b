"""A referee between two labs that ran the same task and disagree about the result (Arun et al. 2025, section 3).

Phase 1 finds the first step at which their committed states part; phase 2 the first operator of that step; then one of
the decision cases names who is wrong. The referee executes at most one operator.

    step 0 differs         the initial state: compared with what the declared seed gives, or what was agreed
    declarations differ    batch, program, FLOP and numbers: compared with the data commitment and the agreement
    (1) specification      the operator, its arguments or wiring: compared with the program, found without arithmetic
    (2) an input           comes from an agreed operator, the agreed state or the agreed batch: that decides
    (3) only the output    the referee checks the inputs' digests and executes the operator
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from firmware_sim.errors import ChipwitnessError, EvidenceError
from firmware_sim.evidence import canonical
from inspector.dispute.disputed import Disputed, Ruling, compare, rule_on_declarations
from inspector.dispute.messages import CheckedProver, Failure, Traffic
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome, Reason, Verdict
from monitor import numerics
from monitor.lab.prover import Prover
from monitor.numerics.operators import row_named
from monitor.programs.program import operator_of
from monitor.programs.trace import (
    COMMIT_STATE,
    Node,
    gather,
    layout_of,
    restore_arguments,
    tensor_digest,
    written_arguments,
)
from monitor.replay.tracing import ABSENT
from monitor.transcript import Leaf, RunFolder

__all__ = ["Disputant", "settle"]

_AS_STRIDED = "aten.as_strided.default"
"""Reads its input's memory by absolute places, which the input's content does not tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disputant:
    """One lab's finished run: the verified folder, and whoever answers for it."""

    run: RunFolder
    prover: Prover


def settle(first: Disputant, second: Disputant, trust: Trust | None = None) -> Verdict:
    """Settle the dispute; the verdict's evidence holds step, operator, guilty, rounds, bytes, operators_executed.

    ACCEPT: they agree. REJECT: at least one is wrong, and named. INCONCLUSIVE: both acted within the rules, as two
    recorders with ``rounded`` numerics may where a rounding is ambiguous.

    Args:
        trust: what lab and inspector agreed on; runs without a recipe need it.

    Raises:
        CallerError: the runs are not of the same task, or not both finished.
        EvidenceError: a run's own log is inconsistent.
    """
    traffic = Traffic()
    names = [disputant.run.folder.name for disputant in (first, second)]
    if names[0] == names[1]:
        names = [str(disputant.run.folder) for disputant in (first, second)]
    outside = rule_on_declarations(names, (first.run, second.run), trust)
    if outside is not None:
        return _verdict(Outcome.REJECT, outside.text, 0, outside, traffic)
    task = Disputed(first.run, second.run, trust)
    parties = (_party(names[0], first, task, traffic), _party(names[1], second, task, traffic))
    step: int | None = None
    try:
        step = _first_difference(parties, task, traffic)
        if step is None:
            return _verdict(Outcome.ACCEPT, "the two labs agree on every compared state", None, None, traffic)
        ruling = _settle_step(parties, step, task, traffic)
    except Failure as failure:
        ruling = Ruling(guilty=(failure.party,), operator=None, text=str(failure), case="no valid answer")
    outcome = Outcome.REJECT if ruling.guilty else Outcome.INCONCLUSIVE
    return _verdict(outcome, ruling.text, step, ruling, traffic)


def _party(name: str, disputant: Disputant, task: Disputed, traffic: Traffic) -> CheckedProver:
    leaves, tree = disputant.run.load_steps()
    if len(leaves) != task.steps + 1:
        raise EvidenceError(f"{disputant.run.folder.name} commits to {len(leaves) - 1} of {task.steps} steps")
    return CheckedProver(name, disputant.prover, size=tree.size, root=tree.root(), layout=task.layout, traffic=traffic)


def _first_difference(parties: tuple[CheckedProver, CheckedProver], task: Disputed, traffic: Traffic) -> int | None:
    """Bisect: an agreed step followed by a disputed one; None if the results and the starts are equal.

    Where the last states differ, states alone are compared: a lab that also states another loss somewhere before would
    otherwise lead the search to a step in which both compute the same.
    """

    def leaves(step: int) -> tuple[Leaf, Leaf]:
        traffic.rounds += 1
        return parties[0].leaf(step), parties[1].leaf(step)

    def same_claim(first: Leaf, second: Leaf) -> bool:
        return task.claim_of(first) == task.claim_of(second)

    def same_state(first: Leaf, second: Leaf) -> bool:
        return first.state == second.state

    def asked(step: int, agree: bool) -> bool:
        traffic.search.append(("step", step, task.steps, agree))
        return agree

    if not asked(0, same_claim(*leaves(0))):
        return 0
    last = leaves(task.steps)
    if asked(task.steps, same_claim(*last)):
        return None
    same = same_claim if same_state(*last) else same_state
    agreed, different = 0, task.steps
    while different - agreed > 1:
        middle = (agreed + different) // 2
        if asked(middle, same(*leaves(middle))):
            agreed = middle
        else:
            different = middle
    return different


def _settle_step(parties: tuple[CheckedProver, CheckedProver], step: int, task: Disputed, traffic: Traffic) -> Ruling:
    leaves = {party.name: party.leaf(step) for party in parties}
    if step == 0:
        right = {name: task.starts_right(leaf) for name, leaf in leaves.items()}
        return compare(right, "initialisation", "initial state")
    ruling = task.examine(step, leaves)
    if ruling is not None:
        return ruling
    program = task.specification(step)
    for party in parties:
        _check_trace(party, step, leaves[party.name], len(program))
    index = _first_operator(parties, step, len(program), traffic)
    if index is None:
        text = "the labs agree on every operator and on the state; at least one states a loss or another value that it "
        text += "did not compute"
        return Ruling(guilty=(), operator=None, text=text, case="loss")
    traffic.rounds += 1
    return _settle_operator(parties, step, index, task, program[index])


def _check_trace(party: CheckedProver, step: int, leaf: Leaf, size: int) -> None:
    """The trace has as many operators as the program and ends with the state that the step commits to."""
    if party.trace(step).size != size:
        raise Failure(party.name, f"its step {step} has {party.trace(step).size} operators; the program has {size}")
    last = party.node(step, size - 1)
    if last.operator != COMMIT_STATE or last.outputs != (str(leaf.state.root),):
        raise Failure(party.name, f"its operators of step {step} do not end with the state that it commits to")


def _first_operator(parties: tuple[CheckedProver, CheckedProver], step: int, size: int, traffic: Traffic) -> int | None:
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


def _settle_operator(
    parties: tuple[CheckedProver, CheckedProver], step: int, index: int, task: Disputed, expected: dict[str, Any]
) -> Ruling:
    nodes = {party.name: party.node(step, index) for party in parties}
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
            true = _true_input(parties, step, first.sources[slot], task)
            return compare({name: node.inputs[slot] == true for name, node in nodes.items()}, operator, "input")
    return _execute(parties, step, nodes, task)


def _true_input(parties: tuple[CheckedProver, CheckedProver], step: int, place: dict[str, Any], task: Disputed) -> str:
    """Digest of an input whose source both agree on."""
    kind, _, name = str(place["source"]).partition(":")
    if kind == ABSENT:
        return tensor_digest(torch.zeros(place["shape"], dtype=getattr(torch, place["dtype"])))
    if kind != "node":
        source = _agreed_state(parties, step - 1, task)[name] if kind == "state" else task.source(step, kind, name)
        return tensor_digest(gather(source, layout_of(source), place))
    index, slot = (int(part) for part in name.split(":"))
    node = parties[0].node(step, index)
    for party in parties:
        try:
            _, outputs = party.tensors(step, index)
            if len(outputs) == len(node.outputs) and tensor_digest(outputs[slot]) == node.outputs[slot]:
                return tensor_digest(gather(outputs[slot], node.results[slot], place))
        except ChipwitnessError:
            continue
    raise EvidenceError(f"neither lab opens the agreed output of operator {index}")


def _agreed_state(parties: tuple[CheckedProver, CheckedProver], step: int, task: Disputed) -> dict[str, Tensor]:
    """The state that both committed to, from whoever can show it."""
    for party in parties:
        leaf = party.leaf(step)
        try:
            state = party.state(step)
            if task.state_digest(state) == leaf.state:
                return state
        except ChipwitnessError:
            continue
    raise EvidenceError(f"neither lab opens the agreed state after step {step}")


def _execute(parties: tuple[CheckedProver, CheckedProver], step: int, nodes: dict[str, Node], task: Disputed) -> Ruling:
    """Case 3: equal inputs, different outputs. Each party's own rounding entries are honoured if they are lawful."""
    first = nodes[parties[0].name]
    if first.operator == _AS_STRIDED:
        text = (
            f"{_AS_STRIDED} reads memory that its input does not show, so nobody can execute it here: inspect both runs"
        )
        return Ruling(guilty=(), operator=first.operator, text=text, case="output")
    inputs = _agreed_inputs(parties, step, first)
    if first.operator == COMMIT_STATE:
        state = dict(zip(first.arguments["names"], inputs, strict=True))
        right = str(task.state_digest(state).root)
        stated = {name: node.outputs == (right,) for name, node in nodes.items()}
        return replace(compare(stated, first.operator, "output"), executed=1)
    guilty: list[str] = []
    reached: dict[str, tuple[str, ...]] = {}
    reasons = []
    for party in parties:
        entries = party.rounding_entries(step, first.index) if task.numerics.startswith("rounded") else None
        try:
            reached[party.name] = _outputs(first, inputs, task, step, entries)
        except EvidenceError as error:
            reasons.append(str(error))
        if reached.get(party.name) != nodes[party.name].outputs:
            guilty.append(party.name)
    text = f"executing {first.operator} on the agreed inputs does not give what {', '.join(guilty)} states"
    if not guilty:
        text = (
            f"both roundings of {first.operator} are lawful, so the labs recorded independently and this dispute "
            "decides nothing about later steps: inspect both runs"
        )
    return Ruling(
        guilty=tuple(guilty),
        operator=first.operator,
        text="; ".join([text, *reasons]),
        case="output",
        executed=1,
    )


def _agreed_inputs(parties: tuple[CheckedProver, CheckedProver], step: int, node: Node) -> list[Tensor]:
    for party in parties:
        try:
            inputs, _ = party.tensors(step, node.index)
            if tuple(tensor_digest(tensor) for tensor in inputs) == node.inputs:
                return inputs
        except ChipwitnessError:
            continue
    raise EvidenceError(f"neither lab opens the agreed inputs of operator {node.index}")


def _outputs(node: Node, inputs: list[Tensor], task: Disputed, step: int, entries: bytes | None) -> tuple[str, ...]:
    """Execute one operator and return the digests of its results and of the arguments that it wrote."""
    copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs]
    args, kwargs = restore_arguments(node.arguments, copies)
    func = operator_of(node.operator)
    keys = task.keys(step, node.index)
    out = numerics.execute(task.numerics, func, args, kwargs, entries=entries, keys=keys)
    if row_named(node.operator).unset:
        out.zero_()
    written = written_arguments(func, args, kwargs)
    results = [tensor for tensor in _flat(out) if not any(tensor is other for other in written)]
    return tuple(tensor_digest(tensor) for tensor in (*results, *written))


def _flat(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in _flat(item)] if isinstance(value, list | tuple) else []


def _verdict(outcome: Outcome, text: str, step: int | None, ruling: Ruling | None, traffic: Traffic) -> Verdict:
    evidence: dict[str, Any] = {
        "step": step,
        "operator": None if ruling is None else ruling.operator,
        "guilty": None if ruling is None or not ruling.guilty else ", ".join(ruling.guilty),
        "case": None if ruling is None else ruling.case,
        "rounds": traffic.rounds,
        "bytes": traffic.bytes,
        "search": [list(each) for each in traffic.search],
        "operators_executed": 0 if ruling is None else ruling.executed,
    }
    where = {key: evidence[key] for key in ("step", "operator", "guilty") if evidence[key] is not None}
    prefix = "" if step is None else f"step {step}: "
    return Verdict(
        outcome=outcome, reasons=(Reason(guard="dispute", text=prefix + text, where=where),), evidence=evidence
    )
