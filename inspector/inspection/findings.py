"""Collects what the guards find, so that one bad piece of evidence does not hide the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from firmware_sim import Unaudited
from firmware_sim.errors import ChipwitnessError, Damaged, EvidenceError, Unreadable
from inspector.inspection.guards import Guard
from inspector.inspection.trust import NotCountersigned
from inspector.inspection.verdict import Reason

__all__ = ["COPY", "Findings"]

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
