"""One step of a run under the rounding log that it recorded, as its own party states it and as a follower reached it.

Under ``rounded`` numerics two honest parties that record for themselves round differently. What one of them did is
checked by another that takes the same steps under the first one's log (Srivastava et al. 2024). Both start
the step from one state, with one batch, one program and one log, so that one operator decides between them.

A follower that cannot obey the log says so. What it has of the step then ends with the operator that stopped it. The
log is opened, and the operator is executed under its part: either no honest device can have written that part, or none
can be stopped by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import digest_bytes
from inspector.dispute.messages import CheckedProver, Failure, Traffic, constant_of, shown
from inspector.dispute.operators import settle_operators
from inspector.dispute.prover import Prover
from inspector.dispute.ruling import Ruling, StepTask
from monitor import numerics
from monitor.declaration.statement import Declaration
from monitor.programs.program import Program
from monitor.replay.steps import execution_of
from monitor.sharding import Layout
from monitor.transcript import Leaf

__all__ = ["Follower", "Recorded", "rule_on_step", "taken_by"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A step as its run commits to it, with the program that its leaf names."""

    declared: Declaration
    leaf: Leaf
    program: Program


class Follower(CheckedProver):
    """A party that answers for a few steps of a run, whose leaves are known."""

    def __init__(self, name: str, prover: Prover, leaves: Mapping[int, Leaf], layout: Layout, traffic: Traffic) -> None:
        super().__init__(name, prover, size=0, root=b"", layout=layout, traffic=traffic)
        self._leaves = leaves

    def leaf(self, step: int) -> Leaf:
        return self._leaves[step]

    def took_an_operator(self, step: int) -> bool:
        """Whether it has anything of a step."""
        return self.asked(lambda: self._prover.trace(step)).size > 0


def rule_on_step(
    recorder: CheckedProver, follower: Follower, step: Recorded, stated: bytes, traffic: Traffic
) -> Ruling:
    """Rule between the leaf that a run commits to, and the leaf that a follower says that the step leads to.

    Args:
        stated: the follower's leaf, encoded; empty where it says that the step cannot be taken as it was recorded.

    Raises:
        Failure: a party gives no valid answer, and has lost.
    """
    leaf = step.leaf
    try:
        other = Leaf.decode(stated, step.declared.layout) if stated else leaf
        taken = taken_by(other, leaf)
    except EvidenceError as error:
        return _against(follower, f"its leaf is malformed: {error}", "leaf")
    if taken.execution != leaf.execution:  # which a replay takes from the recorded leaf
        return _against(
            follower, "the numbers or the program of its leaf are not those of the recorded leaf", "numbers"
        )
    if taken != leaf:
        return _against(
            follower,
            "the batch or the log of its leaf is not that of the recorded leaf, although it had to take both from "
            "there",
            "inputs",
        )
    if stated and other == leaf:
        return _against(
            follower, f"it objects to step {leaf.step}, but states the same leaf that was recorded", "objection"
        )
    if leaf.flop != other.flop:
        right = {recorder.name: leaf.flop, follower.name: other.flop}
        guilty = tuple(name for name, flop in right.items() if flop != step.program.flop)
        return Ruling(guilty=guilty, operator=None, text=f"the program needs {step.program.flop} FLOP", case="FLOP")
    return _rule_by_operators(recorder, follower, step, bool(stated), traffic)


def _rule_by_operators(
    recorder: CheckedProver, follower: Follower, step: Recorded, is_reached: bool, traffic: Traffic
) -> Ruling:
    """Rule by the first operator at which the parties differ, under the rounding log that both took."""
    number, parties = step.leaf.step, (recorder, follower)
    try:
        log = b""
        if step.leaf.log != str(digest_bytes("rounding-log", log)):
            log = shown(parties, f"rounding log of step {number}", lambda party: party.log(number))
        if fault := _fault_of_log(log, step.program, step.declared.numerics):
            return _against(recorder, fault, "log")
        if not is_reached and not follower.took_an_operator(number):
            text = f"what {follower.name} has of the step does not say which part of the log stopped it"
            return Ruling(guilty=(), operator=None, text=text, case="not opened")
        task = StepTask(
            step=number,
            declared=step.declared,
            layout=step.declared.layout,
            program=step.program,
            execution=execution_of(step.leaf),
            batch=lambda: shown(parties, f"batch of step {number}", lambda party: party.batch(number)),
            constant=lambda place: constant_of(parties, number, step.program, place),
            log=log,
            recorder=recorder.name,
            stopped="" if is_reached else follower.name,
        )
        if not is_reached and follower.trace(number).size == len(task.specification()):
            return _against(follower, "it says that the log stops it, but it executed all operators", "objection")
        return settle_operators(parties, task, traffic)
    except Failure:
        raise
    except EvidenceError as error:
        return Ruling(guilty=(), operator=None, text=str(error), case="not opened")


def _against(party: CheckedProver, text: str, case: str) -> Ruling:
    return Ruling(guilty=(party.name,), operator=None, text=text, case=case)


def _fault_of_log(log: bytes, program: Program, declared: str) -> str:
    """Why a rounding log is none of the program's; empty where it may be."""
    try:
        logged = numerics.logged_calls(declared, log)
    except EvidenceError as error:
        return f"its rounding log is malformed: {error}"
    most = len(program.calls)
    if strange := [call for call in logged if call >= most]:
        return f"its rounding log names operator {min(strange)}, but the program has only {most} operators"
    if strange := [call for call in logged if not program.calls[call]["results"]]:
        return f"its rounding log names operator {min(strange)}, which has no results that could be rounded"
    return ""


def taken_by(leaf: Leaf, other: Leaf) -> Leaf:
    """A leaf with another leaf's results: state, loss, FLOP, and what the step read of values.

    What is left are the batch, the numbers, the program and the log that its step took, and whether it states values.
    """
    mine, theirs = execution_of(leaf), execution_of(other)
    values = theirs.values if bool(mine.values) is bool(theirs.values) else mine.values
    execution = replace(mine, reads=theirs.reads, values=values)
    return replace(leaf, state=other.state, loss=other.loss, flop=other.flop, execution=execution)
