"""What each kind of ``curve`` comes to, and the numbers of its lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

__all__ = [
    "AnySummary",
    "ChipsSummary",
    "EvasionSummary",
    "MarkedSummary",
    "SamplesSummary",
    "Series",
    "Strategy",
    "StretchSummary",
    "Summary",
    "VisitedStrategy",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a figure comes to; no honest lab is accused, by construction."""

    false_alarm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StretchSummary(Summary):
    """Of p_d(k)/p over the grid, the least, and the limit."""

    minimum: float
    limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipsSummary(Summary):
    """Runs that the largest fleet cannot do."""

    left_out: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesSummary:
    """One inspection, and the chips for the confidence, None if out of reach."""

    used: int
    catch: float
    false_alarm: float = 0.0
    needed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedSummary:
    """The same, with the detection at the mark."""

    used: int
    catch: float
    false_alarm: float = 0.0
    detection: float
    needed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A strategy that a campaign measured."""

    name: str
    detection: float
    low: float
    high: float
    closed_form: float | None
    false_alarm: float
    excess: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitedStrategy:
    """A strategy in closed form, by whole visits during the run, and as Eq. 1 has it for T/T_m of them."""

    name: str
    detection: float
    low: float
    high: float
    closed_form: float | None
    false_alarm: float
    visits: int
    eq_1: float
    excess: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvasionSummary:
    """Strategies side by side."""

    strategies: Sequence[Strategy | VisitedStrategy]


@dataclass(frozen=True, slots=True)
class Series:
    """The numbers of a line; None where there is none."""

    name: str
    x: Sequence[float | None]
    y: Sequence[float | None]


AnySummary = Summary | SamplesSummary | MarkedSummary | EvasionSummary
