"""What an audit has found as evidence: the provider's signed answers about one step, which anybody runs again.

    {"audits": [evidence of a game with one party each, …], "format": "chipwitness/audit/1", "step": N}

The provider opens, under its signature, the state before the step, its program, its batch and the step's leaf; all are
compared with the client's signed order, and the step is run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from firmware_sim import limits
from firmware_sim.errors import ChipwitnessError, EvidenceError
from firmware_sim.evidence import SigningKey, VerifyingKey, canonical
from inspector.delegation.errand import checked_state
from inspector.dispute.claim import Claim
from inspector.dispute.game import MakeLaw, Party, Terms, names_of, opened_result, record, replay, verified, worth
from inspector.dispute.messages import Absent, Failure, Traffic, absence, constant_of
from inspector.dispute.referee import PARTIES, Seat, open_claim
from inspector.dispute.subject import is_ordered
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome, Reason, Verdict
from monitor.programs.program import Program
from monitor.replay.repetition import ProgramTraining
from monitor.replay.steps import zeros
from monitor.transcript.orders import Order

__all__ = ["check_audit", "collect", "is_audit"]

_FORMAT = "chipwitness/audit/1"
_MOST = 256


@dataclass(slots=True)
class _Step:
    """A law for one provider: a step of its finished claim about an order, run again.

    A step that states another program, number or batch than was ordered, or a result to which it does not lead, is the
    provider's fault, and so is a signed refusal to open what it committed to. Where this machine cannot run the step,
    nothing is decided.
    """

    seats: Sequence[Seat]
    order: Order
    step: int
    traffic: Traffic
    name: str
    guilty: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    prevails: tuple[str, ...] = ()

    def play(self) -> Verdict:
        """REJECT: the step is wrong, or the provider is absent. ACCEPT: it is right. INCONCLUSIVE: it cannot be run."""
        (seat,) = self.seats
        outcome, case = Outcome.REJECT, "no valid answer"
        try:
            case = self._case(open_claim(seat, self.traffic))
            text = f"step {self.step} of {seat.name}, run again, {_TEXTS[case]}"
            outcome = {"": Outcome.ACCEPT, "task": Outcome.INCONCLUSIVE}.get(case, Outcome.REJECT)
            self.guilty = (seat.name,) if outcome is Outcome.REJECT else ()
        except Absent as error:
            text = absence(seat.name, error.silence, self.name)
            case, self.absent = "absent", (seat.name,)
        except Failure as error:
            text, self.guilty = str(error), (seat.name,)
        except (ChipwitnessError, RuntimeError, LookupError, TypeError, ValueError) as error:
            text, case, outcome = f"this machine cannot run the step: {error!a:.200}", "not run", Outcome.INCONCLUSIVE
        evidence: dict[str, Any] = {"step": self.step, "case": case or None, "bytes": self.traffic.bytes}
        evidence |= {kind: ", ".join(getattr(self, kind)) or None for kind in PARTIES}
        return Verdict(outcome=outcome, reasons=(Reason(guard="delegation", text=text),), evidence=evidence)

    def _case(self, claim: Claim) -> str:
        if claim.declared != self.order.declaration or not claim.finished:
            return "task"
        if not self.step:
            return "" if str(claim.leaf(0).state.root) == self.order.declaration.origin.state else "start"
        stated, ordered = claim.leaf(self.step), self.order.steps[self.step - 1]
        if not is_ordered(claim, stated, ordered):
            return "order"
        training = ProgramTraining(self.order.declaration)
        state = checked_state(claim, self.step - 1)
        training.restore(state, self.step - 1)
        before = None if self.step == 1 else self.order.steps[self.step - 2].execution.program
        training.left = zeros(state) if before is None else claim.program(before).absent
        program = self._program(claim, ordered.execution.program)
        mine, _ = training.take_step(program, ordered.execution, claim.batch(self.step), b"", b"")
        reads = [None if each.execution is None else each.execution.reads for each in (mine, stated)]
        return "" if (mine.state, mine.loss, reads[0]) == (stated.state, stated.loss, reads[1]) else "result"

    def _program(self, claim: Claim, digest: str) -> Program:
        program = claim.program(digest)
        constants = [constant_of([claim.party], self.step, program, n) for n in range(len(program.constants))]
        return replace(program, constants=tuple(constants))


_TEXTS = {
    "": "leads to what it has signed",
    "task": "is not of the ordered training, or the training is unfinished",
    "start": "does not begin where it was ordered",
    "order": "states a program, number or batch that was not ordered",
    "result": "does not lead to what it has signed",
}


def collect(parties: Sequence[Party], order: Order, task: str, step: int, key: SigningKey, seconds: int) -> bytes:
    """Have providers open a step, and sign what they have answered; empty where that convicts none of them.

    Args:
        task: SHA-256 of the order, in hex.
        key: the client's.
    """
    terms, now = Terms(seconds=seconds, task=task), datetime.now(UTC)
    played = [record([party], _law(order, step), key, terms, now) for party in parties]
    found = [each.evidence for each in played if each.law.guilty]
    return canonical.encode({"audits": found, "format": _FORMAT, "step": step}) if found else b""


def is_audit(data: bytes) -> bool:
    """Whether a file begins as an audit's evidence does, whatever it is worth."""
    return data.startswith(b'{"audits":')


def check_audit(data: bytes, trust: Trust) -> Verdict:
    """Run the step again from the evidence alone; the verdict that this gives, as ``check_game`` does."""
    return verified("audit", lambda: _checked(data, trust))


def _checked(data: bytes, trust: Trust) -> Verdict:
    parsed = canonical.decode(data, most=limits.BUNDLE_BYTES)
    if not isinstance(parsed, dict) or set(parsed) != {"audits", "format", "step"} or parsed["format"] != _FORMAT:
        raise EvidenceError(f"not an audit of the form {_FORMAT}")
    step, audits = parsed["step"], parsed["audits"]
    if type(step) is not int or not isinstance(audits, list) or not 0 < len(audits) <= _MOST:
        raise EvidenceError("an audit must be about one step of one or more providers")
    verdicts = [_one(each, step, trust) for each in audits]
    worst = next((each for each in verdicts if each.outcome is Outcome.REJECT), verdicts[0])
    guilty = sorted({each.evidence["guilty"] for each in verdicts} - {None})
    reasons = tuple(reason for each in verdicts for reason in each.reasons)
    return Verdict(outcome=worst.outcome, reasons=reasons, evidence={**worst.evidence, "guilty": guilty})


def _one(game: Any, step: int, trust: Trust) -> Verdict:
    _, raws, referee, terms = opened_result(game)
    keys = [VerifyingKey(bytes.fromhex(raw)) for raw in raws]
    parties = names_of(keys, trust)
    if len(parties) != 1 or not terms.task:
        raise EvidenceError("an audit must be about one provider's run of a task")
    order = trust.about(terms.task).order
    assert order is not None
    if not 0 <= step <= len(order.steps):
        raise EvidenceError(f"the task has {len(order.steps)} steps, so there is no step {step}")
    verdict = replay(game, list(zip(parties, keys, strict=True)), _law(order, step), trust.witnesses).verdict
    return worth(verdict, is_known=referee in trust.inspectorates)


def _law(order: Order, step: int) -> MakeLaw:
    return lambda seats, traffic, name, branching: _Step(seats, order, step, traffic, name)
