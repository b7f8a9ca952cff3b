"""What a lie is here: an act that makes something declared untrue, and how likely it escapes an inspection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from inspector.probability.detection import detection, log_miss_without_replacement

__all__ = ["BESIDE", "DEFERRED", "GUARD_ROWS", "Lie"]

DEFERRED = {
    "A16": "evidence older than the work: a live challenge",
    "A17": "chip folders copied and restored: a live challenge",
    "A18": "weights swapped in a segment without a snapshot: odds in the verdict",
    "A19": "a lab that declares nothing: draws among all labs",
    "A20": "a folder swapped after a REJECT: providers as servers",
}
"""Rows whose lies may be accepted, and what is missing; they are counted apart."""

GUARD_ROWS = {
    "snapshot moment": ("A1", "A2"),
    "verified manifest": ("A3",),
    "fresh draw": ("A4",),
    "metered work": ("A5", "A8"),
    "undeclared runs": ("A6", "A7"),
    "plain memory": ("A9",),
    "numbers bound": ("A10", "A12"),
    "changes declared": ("A11",),
    "numbers equal": ("A12",),
    "products counted": ("A13",),
    "agreed data": ("A14",),
    "open epoch": ("A15",),
    "direct paths": ("A21",),
}
"""Which rows each guard stands for: with it off, at least one of them must be found."""
BESIDE = {
    "products counted": ("past counted",),
    "metered work": ("snapshots inside steps",),
    "undeclared runs": ("snapshot moment",),
}
"""Guards that are off with another one: under a cap, weights that were supplied are never accepted anyway; and
snapshots fall between the operators of hidden steps, and while a chip holds memory of no run, too."""


@dataclass(slots=True, kw_only=True)
class Lie:
    """One lie of a lab.

    Attributes:
        row: the row of the list of attacks, or what was tampered with.
        on_chips: whether only chips show it; else the transcript does, to everyone.
        chips: whole ticks of each chip in which it could be seen, by the chip's number. Time is the chip's own.
        certain: whether each of these chips shows it for certain; else only in snapshots within those ticks.
        told: whether it (still) makes anything untrue, where that is not known from the chips.
        expected: chance of escape, where the lie knows it better.
    """

    row: str
    on_chips: bool = False
    chips: Counter[int] = field(default_factory=Counter)
    certain: bool = False
    told: Callable[[], bool] | None = None
    expected: float | None = None

    def hit(self, chip: int, ticks: int = 1) -> None:
        """Note that a chip could see it for some ticks."""
        self.chips[chip] += ticks

    @property
    def effective(self) -> bool:
        """Whether it made anything untrue."""
        return any(self.chips.values()) if self.told is None else self.told()

    @property
    def deferred(self) -> bool:
        """Whether it may be accepted for now."""
        return self.row in DEFERRED

    def escape(self, chips: int, samples: int, rate: Fraction) -> float:
        """Highest chance that an inspection does not see it, by the closed form for chips drawn without replacement."""
        if self.expected is not None:
            return self.expected
        if not self.on_chips or not self.chips:
            return 0.0
        ticks = min(self.chips.values())
        catch = 1.0 if self.certain else 1 - (1 - float(rate)) ** ticks
        miss = log_miss_without_replacement(chips=chips, used=len(self.chips), samples=samples, catch=catch)
        return 1 - float(detection(miss))
