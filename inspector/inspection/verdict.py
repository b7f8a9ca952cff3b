"""What an inspection concludes."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn

__all__ = ["Outcome", "Reason", "Verdict"]


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
    where: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """An outcome with reasons and with evidence that a third party can check; it has no truth value."""

    outcome: Outcome
    reasons: tuple[Reason, ...]
    evidence: dict[str, Any]

    def __bool__(self) -> NoReturn:
        raise TypeError("a Verdict has no truth value; compare its outcome")

    @classmethod
    def of(
        cls,
        findings: Iterable[Reason],
        doubts: Iterable[Reason],
        evidence: dict[str, Any],
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

    def to_json(self) -> dict[str, Any]:
        """Return ``outcome``, ``reasons`` (text with guard and place) and ``evidence``."""
        return {
            "outcome": self.outcome.value,
            "reasons": [{"guard": reason.guard, "text": reason.text, **reason.where} for reason in self.reasons],
            "evidence": self.evidence,
        }
