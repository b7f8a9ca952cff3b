"""What a plan is paid in, how much one inspector does, and what monitoring asks of a lab.

Law: an input is a distribution, so that an answer that depends on one has a band; what is measured names where, and
what is assumed is called so (``ASSUMED``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from firmware_sim.errors import CallerError
from firmware_sim.evidence.chiplog import RECORD_BYTES
from inspector.probability.detection import CHIPS_PER_INSPECTOR, DAYS_PER_YEAR
from inspector.probability.distributions import Distribution, Fixed, parse

__all__ = ["ASSUMED", "Inputs", "money_of"]

ASSUMED = ("load", "step_seconds")
"""Inputs whose defaults were not measured."""

_MONEY = re.compile(r"[A-Z]{3} (19|20)\d\d")
_LOAD, _STEP_SECONDS = Fixed(float(CHIPS_PER_INSPECTOR)), Fixed(10.0)


def money_of(text: str) -> str:
    """Return a currency with the year of its prices, as ``USD 2026``.

    Raises:
        CallerError: another text.
    """
    if not _MONEY.fullmatch(text):
        raise CallerError(f"{text!a:.40} is not a currency with the year of its prices: write it as 'USD 2026'")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs of a plan that do not change the schedule.

    Attributes:
        money: currency and year of every price, as ``USD 2026``; empty where they were not named.
        load: chips that keep one inspector busy for a year.
        step_seconds: of one step of the lab's runs, unmonitored.
        slowdown: times that a recorded step takes of one in plain PyTorch.
        replay: times that a repeated step takes of one in plain PyTorch.
        step_bytes: of the transcript, for each step of a run.
        other_records: of a chip's log in a year that are no snapshots, such as commits and beacons.

    Raises:
        CallerError: money in another form, a number out of range.
    """

    money: str = ""
    load: Distribution = _LOAD
    step_seconds: Distribution = _STEP_SECONDS
    slowdown: Distribution
    replay: Distribution
    step_bytes: Distribution
    other_records: Distribution

    def __post_init__(self) -> None:
        if self.money:
            money_of(self.money)
        for name in self.numbers():
            low, high = (float(each) for each in self.numbers()[name].ppf([0.0005, 0.9995]))
            if not (low > 0 and high < 1e12):
                raise CallerError(f"{name} must be above 0 and below 1e12, got {low:g} to {high:g}")

    def numbers(self) -> dict[str, Distribution]:
        """Return every input that is a number."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "money"}

    def given(self, words: Mapping[str, str]) -> Inputs:
        """Return the inputs with those that somebody wrote, by name.

        Raises:
            CallerError: no such input, or no such value.
        """
        known = {"money", *self.numbers()}
        for name in words:
            if name not in known:
                raise CallerError(f"there is no input {name!a:.40}; there are {', '.join(sorted(known))}")
        read: dict[str, Any] = {name: text if name == "money" else _number(name, text) for name, text in words.items()}
        return replace(self, **read)

    def inspectors(self, work: float) -> tuple[int, int, int]:
        """Return whole inspectors for the work of so many chips a year: few, median and many (5, 50 and 95 %)."""
        few, middle, many = (max(0, math.ceil(work / float(self.load.ppf(each)) - 1e-9)) for each in (0.95, 0.5, 0.05))
        return few, middle, many

    def asks(self, *, rate: float, replayed_flop: float, flop_per_day: float) -> dict[str, tuple[float, float, float]]:
        """Return what monitoring asks of a lab in a year: 5, 50 and 95 % of each input that it comes from.

        Args:
            rate: snapshots of a chip and day.
            replayed_flop: FLOP that are repeated a year.
            flop_per_day: that a chip does in plain PyTorch.

        Returns:
            slowdown (times), replayed_chip_hours (a year, over all chips), log_bytes (of a chip and year),
            transcript_bytes (of a run that trains for a year).
        """
        quantiles = (0.05, 0.5, 0.95)
        hours = replayed_flop / flop_per_day * 24.0
        records = [rate * DAYS_PER_YEAR + float(self.other_records.ppf(each)) for each in quantiles]
        steps = [DAYS_PER_YEAR * 86_400.0 / float(self.step_seconds.ppf(1 - each)) for each in quantiles]

        def three(of: Distribution, times: list[float]) -> tuple[float, float, float]:
            low, middle, high = (float(of.ppf(each)) * factor for each, factor in zip(quantiles, times, strict=True))
            return low, middle, high

        return {
            "slowdown": three(self.slowdown, [1.0] * 3),
            "replayed_chip_hours": three(self.replay, [hours] * 3),
            "log_bytes": three(Fixed(float(RECORD_BYTES)), records),
            "transcript_bytes": three(self.step_bytes, steps),
        }


def _number(name: str, text: str) -> Distribution:
    try:
        return Fixed(float(text.replace(",", "") if "(" not in text else text))
    except ValueError:
        pass
    try:
        return parse(text)
    except CallerError as error:
        raise CallerError(f"input {name}: {error}") from None
