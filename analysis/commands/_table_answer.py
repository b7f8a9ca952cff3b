"""What ``table`` answers: runs on fleets, the paper's and today's, with bands where inputs are uncertain."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from analysis.commands._answers import fields_of
from analysis.commands._detection_options import worked
from analysis.commands._uncertainty import OneBand, banded, fixed, ranged
from analysis.public_data import Stock, TrainedModel
from analysis.report.tables import Footnote, cell

if TYPE_CHECKING:
    from inspector.probability.distributions import Distribution

__all__ = ["Cell", "HolderCell", "ModelRow", "Row", "StockRow", "TableAnswer", "Today", "rows_of"]

Named = Sequence[tuple[str, "Distribution"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A run on a fleet.

    Attributes:
        per_year: null where the table has a dash, since the chips are too few for the run.
        band: of per_year, over the draws in which the chips are enough for the run; null without draws.
    """

    fleet: str
    chips: float
    per_year: int | None
    band: OneBand | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A run on each fleet."""

    model: str
    flop: float
    chips_needed: int
    cells: Sequence[Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderCell:
    """A model on the stock of a holder."""

    holder: str
    as_of: str
    per_year: int | None
    band: OneBand | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow(TrainedModel):
    """A public model, with the range of its FLOP where the source states one."""

    chips_needed: int
    cells: Sequence[HolderCell]

    @classmethod
    def of(cls, model: TrainedModel, row: Row, stocks: Sequence[Stock]) -> ModelRow:
        """From its row, whose fleets are the stocks."""
        cells = [
            HolderCell(holder=stock.holder, as_of=stock.as_of, per_year=one.per_year, band=one.band)
            for stock, one in zip(stocks, row.cells, strict=True)
        ]
        return cls(**fields_of(model), chips_needed=row.chips_needed, cells=cells)


@dataclass(frozen=True, slots=True, kw_only=True)
class StockRow(Stock):
    """A holder's stock.

    Attributes:
        projected: to the month of --as-of.
        low, high: 5 % and 95 % quantile of projected, or of the count if nothing is projected; null if unknown.
    """

    projected: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, stock: Stock, growth: Distribution, years: float) -> StockRow:
        """What a stock is projected to, with the band of its source, of growth, or of both."""
        chips, low, high = stock.chips_h100_equivalent, stock.chips_low, stock.chips_high
        row = cls(**fields_of(stock), projected=None, low=low, high=high)
        if not years:
            return row
        least, most = (float(growth.ppf(end)) ** years for end in (0.05, 0.95))
        row = replace(row, projected=chips * fixed(growth) ** years)
        if least < most or low is not None:
            row = replace(row, low=(low or chips) * least, high=(high or chips) * most)
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Today:
    """Public models on the stocks of today.

    Attributes:
        as_of, growth: of the projection, or null.
        left_out: models published before --since.
        without_figures: later models that no source has a figure for.
    """

    parameters: Mapping[str, float]
    stocks_as_of: str
    as_of: str | None
    growth: str | None
    stocks: Sequence[StockRow]
    left_out: Sequence[str]
    without_figures: Sequence[str]
    models: Sequence[ModelRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableAnswer:
    """Chips to inspect a year.

    Attributes:
        false_alarm: 0, by construction.
        chips: the rows of chips.csv, with flop_per_day.
        own: as table_1, for --row and --fleet.
        inputs: "assumed", "chosen" or a distribution.
        draws, seed: null without uncertain inputs.
    """

    parameters: Mapping[str, float]
    table_1: Sequence[Row]
    footnote: Footnote
    false_alarm: float = 0.0
    today: Today
    chips: Sequence[Mapping[str, Any]]
    own: Sequence[Row]
    inputs: Mapping[str, str] | None
    draws: int | None
    seed: int | None


def rows_of(
    rows: Named,
    fleets: Named,
    given: Mapping[str, Any],
    drawn: argparse.Namespace | None,
    grown: tuple[Distribution, float] | None = None,
) -> list[Row]:
    """Return the rows with a cell for each fleet, at the medians and, where there are draws, with its band.

    Args:
        given: parameters of Eq. 1.
        drawn: number and seed of the draws.
        grown: by how much all fleets grow in a year, and for how many years.
    """
    scheme = worked({name: fixed(value) for name, value in given.items()})
    growth, years = grown or (ranged(1.0), 0.0)
    factor = fixed(growth) ** years
    bands: list[Sequence[OneBand | None]] = [[None] * len(fleets)] * len(rows)
    if drawn is not None and rows:
        bands = _bands(rows, fleets, given, drawn, (growth, years))
    return [
        Row(
            model=model,
            flop=fixed(flop),
            chips_needed=_chips_needed(fixed(flop), scheme),
            cells=[
                Cell(
                    fleet=name,
                    chips=fixed(chips) * factor,
                    per_year=cell(flop=fixed(flop), chips=fixed(chips) * factor, **scheme),
                    band=band,
                )
                for (name, chips), band in zip(fleets, of_run, strict=True)
            ],
        )
        for (model, flop), of_run in zip(rows, bands, strict=True)
    ]


def _bands(
    rows: Named, fleets: Named, given: Mapping[str, Any], drawn: argparse.Namespace, grown: tuple[Distribution, float]
) -> list[Sequence[OneBand | None]]:
    """Return the band of each cell; a run's FLOP, a fleet's chips, growth and the scheme are drawn independently."""
    import numpy as np

    from inspector.probability.detection import DAYS_PER_YEAR
    from inspector.probability.uncertainty import Band, band, draws, samples_where_possible

    inputs = {("scheme", name): ranged(value) for name, value in given.items()}
    inputs |= {("row", name): flop for name, flop in rows} | {("fleet", name): chips for name, chips in fleets}
    inputs[("growth", "")] = grown[0]
    at = draws({repr(key): value for key, value in inputs.items()}, number=drawn.draws, seed=drawn.seed)
    scheme = worked({name: at[repr(("scheme", name))] for name in given})
    chips = np.stack([at[repr(("fleet", name))] for name, _ in fleets]) * at[repr(("growth", ""))] ** grown[1]
    found: list[Sequence[OneBand | None]] = []
    for name, _ in rows:
        samples = samples_where_possible(flop=at[repr(("row", name))], chips=chips, **scheme)
        cells = band(np.maximum(np.ceil(DAYS_PER_YEAR * samples / scheme["period"]), 1.0))
        parts = zip(cells.low, cells.median, cells.high, cells.possible, strict=True)
        found.append([banded(Band(low=low, median=mid, high=high, possible=share)) for low, mid, high, share in parts])
    return found


def _chips_needed(flop: float, scheme: Mapping[str, Any]) -> int:
    from inspector.probability.detection import chips_needed

    return math.ceil(chips_needed(flop=flop, days=scheme["days"], flop_per_day=scheme["flop_per_day"]))
