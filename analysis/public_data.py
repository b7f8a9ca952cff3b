"""The public figures that ship with the package: trained models, chips and stocks, one CSV file each.

``analysis/data/README.md`` names their sources, conventions and doubts.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import TypeVar

from firmware_sim.errors import CallerError
from firmware_sim.evidence import Roofline
from inspector.probability.distributions import Distribution, Fixed, Range, Uniform

__all__ = [
    "GROWTH",
    "H100_FLOP_PER_DAY",
    "WITHOUT_FIGURES",
    "Chip",
    "Stock",
    "TrainedModel",
    "chip_named",
    "chips",
    "holder_names",
    "owners_today",
    "stocks",
    "trained_models",
    "years_since",
]

H100_FLOP_PER_DAY = 989e12 * 86_400
"""FLOP of one H100 equivalent in one day, dense bf16 at full utilisation (analysis/data/README.md)."""

GROWTH = Uniform(3.3, 3.4)
"""How many times the world's stock grows in a year, by Epoch AI (analysis/data/README.md)."""

WITHOUT_FIGURES = ("GPT-4o", "Claude Opus 4", "Claude Opus 4.5", "Gemini 3 Pro", "GPT-5.2", "Grok 4.1")
"""Later models for which no source states training FLOP: a gap of training_compute.csv (analysis/data/README.md)."""

_WORLD = "World (sold)"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """One row of training_compute.csv; ``published`` is YYYY-MM, ``kind`` is reported or estimated.

    ``training_flop_low`` and ``training_flop_high`` are the 5 % and 95 % quantile where the source states them.
    """

    model: str
    organisation: str
    published: str
    training_flop: float
    training_flop_low: float | None
    training_flop_high: float | None
    kind: str
    source: str
    retrieved: str
    confirmed: bool

    @property
    def flop(self) -> Distribution:
        """Training FLOP with the source's range, or as it is."""
        return _range(self.training_flop_low, self.training_flop, self.training_flop_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One row of chips.csv; rates in FLOP/s, memory in GB, bandwidths in GB/s, power of the chip alone in W.

    None is a gap: the source lists no number.
    """

    chip: str
    vendor: str
    released: int
    peak_dense_flops_bf16: float
    memory_gb: float | None
    memory_bandwidth_gbps: float | None
    interconnect_gbps: float | None
    tdp_w: float | None
    source: str
    confirmed: bool

    @property
    def roofline(self) -> Roofline:
        """What it does in a second at most; CallerError where its memory's bandwidth is a gap."""
        if self.memory_bandwidth_gbps is None:
            raise CallerError(
                f"no source gives the memory bandwidth of {self.chip}, so this chip cannot be used as a clock"
            )
        return Roofline(flop=int(self.peak_dense_flops_bf16), moved=int(self.memory_bandwidth_gbps * 1e9))

    @property
    def flop_per_day(self) -> float:
        """FLOP in one day at full utilisation, the a of Eq. 1."""
        return self.peak_dense_flops_bf16 * 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """One row of stocks.csv: what a holder had at the end of the month ``as_of`` (YYYY-MM), in H100 equivalents.

    ``chips_low`` and ``chips_high`` are the 5 % and 95 % quantile where the source states them.
    """

    holder: str
    chips_h100_equivalent: int
    chips_low: int | None
    chips_high: int | None
    as_of: str
    kind: str
    source: str
    confirmed: bool

    @property
    def chips(self) -> Distribution:
        """H100 equivalents with the source's range, or as they are."""
        return _range(self.chips_low, self.chips_h100_equivalent, self.chips_high)


def trained_models() -> tuple[TrainedModel, ...]:
    """Return training_compute.csv in the order of publication."""
    return _read(
        "training_compute.csv",
        lambda row: TrainedModel(
            model=row["model"],
            organisation=row["organisation"],
            published=row["published"],
            training_flop=float(row["training_flop"]),
            training_flop_low=_maybe(row["training_flop_low"]),
            training_flop_high=_maybe(row["training_flop_high"]),
            kind=row["kind"],
            source=row["source"],
            retrieved=row["retrieved"],
            confirmed=_yes(row["confirmed"]),
        ),
    )


def chip_named(name: str) -> Chip:
    """A row of chips.csv; CallerError lists them all."""
    known = {each.chip: each for each in chips()}
    if name not in known:
        raise CallerError(f"there is no device {name!a:.100}; known: {', '.join(known)}")
    return known[name]


def chips() -> tuple[Chip, ...]:
    """Return chips.csv."""
    return _read(
        "chips.csv",
        lambda row: Chip(
            chip=row["chip"],
            vendor=row["vendor"],
            released=int(row["released"]),
            peak_dense_flops_bf16=float(row["peak_dense_flops_bf16"]),
            memory_gb=_maybe(row["memory_gb"]),
            memory_bandwidth_gbps=_maybe(row["memory_bandwidth_gbps"]),
            interconnect_gbps=_maybe(row["interconnect_gbps"]),
            tdp_w=_maybe(row["tdp_w"]),
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
            chips_low=int(row["chips_low"]) if row["chips_low"] else None,
            chips_high=int(row["chips_high"]) if row["chips_high"] else None,
            as_of=row["as_of"],
            kind=row["kind"],
            source=row["source"],
            confirmed=_yes(row["confirmed"]),
        ),
    )


def years_since(month: str, as_of: str) -> float:
    """Return the years from the end of one month to that of another, both YYYY-MM.

    Raises:
        CallerError: ``as_of`` is no month, or lies before.
    """
    if not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", as_of) or as_of < month:
        raise CallerError(
            f"stocks can be projected to a month from {month} on, such as 2026-11, but not to {as_of!a:.40}"
        )
    return int(as_of[:4]) - int(month[:4]) + (int(as_of[5:]) - int(month[5:])) / 12


def holder_names() -> dict[tuple[str, str], str]:
    """Return the short name of each stock by holder and month: without what is in brackets, where it stays unique.

    Short and full names serve alike wherever a stock is named: in tables, plans and scenario files.
    """
    rows = stocks()
    short = {(row.holder, row.as_of): row.holder.partition(" (")[0] for row in rows}
    taken = [(name, month) for (_, month), name in short.items()]
    return {key: name if taken.count((name, key[1])) == 1 else key[0] for key, name in short.items()}


def owners_today() -> list[tuple[str, float]]:
    """Return who holds how many H100 equivalents in the newest month of stocks.csv, without counting any twice.

    Rows of users (rented chips) are left out; what the world bought beyond the named owners is a separate entry.

    Raises:
        CallerError: the file lacks the world's total, or the owners exceed it.
    """
    newest = max(stock.as_of for stock in stocks())
    current = {stock.holder: stock for stock in stocks() if stock.as_of == newest}
    world = current.get(_WORLD)
    short = holder_names()
    owners = [
        (short[name, newest], float(stock.chips_h100_equivalent))
        for name, stock in current.items()
        if not name.startswith("World") and "not owned" not in name
    ]
    if world is None or sum(chips for _, chips in owners) > world.chips_h100_equivalent:
        raise CallerError(f"the installed file analysis/data/stocks.csv has no world total for {newest}")
    rest = world.chips_h100_equivalent - sum(chips for _, chips in owners)
    return [*owners, ("everybody else", rest)]


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


def _maybe(text: str) -> float | None:
    return float(text) if text else None


def _range(low: float | None, middle: float, high: float | None) -> Distribution:
    return Fixed(middle) if low is None or high is None else Range(low, middle, high)


def _yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(f"{text!r} is neither yes nor no")
    return text == "yes"
