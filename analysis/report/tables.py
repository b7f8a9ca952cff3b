"""Table 1 of Shavit 2023, today's public figures beside it, and the user's own rows.

The public figures are three CSV files that ship with the package (``analysis/data``, see its README for sources,
conventions and doubts). A cell is the whole number of chips to inspect in a year (Eq. 1), or None where the Prover owns
fewer chips than the run needs.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TypeVar

from firmware_sim.errors import CallerError
from inspector.probability import detection as closed

__all__ = [
    "H100_FLOP_PER_DAY",
    "TABLE_1",
    "TABLE_1_FLEETS",
    "Chip",
    "Footnote",
    "Row",
    "Stock",
    "TrainedModel",
    "aligned",
    "cell",
    "chips",
    "footnote",
    "owners_today",
    "stocks",
    "trained_models",
]

H100_FLOP_PER_DAY = 989e12 * 86_400
"""FLOP of one H100 equivalent in one day, dense bf16 at full utilisation (analysis/data/README.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A run to be caught: its name and H in FLOP."""

    model: str
    flop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """One row of training_compute.csv; ``published`` is YYYY-MM, ``kind`` is reported or estimated."""

    model: str
    organisation: str
    published: str
    training_flop: float
    kind: str
    source: str
    retrieved: str
    confirmed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One row of chips.csv; rates in FLOP/s, memory in GB, bandwidths in GB/s."""

    chip: str
    vendor: str
    released: int
    peak_dense_flops_bf16: float
    memory_gb: float
    memory_bandwidth_gbps: float
    interconnect_gbps: float
    source: str
    confirmed: bool

    @property
    def flop_per_day(self) -> float:
        """FLOP in one day at full utilisation, the a of Eq. 1."""
        return self.peak_dense_flops_bf16 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """One row of stocks.csv: what a holder had at the end of the month ``as_of`` (YYYY-MM), in H100 equivalents."""

    holder: str
    chips_h100_equivalent: int
    as_of: str
    kind: str
    source: str
    confirmed: bool


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

_WORLD = "World (sold)"


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


def trained_models() -> tuple[TrainedModel, ...]:
    """Return training_compute.csv in the order of publication."""
    return _read(
        "training_compute.csv",
        lambda row: TrainedModel(
            model=row["model"],
            organisation=row["organisation"],
            published=row["published"],
            training_flop=float(row["training_flop"]),
            kind=row["kind"],
            source=row["source"],
            retrieved=row["retrieved"],
            confirmed=_yes(row["confirmed"]),
        ),
    )


def chips() -> tuple[Chip, ...]:
    """Return chips.csv."""
    return _read(
        "chips.csv",
        lambda row: Chip(
            chip=row["chip"],
            vendor=row["vendor"],
            released=int(row["released"]),
            peak_dense_flops_bf16=float(row["peak_dense_flops_bf16"]),
            memory_gb=float(row["memory_gb"]),
            memory_bandwidth_gbps=float(row["memory_bandwidth_gbps"]),
            interconnect_gbps=float(row["interconnect_gbps"]),
            source=row["source"],
            confirmed=_yes(row["confirmed"]),
        ),
    )


def stocks() -> tuple[Stock, ...]:
    """Return stocks.csv. Its rows overlap (world, countries, owners, users): they must not simply be added up."""
    return _read(
        "stocks.csv",
        lambda row: Stock(
            holder=row["holder"],
            chips_h100_equivalent=int(row["chips_h100_equivalent"]),
            as_of=row["as_of"],
            kind=row["kind"],
            source=row["source"],
            confirmed=_yes(row["confirmed"]),
        ),
    )


def owners_today() -> list[tuple[str, float]]:
    """Return who holds how many H100 equivalents in the newest month of stocks.csv, without counting any twice.

    Rows of users (rented chips) are left out; what the world bought beyond the named owners is one entry of its own.

    Raises:
        CallerError: the file lacks the world's total, or the owners exceed it.
    """
    newest = max(stock.as_of for stock in stocks())
    current = {stock.holder: stock for stock in stocks() if stock.as_of == newest}
    world = current.get(_WORLD)
    owners = [
        (name.partition(" (")[0], float(stock.chips_h100_equivalent))
        for name, stock in current.items()
        if not name.startswith("World") and "not owned" not in name
    ]
    if world is None or sum(chips for _, chips in owners) > world.chips_h100_equivalent:
        raise CallerError(f"the installed file analysis/data/stocks.csv has no total of the world for {newest}")
    rest = world.chips_h100_equivalent - sum(chips for _, chips in owners)
    return [*owners, ("everybody else", rest)]


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


Record = TypeVar("Record")


def _read(name: str, build: Callable[[dict[str, str]], Record]) -> tuple[Record, ...]:
    text = resources.files("analysis").joinpath("data", name).read_text(encoding="utf-8")
    try:
        records = tuple(build(row) for row in csv.DictReader(text.splitlines(), strict=True))
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise CallerError(f"the installed file analysis/data/{name} is damaged: {error}") from None
    if not records:
        raise CallerError(f"the installed file analysis/data/{name} is empty")
    return records


def _yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(f"{text!r} is neither yes nor no")
    return text == "yes"
