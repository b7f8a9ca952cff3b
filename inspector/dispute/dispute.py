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

from dataclasses import dataclass
from typing import Any

from firmware_sim.errors import EvidenceError
from inspector.dispute.messages import CheckedProver, Failure, Traffic
from inspector.dispute.operators import Ruling, compare, settle_operators
from inspector.dispute.prover import Prover
from inspector.dispute.subject import Disputed, rule_on_declarations
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome, Reason, Verdict
from monitor.replay.steps import execution_of
from monitor.transcript import Leaf, RunFolder

__all__ = ["Disputant", "settle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Disputant:
    """One lab's finished run: the verified folder, and the party that answers for it."""

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
        step = _first_result(first.run, second.run) if step is None else step
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


def _first_result(first: RunFolder, second: RunFolder) -> int | None:
    """The first step that both take from equal states, and of which they say otherwise what it computed."""
    for one, other in zip(first.load_steps()[0][1:], second.load_steps()[0][1:], strict=True):
        results = [(leaf.state, leaf.loss, execution_of(leaf).reads) for leaf in (one, other)]
        if results[0] != results[1]:
            return one.step
    return None


def _settle_step(parties: tuple[CheckedProver, CheckedProver], step: int, task: Disputed, traffic: Traffic) -> Ruling:
    leaves = {party.name: party.leaf(step) for party in parties}
    if step == 0:
        right = {name: task.starts_right(leaf) for name, leaf in leaves.items()}
        return compare(right, "initialisation", "initial state")
    ruling = task.examine(step, leaves)
    if ruling is not None:
        return ruling
    return settle_operators(parties, task.at(step), traffic)


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
