"""How often an inspector who holds a lying chip's evidence sees through the lie: measured, or assumed by name.

A rate that was neither measured nor assumed is an error that names the lie; there is no default.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from firmware_sim.errors import CallerError, file_error
from firmware_sim.evidence import canonical
from inspector.campaign.checks import named, probability, whole
from inspector.campaign.intervals import clopper_pearson
from monitor.files import write_whole

__all__ = ["IntervalEnd", "MeasuredRate", "MissingRate", "RateBook", "load_rates", "save_rates"]

FORMAT = "chipwitness-rates/1"
_ROW_KEYS = ("lie", "trials", "caught", "settings", "device")


class MissingRate(CallerError):
    """No detection rate is known for a lie that a strategy tells."""


class IntervalEnd(StrEnum):
    """Which end of a measured rate's interval to use."""

    LOW = "low"
    POINT = "point"
    HIGH = "high"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRate:
    """``caught`` of ``trials`` real inspections of a lie ended in a REJECT, on ``device`` with ``settings``."""

    lie: str
    trials: int
    caught: int
    settings: str
    device: str

    def __post_init__(self) -> None:
        named("lie", self.lie)
        whole(f"trials of lie {self.lie!r}", self.trials, 1)
        whole(f"caught of lie {self.lie!r}", self.caught)
        named(f"settings of lie {self.lie!r}", self.settings)
        named(f"device of lie {self.lie!r}", self.device)
        if self.caught > self.trials:
            raise CallerError(
                f"lie {self.lie!r}: {self.caught} of the lies were caught, but there were only {self.trials} trials"
            )

    def interval(self, confidence: float) -> tuple[float, float]:
        """Return the Clopper-Pearson interval of the rate."""
        return clopper_pearson(self.caught, self.trials, confidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateBook:
    """Rates by lie: measured ones with an interval, assumed ones as exact numbers on the caller's word."""

    measured: Mapping[str, MeasuredRate] = field(default_factory=dict)
    assumed: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for lie, rate in self.assumed.items():
            named("assumed", lie)
            probability(f"assumed rate of lie {lie!r}", rate)
            if lie in self.measured:
                raise CallerError(f"lie {lie!r} has both a measured and an assumed rate")

    def rate(self, lie: str, bound: IntervalEnd = IntervalEnd.POINT, confidence: float = 0.95) -> float:
        """Return the probability that an inspection of this lie's evidence catches it.

        Raises:
            MissingRate: Nothing is known about the lie.
        """
        row = self.measured.get(lie)
        if row is not None:
            if bound is IntervalEnd.POINT:
                return row.caught / row.trials
            return row.interval(confidence)[0 if bound is IntervalEnd.LOW else 1]
        if lie not in self.assumed:
            known = ", ".join(sorted({*self.measured, *self.assumed})) or "none"
            raise MissingRate(f"no measured or assumed detection rate for the lie {lie!r}; known: {known}")
        return float(self.assumed[lie])

    def is_measured(self, lie: str) -> bool:
        """Return whether the lie's rate comes from real inspections."""
        return lie in self.measured


def load_rates(path: Path, *, device: str | None = None, settings: str | None = None) -> dict[str, MeasuredRate]:
    """Read a table of measured rates.

    The document is ``{"format": "chipwitness-rates/1", "rows": [{"lie", "trials", "caught", "settings", "device"}]}``
    with these keys exactly. ``device`` and ``settings`` choose rows where a lie was measured more than once.

    Raises:
        CallerError: The file is unreadable, malformed or empty, or a lie is left with more than one row.
    """
    try:
        document = canonical.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise file_error(f"cannot read the rate table {path}", error) from None
    except (ValueError, RecursionError) as error:
        raise CallerError(f"rate table {path} is not JSON: {error}") from None
    if not isinstance(document, dict) or set(document) != {"format", "rows"} or document["format"] != FORMAT:
        raise CallerError(f'rate table {path} must be {{"format": "{FORMAT}", "rows": [...]}} and nothing else')
    if not isinstance(document["rows"], list) or not document["rows"]:
        raise CallerError(f"rate table {path} has no rows")
    rates: dict[str, MeasuredRate] = {}
    for number, row in enumerate(document["rows"], 1):
        try:
            rate = _row(row)
        except CallerError as error:
            raise CallerError(f"rate table {path}, row {number}: {error}") from None
        if (device is not None and rate.device != device) or (settings is not None and rate.settings != settings):
            continue
        if rate.lie in rates:
            raise CallerError(
                f"rate table {path}: lie {rate.lie!r} was measured more than once; choose a device or settings"
            )
        rates[rate.lie] = rate
    if not rates:
        raise CallerError(f"rate table {path} has no row for device {device!r} and settings {settings!r}")
    return rates


def save_rates(path: Path, rates: Iterable[MeasuredRate]) -> None:
    """Write a table that `load_rates` reads; an existing file is replaced.

    Raises:
        CallerError: There is no rate, or the file cannot be written.
    """
    rows = [{key: getattr(rate, key) for key in _ROW_KEYS} for rate in rates]
    if not rows:
        raise CallerError("a rate table needs at least one row")
    try:
        write_whole(path, json.dumps({"format": FORMAT, "rows": rows}, indent=1).encode() + b"\n")
    except OSError as error:
        raise file_error(f"cannot write the rate table {path}", error) from None


def _row(row: Any) -> MeasuredRate:
    if not isinstance(row, dict):
        raise CallerError("not an object")
    for key in sorted(set(_ROW_KEYS).symmetric_difference(row)):
        raise CallerError(f"key {key!r} is {'missing' if key in _ROW_KEYS else 'unknown'}")
    return MeasuredRate(**row)
