"""Table 1 of Shavit 2023, today's public figures next to it, and the user's own rows.

The public figures are three CSV files that ship with the package (``analysis/data``, see its README for sources,
conventions and doubts). A cell is the whole number of chips to inspect in a year (Eq. 1), or None where the lab owns
fewer chips than the run needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from analysis.public_data import (
    GROWTH,
    H100_FLOP_PER_DAY,
    WITHOUT_FIGURES,
    Chip,
    Stock,
    TrainedModel,
    chips,
    holder_names,
    owners_today,
    stocks,
    trained_models,
    years_since,
)
from inspector.probability import detection as closed

__all__ = [
    "GROWTH",
    "H100_FLOP_PER_DAY",
    "TABLE_1",
    "TABLE_1_FLEETS",
    "WITHOUT_FIGURES",
    "Chip",
    "Footnote",
    "Row",
    "Stock",
    "TrainedModel",
    "aligned",
    "cell",
    "chips",
    "footnote",
    "holder_names",
    "owners_today",
    "stocks",
    "trained_models",
    "years_since",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A run to be caught: its name and H in FLOP."""

    model: str
    flop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Footnote:
    """The inspectorate of the footnote to Table 1: samples a year, and inspectors at 1,000 chips each."""

    samples: int
    inspectors: int
    iaea_inspectors_2021: int = 280


TABLE_1 = (
    Row(model="GPT-3", flop=3.14e23),
    Row(model="Chinchilla", flop=5.76e23),
    Row(model="PaLM", flop=2.56e24),
    Row(model="Chinchilla-280B (projected)", flop=9.9e24),
    Row(model="Chinchilla-1T (projected)", flop=1.27e26),
    Row(model="Chinchilla-10T (projected)", flop=1.3e28),
)

TABLE_1_FLEETS = (1e3, 1e5, 1e7)


def cell(
    *,
    flop: float,
    chips: float,
    days: float = closed.DAYS_PER_YEAR,
    period: float = 30.0,
    rate: float = 0.1,
    confidence: float = 0.9,
    flop_per_day: float = closed.FLOP_PER_CHIP_DAY,
) -> int | None:
    """Return ceil(365·s/T_m) of Eq. 1, or None where ``chips`` are too few for the run (a dash in the table).

    Raises:
        CallerError: nonsense, as ``inspector.probability.detection.samples_needed``.
    """
    try:
        samples = closed.samples_needed(
            flop=flop,
            chips=chips,
            days=days,
            period=period,
            rate=rate,
            confidence=confidence,
            flop_per_day=flop_per_day,
        )
    except closed.ChipsTooFewError:
        return None
    return int(closed.samples_per_year(per_period=samples, period=period))


def footnote() -> Footnote:
    """Return the footnote to Table 1: 1e7 chips, three times faster, a run of 9.9e24 FLOP, inspected every 30 days."""
    samples = cell(flop=9.9e24, chips=1e7, flop_per_day=3 * closed.FLOP_PER_CHIP_DAY)
    if samples is None:
        raise AssertionError("1e7 chips are enough for 9.9e24 FLOP")
    return Footnote(samples=samples, inspectors=math.ceil(samples / closed.CHIPS_PER_INSPECTOR))


def aligned(rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """Return rows of text in columns: the first ``left`` flush left, the others flush right."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if place < left else text.rjust(width)
            for place, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
