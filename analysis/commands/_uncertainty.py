"""What the commands share that take uncertain inputs: options, draws, words."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from analysis.commands._common import count, number
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from inspector.probability.distributions import Distribution
    from inspector.probability.uncertainty import Band

__all__ = [
    "UNCERTAIN",
    "OneBand",
    "add_draws",
    "band_text",
    "banded",
    "described",
    "fixed",
    "is_uncertain",
    "ranged",
    "within",
]

UNCERTAIN = (
    " A number marked ~ may be uncertain: LOW/MEDIAN/HIGH (5, 50 and 95 %), lognormal(LOW,HIGH) (5 and 95 %), "
    "triangular(LOW,MODE,HIGH), uniform(LOW,HIGH) or table(VALUE:WEIGHT,...). The answer is then a median with its 5 % "
    "and 95 % quantile; inputs are drawn independently."
)

_CHOSEN = ("period", "confidence")
"""Inputs that an inspectorate chooses, so that they are no assumptions."""


def within(kind: str) -> Callable[[str], Any]:
    """Return an argparse type: a number as a float, an uncertain one as a distribution."""

    def read(text: str) -> Any:
        try:
            return number(text)
        except ValueError:
            pass
        from inspector.probability.distributions import Domain, parse

        try:
            return parse(text, Domain(kind))
        except CallerError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def add_draws(parser: argparse.ArgumentParser, *, default: int, what: str) -> None:
    """Add ``--draws`` and ``--seed``."""
    parser.add_argument(
        "--draws",
        type=count,
        default=default,
        metavar="N",
        help=f"draws of uncertain inputs, {what} (default {default})",
    )
    parser.add_argument("--seed", type=count, default=0, metavar="S", help="seed of these draws (default 0)")


def is_uncertain(value: object) -> bool:
    """Return whether a number was given as a distribution."""
    return not isinstance(value, int | float)


def ranged(value: Any) -> Distribution:
    """Return a number as a distribution."""
    from inspector.probability.distributions import Fixed

    return value if is_uncertain(value) else Fixed(float(value))


def fixed(value: Any) -> float:
    """Return a number, or the median of an uncertain one."""
    return float(value.ppf(0.5)) if is_uncertain(value) else float(value)


def described(inputs: Mapping[str, Distribution]) -> dict[str, str]:
    """Return what is known of each input: its distribution, "chosen", or "assumed"."""
    from inspector.probability.distributions import Fixed

    return {
        name: str(each) if not isinstance(each, Fixed) else "chosen" if name in _CHOSEN else "assumed"
        for name, each in inputs.items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBand:
    """A number over the draws of uncertain inputs: 5 %, 50 % and 95 %; null where no draw has an answer.

    Attributes:
        possible: the share of draws with an answer.
    """

    low: float | None
    median: float | None
    high: float | None
    possible: float


def banded(found: Band) -> OneBand:
    """Return the band of one number."""
    there = float(found.possible) > 0
    low, median, high = (float(end) if there else None for end in (found.low, found.median, found.high))
    return OneBand(low=low, median=median, high=high, possible=float(found.possible))


def band_text(found: OneBand) -> str:
    """Return a band as text."""
    low, median, high = found.low, found.median, found.high
    if low is None or median is None or high is None:
        return "-"
    part = "" if found.possible == 1 else f" in {100 * found.possible:.3g} %"
    if low == high:
        return _count(median) + part
    return f"{_count(median, 3)} ({_count(low, 3)} to {_count(high, 3)}){part}"


def _count(value: float, digits: int = 0) -> str:
    """Return a number with separators; with so many significant digits where that is coarser than whole numbers."""
    if digits:
        value = float(f"{value:.{digits}g}")
    return f"{value:,.0f}" if value >= 100 or value == round(value) else f"{value:,.3g}"
