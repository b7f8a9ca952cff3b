"""Counts of one controlled training step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["Decided", "OperatorCount", "Statistics"]


@dataclass(slots=True, kw_only=True)
class OperatorCount:
    """Elements rounded and entries logged for one ATen operator."""

    elements: int = 0
    entries: int = 0


@dataclass(slots=True, kw_only=True)
class Decided:
    """What a log decided in one rounded result that was replayed.

    Attributes:
        call: number of the ATen call in its step.
        kind: class of the operator: a sum of products of ``terms`` terms, or ``function`` with none.
        logged: entries.
        free: those among them within 2β of this device's midpoint: the bounds of two devices leave both results.
        turned: entries that this device alone would have decided the other way.
        coarse: those among them whose bound takes half of the result's bits or more: they change what is computed.
    """

    call: int
    operator: str
    kind: str
    terms: int
    logged: int
    free: int
    turned: int = 0
    coarse: int = 0


@dataclass(slots=True, kw_only=True)
class Statistics:
    """Counts of a session.

    Attributes:
        calls: ATen calls.
        decided: what the log decided, for each rounded result with entries (replay only).
        contradictions: entries that broke a rule and were tolerated, as a calibrated bound allows.
        recomputed: entries that broke a rule until the exact value of their element cleared the recorder.
        open: entries, or missing ones, of which a referee cannot tell whether an honest device wrote them.
        operators: counts for each ATen operator that rounded something.
        items: values that the training code read with ``.item()``, as (call, value): inputs of its control flow.
    """

    calls: int = 0
    decided: list[Decided] = field(default_factory=list)
    contradictions: int = 0
    recomputed: int = 0
    open: int = 0
    operators: dict[str, OperatorCount] = field(default_factory=dict)
    items: list[tuple[int, float]] = field(default_factory=list)
    entropy_bits: float = 0.0

    @property
    def forced(self) -> int:
        """Logged decisions that this device would have taken the other way."""
        return sum(each.turned for each in self.decided)

    @property
    def elements(self) -> int:
        """Elements that were rounded to the grid."""
        return sum(count.elements for count in self.operators.values())

    @property
    def entries(self) -> int:
        """Logged decisions."""
        return sum(count.entries for count in self.operators.values())

    def rounded(self, operator: str, elements: int, entries: int) -> None:
        """Add one rounded result; its entropy is that of positions drawn at random plus one bit a direction."""
        count = self.operators.setdefault(operator, OperatorCount())
        count.elements += elements
        count.entries += entries
        if 0 < entries < elements:
            p = entries / elements
            self.entropy_bits += -elements * (p * math.log2(p) + (1 - p) * math.log2(1 - p))
        self.entropy_bits += entries
