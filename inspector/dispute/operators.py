"""Phase 2 of a dispute: the first operator of one step at which two provers part, and who is wrong about it.

What both took the step from is agreed: the state before it, its batch and its program. The referee executes at most one
operator (Arun et al. 2025, section 3), and of one that has tiles one tile (``execution``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from firmware_sim.evidence import canonical
from inspector.dispute.execution import claims_of, execute, source_of
from inspector.dispute.messages import CheckedProver, Failure, Traffic
from inspector.dispute.openings import Allowance, hash_of
from inspector.dispute.ruling import Parties, Ruling, StepTask, compare
from inspector.dispute.tiles import (
    first_difference,
    named,
)
from monitor.programs.calls import ITEM
from monitor.programs.capture import digest_reads, read_value
from monitor.programs.interpreter import loss_of
from monitor.programs.trace import (
    COMMIT_STATE,
    Node,
    tensor_digest,
)
from monitor.replay.steps import execution_of

__all__ = ["settle_operator", "settle_operators"]


def settle_operators(parties: Parties, task: StepTask, traffic: Traffic) -> Ruling:
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


def _first_operator(parties: Parties, step: int, size: int, traffic: Traffic) -> int | None:
    """Bisect over prefix roots, which differ from the first different operator on; the last where none differs."""
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


def _settle_values(parties: Parties, task: StepTask) -> Ruling:
    """The loss, and the values read, that the operators give on which both agree, against what each states."""
    leaves = {party.name: party.leaf(task.step) for party in parties}
    read = {name: execution_of(leaf).reads for name, leaf in leaves.items()}
    found = []
    if len({leaf.loss for leaf in leaves.values()}) > 1:
        place, right = task.program.loss, {name: not leaf.loss for name, leaf in leaves.items()}
        if place is not None:
            true = tensor_digest(source_of(parties, dict(place), task, Allowance()).whole())
            right = {name: bool(x.loss) and tensor_digest(loss_of(x.loss)) == true for name, x in leaves.items()}
        found.append(compare(right, "the step", "loss"))
    if len(set(read.values())) > 1:
        places = [call["sources"][0] for call in task.program.calls if call["operator"] == ITEM]
        sources = [source_of(parties, place, task, Allowance()) for place in places]
        values = digest_reads([read_value(each.whole().item()) for each in sources])
        found.append(compare({name: each == values for name, each in read.items()}, "the step", "value read"))
    if not found:
        text = (
            "the labs agree on every operator, state, loss and value read; at least one states a different value that "
        )
        return Ruling(guilty=(), operator=None, text=f"{text}it did not use", case="loss")
    guilty = tuple(party.name for party in parties if any(party.name in each.guilty for each in found))
    return replace(found[0], guilty=guilty, text="; ".join(each.text for each in found))


def settle_operator(parties: Parties, index: int, task: StepTask, expected: dict[str, Any]) -> Ruling:
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
    return execute(parties, nodes, task)


def _compare_inputs(parties: Parties, nodes: dict[str, Node], slot: int, task: StepTask) -> Ruling:
    """An input that the parties take otherwise from its agreed source: its first chunk that differs decides."""
    node, allowance = nodes[parties[0].name], Allowance()
    place = node.sources[slot]
    source = source_of(parties, place, task, allowance)
    claims = claims_of(parties, nodes, "in", slot, place, task, allowance)
    span, hashes = first_difference(claims)
    if hashes is None:
        true = tensor_digest(source.whole())
        return compare({name: each.inputs[slot] == true for name, each in nodes.items()}, node.operator, "input")
    wanted = hash_of(source.fetch(torch.arange(span.start, span.stop)))
    right = {name: each == wanted for name, each in hashes.items()}
    return compare(right, node.operator, "input", named(slot, span, "input"))
