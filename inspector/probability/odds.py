"""The odds of replaying some segments of a run: how likely the best-informed lab gets away with a violation.

That lab knows the segments, the snapshots that its chips have taken, the rule of the draw, and everything but the
secret that decides it. It puts its lie where the fewest segments show it, and outside every segment that is replayed
whatever is drawn. Of the others ``drawn`` are taken uniformly and without replacement, so that a lie which touches t
of M segments escapes with probability C(M - t, drawn) / C(M, drawn): the hypergeometric distribution, of Shavit 2023,
section 4.2, where the segments are exchangeable. Steps are steps of training: an evaluation changes no state, and what
a segment could hide is the training in it. Segments that are replayed for their snapshots only lower it.
They count for nothing here, since the lab knows which hold none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np

from firmware_sim.errors import CallerError
from inspector.probability._logspace import log_none_drawn, reals

__all__ = ["KINDS", "Audit", "Violation", "chain", "usual_violations"]

KINDS: Mapping[str, str] = {
    "together": "edited steps in one place",
    "scattered": "edited steps, at most one to a segment",
    "data": "of the steps on undeclared data",
    "swap": "all weights swapped in one step",
}
"""What a lab may do to the steps of a run, by kind."""
_USUAL_SHARE = Fraction(1, 100)
_USUAL_DATA = Fraction(1, 20)
_MOST_STEPS = 10**8
_TIE = 1e-9
"""A chance that is equal to what is allowed, but for rounding, is allowed."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One way to depart from the declared training.

    Attributes:
        kind: one of ``KINDS``.
        amount: steps, or for ``data`` the share of all steps, in (0, 1]; 1 for ``swap``.
    """

    kind: str
    amount: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CallerError(f"there is no violation {self.kind!a:.40}; kinds: {', '.join(KINDS)}")
        is_share = self.kind == "data"
        if self.amount <= 0 or (self.amount > 1 if is_share else self.amount.denominator != 1):
            what = "a share in (0, 1]" if is_share else "a whole number of steps"
            raise CallerError(f"{self.kind} takes {what}, not {float(self.amount):g}")
        if self.kind == "swap" and self.amount != 1:
            raise CallerError("swap takes no number, because it happens in one step")

    @classmethod
    def parse(cls, text: str) -> Violation:
        """Read ``swap``, ``together:K``, ``scattered:K`` or ``data:SHARE``; CallerError on anything else."""
        kind, _, amount = text.partition(":")
        try:
            if not amount and kind in KINDS and kind != "swap":
                raise ValueError
            if len(amount) > 30 or "e" in amount.lower():
                raise ValueError
            return cls(kind, Fraction(amount) if amount else Fraction(1))
        except (ValueError, ZeroDivisionError):
            raise CallerError(
                f"{text!a:.60} is not a violation such as swap, together:100, scattered:100 or data:0.05"
            ) from None

    def __str__(self) -> str:
        """It as ``parse`` reads it: without an exponent."""
        return self.kind if self.kind == "swap" else f"{self.kind}:{Decimal(f'{float(self.amount):.12g}'):f}"

    def text(self) -> str:
        """It in words."""
        if self.kind == "data":
            return f"{100 * float(self.amount):.3g} % {KINDS[self.kind]}"
        if self.kind == "swap":
            return KINDS[self.kind]
        steps = int(self.amount)
        return f"{steps:,} {KINDS[self.kind]}" if steps > 1 else "1 edited step"


def usual_violations(steps: int) -> tuple[Violation, ...]:
    """What a verdict speaks of for a run of so many steps: a hundredth of them, a twentieth of the data, and a swap."""
    some = Fraction(max(1, math.ceil(steps * _USUAL_SHARE)))
    return (
        Violation("together", some),
        Violation("scattered", some),
        Violation("data", _USUAL_DATA),
        Violation("swap"),
    )


@dataclass(frozen=True)
class Audit:
    """A run's segments, and how many of them are replayed.

    Attributes:
        lengths: steps of training in each segment, in their order; none where it holds evaluations alone.
        certain: the segments, by number, that are replayed whatever is drawn; every lab knows them.
        drawn: how many of the others are drawn uniformly, without replacement, by a secret that no lab knows.
    """

    lengths: Sequence[int]
    certain: frozenset[int] = frozenset()
    drawn: int = 0

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 0:
            raise CallerError("a run has at least one segment, and no segment has fewer than 0 steps")
        if not all(0 <= index < len(self.lengths) for index in self.certain):
            raise CallerError(f"the segments are numbered 0 … {len(self.lengths) - 1}")
        if not 0 <= self.drawn <= self.others:
            raise CallerError(f"cannot draw {self.drawn:,} of {self.others:,} segments")

    @property
    def steps(self) -> int:
        """Steps of training of the run."""
        return sum(self.lengths)

    @property
    def others(self) -> int:
        """Number M of segments among which is drawn."""
        return len(self.lengths) - len(self.certain)

    @cached_property
    def _stretches(self) -> list[list[int]]:
        """Lengths of the segments with training that may stay unseen, as runs of neighbours."""
        seen = [entry for entry in enumerate(self.lengths) if entry[1]]
        parts = groupby(seen, key=lambda entry: entry[0] in self.certain)
        return [[length for _, length in part] for is_certain, part in parts if not is_certain]

    def touched(self, violation: Violation) -> int | None:
        """The least number of segments that show it; None if one that is replayed for certain does whatever is done."""
        if violation.kind == "data":
            wanted = math.ceil(self.steps * violation.amount)
            longest = np.cumsum(sorted((each for part in self._stretches for each in part), reverse=True))
            count = int(np.searchsorted(longest, wanted)) + 1
            return count if count <= len(longest) else None
        steps = int(violation.amount)
        if violation.kind == "scattered":
            return steps if steps <= sum(map(len, self._stretches)) else None
        return min(filter(None, (_fewest(part, steps) for part in self._stretches)), default=None)

    def escape(self, violation: Violation, *, drawn: int | None = None) -> float:
        """Probability that the best-informed lab's violation touches no segment that is replayed.

        Args:
            drawn: in place of ``self.drawn``.
        """
        touched = self.touched(violation)
        return 0.0 if touched is None else _missed(self.others, touched, self.drawn if drawn is None else drawn)

    def needed(self, violation: Violation, confidence: float) -> int:
        """The fewest draws that let the violation escape with probability 1 - ``confidence`` at most."""
        most = _allowed(confidence)
        touched = self.touched(violation)
        if touched is None:
            return 0
        low, high = 0, self.others
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _missed(self.others, touched, middle) <= most else (middle + 1, high)
        return low

    def price(self, drawn: int) -> int:
        """Steps that so many draws make one device replay, with what is replayed for certain: expected, rounded up."""
        always = sum(self.lengths[index] for index in self.certain)
        return always + (math.ceil(Fraction(drawn * (self.steps - always), self.others)) if self.others else 0)

    def shown(self, confidence: float) -> int:
        """The least number of false segments, wherever they lie, that would have shown up with the confidence.

        One more than there are where no such number would.
        """
        most = _allowed(confidence)
        low, high = 1, self.others + 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _missed(self.others, middle, self.drawn) <= most else (middle + 1, high)
        return low

    def table(self, violations: Iterable[Violation], confidence: float) -> list[dict[str, Any]]:
        """For each violation: the segments that it touches, its chance of escape, and what the confidence would cost.

        Keys: ``violation``, ``text``, ``segments_touched`` (None where it cannot but show), ``escapes``,
        ``needed_draws``, ``needed_steps`` (on one device) and ``needed_share`` of the run's steps.
        """
        rows = []
        for violation in violations:
            needed = self.needed(violation, confidence)
            steps = self.price(needed)
            rows.append(
                {
                    "violation": str(violation),
                    "text": violation.text(),
                    "segments_touched": self.touched(violation),
                    "escapes": self.escape(violation),
                    "needed_draws": needed,
                    "needed_steps": steps,
                    "needed_share": steps / self.steps if self.steps else 0.0,
                }
            )
        return rows


def chain(steps: int, every: int = 1, *, first: bool, drawn: int = 0) -> Audit:
    """The audit of a run of which only the numbers are known, or of any chain of hashes of its steps.

    Args:
        steps: links of the chain.
        every: steps from one state that is kept to the next; 1 where each link can be audited by itself.
        first: whether the first segment is always replayed.

    Raises:
        CallerError: numbers that no run has.
    """
    if not (1 <= steps <= _MOST_STEPS and every >= 1):
        raise CallerError(
            f"a chain must have 1 to {_MOST_STEPS:,} steps, and at least 1 step from one kept state to the next"
        )
    rest = steps % every
    lengths = [every] * (steps // every) + ([rest] if rest else [])
    return Audit(lengths, frozenset({0}) if first else frozenset(), drawn)


def _allowed(confidence: float) -> float:
    reals("confidence", confidence, low=0, high=1, open_low=True)
    if confidence >= 1:
        raise CallerError("confidence must be below 1")
    return (1 - confidence) * (1 + _TIE)


def _missed(others: int, touched: int, drawn: int) -> float:
    return math.exp(log_none_drawn(others, touched, drawn))


def _fewest(lengths: Sequence[int], steps: int) -> int | None:
    """The fewest neighbouring segments that hold so many steps; None if all together hold fewer."""
    ends = np.concatenate(([0], np.cumsum(lengths)))
    if steps > ends[-1]:
        return None
    stops = np.searchsorted(ends, ends[:-1] + steps)
    reach = stops < len(ends)
    return int((stops - np.arange(len(lengths)))[reach].min())
