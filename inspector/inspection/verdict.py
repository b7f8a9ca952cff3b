"""What an inspection concludes.

Collects what the guards find, so that one bad piece of evidence does not hide the next.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

from firmware_sim import Unaudited
from firmware_sim.errors import CallerError, ChipwitnessError, Damaged, EvidenceError, Unreadable
from inspector.inspection.guards import Guard
from inspector.inspection.trust import NotCountersigned

__all__ = ["COPY", "Findings", "Outcome", "Reason", "Verdict"]


class Outcome(enum.Enum):
    """ACCEPT and REJECT are about the lab; INCONCLUSIVE says that nothing could be concluded."""

    ACCEPT = "ACCEPT"
    REJECT = "REJECT"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_code(self) -> int:
        """Exit code of a command that ends with this outcome."""
        return {Outcome.ACCEPT: 0, Outcome.REJECT: 1, Outcome.INCONCLUSIVE: 3}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One finding: the guard that found it, a sentence, and where (chip, record, run, step, sample, operator)."""

    guard: str
    text: str
    where: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An outcome with reasons and with evidence that a third party can check; it has no truth value.

    Raises:
        CallerError: it rejects, or leaves open, and says not why.
    """

    outcome: Outcome
    reasons: tuple[Reason, ...]
    evidence: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.outcome is not Outcome.ACCEPT and not self.reasons:
            raise CallerError(f"a verdict {self.outcome.value} needs a reason")

    def __bool__(self) -> NoReturn:
        raise TypeError("a Verdict has no truth value; compare its outcome")

    @classmethod
    def of(
        cls,
        findings: Iterable[Reason],
        doubts: Iterable[Reason],
        evidence: Mapping[str, Any],
        *,
        accept: str,
        scope: str = "",
    ) -> Verdict:
        """REJECT if anything was found, else INCONCLUSIVE if anything is open, else ACCEPT.

        Args:
            accept: what an acceptance says.
            scope: what it does not say, as a second reason.
        """
        found, open_points = tuple(findings), tuple(doubts)
        if found:
            return cls(outcome=Outcome.REJECT, reasons=found + open_points, evidence=evidence)
        if open_points:
            return cls(outcome=Outcome.INCONCLUSIVE, reasons=open_points, evidence=evidence)
        reasons = [Reason(guard="all", text=accept)]
        if scope:
            reasons.append(Reason(guard="scope", text=scope))
        return cls(outcome=Outcome.ACCEPT, reasons=tuple(reasons), evidence=evidence)

    def joined(
        self, reasons: Iterable[Reason], labs: Mapping[str, Outcome], evidence: Mapping[str, Any], *, note: str = ""
    ) -> Verdict:
        """This verdict with further findings, which make it worse for a lab or leave it as it was.

        Args:
            reasons: why, in front of the others; what an acceptance said counts no more.
            labs: outcome of each lab for which it may be worse.
            evidence: is added.
            note: what an acceptance says in addition.

        Raises:
            CallerError: a lab is worse off, and no reason is about it.
        """
        reasons = tuple(reasons)
        _require_reasons(reasons, labs)
        order = (Outcome.ACCEPT, Outcome.INCONCLUSIVE, Outcome.REJECT)
        outcome = max((self.outcome, *labs.values()), key=order.index)
        by_lab = dict(self.evidence.get("labs", {}))
        for lab, worse in labs.items():
            by_lab[lab] = max(Outcome(by_lab.get(lab, "ACCEPT")), worse, key=order.index).value
        kept = self.reasons if self.outcome is not Outcome.ACCEPT or outcome is self.outcome else ()
        if outcome is Outcome.ACCEPT and note:
            kept = (replace(kept[0], text=f"{kept[0].text}; {note}"), *kept[1:])
        more = {**self.evidence, **evidence, "labs": by_lab}
        return Verdict(outcome=outcome, reasons=(*reasons, *kept), evidence=more)

    def to_json(self) -> dict[str, object]:
        """Return ``outcome``, ``reasons`` (text with guard and place) and ``evidence``."""
        return {
            "outcome": self.outcome.value,
            "reasons": [{"guard": reason.guard, "text": reason.text, **reason.where} for reason in self.reasons],
            "evidence": self.evidence,
        }


def _require_reasons(reasons: Iterable[Reason], labs: Mapping[str, Outcome]) -> None:
    blamed = {lab for lab, worse in labs.items() if worse is not Outcome.ACCEPT}
    if unsaid := sorted(blamed - {reason.where.get("lab") for reason in reasons}):
        raise CallerError(f"a verdict on lab {unsaid[0]} needs a reason")


COPY = "copy"
"""In place of a guard, where a copy is damaged."""

Result = TypeVar("Result")


class Findings:
    """Findings (they reject) and doubts (they leave the verdict open) of one inspection.

    Attributes:
        about: joins the place of what is found: the lab that answers for records of a chip that changes hands.
    """

    def __init__(self) -> None:
        self.found: list[Reason] = []
        self.doubts: list[Reason] = []
        self.about: dict[str, object] = {}

    def add(self, guard: Guard, text: str, **where: Any) -> None:
        """Record a finding of that guard."""
        self.found.append(Reason(guard=guard.value, text=text, where={**where, **self.about}))

    def doubt(self, text: str, **where: Any) -> None:
        """Record why nothing can be concluded."""
        self.doubts.append(Reason(guard="evidence", text=text, where={**where, **self.about}))

    def _open(self, error: ChipwitnessError, where: dict[str, object]) -> None:
        """Record why nothing can be concluded; of a damaged copy, that another one is needed."""
        guard = COPY if isinstance(error, Damaged) else "evidence"
        self.doubts.append(Reason(guard=guard, text=str(error), where={**where, **self.about}))

    def check(self, guard: Guard, function: Callable[[], Result], **where: Any) -> Result | None:
        """Call the function; an EvidenceError is a finding of that guard, and the result is then None.

        What is too long to audit, or cannot be read here, is a doubt.
        """
        try:
            return function()
        except (Unaudited, Unreadable) as error:
            self._open(error, where)
            return None
        except EvidenceError as error:
            self.add(guard, str(error), **where)
            return None

    def read(self, function: Callable[[], Result], **where: Any) -> Result | None:
        """Call a function without which nothing can be checked; an EvidenceError rejects.

        What was not countersigned, or cannot be read here, is a doubt.
        """
        try:
            return function()
        except (NotCountersigned, Unreadable) as error:
            self._open(error, where)
            return None
        except EvidenceError as error:
            self.found.append(Reason(guard="evidence", text=str(error), where={**where, **self.about}))
            return None
