"""Distributions of uncertain numbers, as a user writes them.

Law: ``parse(str(distribution), domain)`` is the same distribution, so that a command line can be repeated.

Forms of a number, the same on the command line, in scenario files and here::

    2e24                            as it is
    1e24/2e24/5e24                  5 %, 50 % and 95 % quantile: two halves of normals on a logarithmic axis; of a
                                    probability, on a logit axis
    lognormal(1e24,5e24)            5 % and 95 % quantile
    triangular(1e24,2e24,5e24)      least, most likely, greatest
    uniform(1e24,5e24)              least, greatest
    table(1e24:0.2,2e24:0.8)        values with their weights
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit, logit, ndtri

from firmware_sim.errors import CallerError
from inspector.probability._logspace import Floats

__all__ = [
    "FORMS",
    "TAIL",
    "Distribution",
    "Domain",
    "Fixed",
    "LogNormal",
    "Range",
    "Table",
    "Triangular",
    "Uniform",
    "parse",
]

FORMS = (
    "NUMBER, LOW/MEDIAN/HIGH (5, 50 and 95 %), lognormal(LOW,HIGH) (5 and 95 %), triangular(LOW,MODE,HIGH), "
    "uniform(LOW,HIGH) or table(VALUE:WEIGHT,...)"
)

TAIL = 0.05
"""Share of a distribution below its low quantile, and above its high one."""
_Z = float(ndtri(1 - TAIL))
_CALL = re.compile(r"(lognormal|triangular|uniform|table)\(([^()]*)\)")


class Domain(StrEnum):
    """Where a number lies: above 0, or between 0 and 1."""

    POSITIVE = "positive"
    SHARE = "share"


class Distribution(Protocol):
    """A number that is not known exactly; ``str`` gives the form that ``parse`` reads."""

    def ppf(self, probability: ArrayLike) -> Floats:
        """Return the quantile of each probability, of the same shape."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """A number that is taken as it is."""

    value: float

    def ppf(self, probability: ArrayLike) -> Floats:
        """Return the number."""
        return np.full(np.shape(probability), self.value)

    def __str__(self) -> str:
        return f"{self.value:g}"


@dataclass(frozen=True, slots=True)
class Range:
    """A 5 %, 50 % and 95 % quantile; the two halves of a normal meet at the median, on a log or logit axis."""

    low: float
    median: float
    high: float
    domain: Domain = Domain.POSITIVE

    def __post_init__(self) -> None:
        _ordered(str(self), self.low, self.median, self.high)
        if self.low <= 0:
            raise CallerError(f"{self}: a 5 % quantile must be above 0")
        if self.domain is Domain.SHARE and self.high >= 1:
            raise CallerError(f"{self}: a 95 % quantile of a probability must be below 1")

    def ppf(self, probability: ArrayLike) -> Floats:
        """Return quantiles; at the ends of [0, 1] those of the smallest float's neighbours."""
        there, back = (np.log, np.exp) if self.domain is Domain.POSITIVE else (logit, expit)
        score = ndtri(np.clip(np.asarray(probability, np.float64), 1e-300, 1 - 2.0**-53)) / _Z
        low, middle, high = (float(there(each)) for each in (self.low, self.median, self.high))
        return np.asarray(back(middle + np.where(score < 0, score * (middle - low), score * (high - middle))))

    def __str__(self) -> str:
        return f"{self.low:g}/{self.median:g}/{self.high:g}"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A 5 % and a 95 % quantile of a number whose logarithm is normal."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _ordered(str(self), self.low, self.high)
        if self.low <= 0:
            raise CallerError(f"{self}: a 5 % quantile must be above 0")

    def ppf(self, probability: ArrayLike) -> Floats:
        """Return quantiles."""
        return Range(self.low, math.sqrt(self.low) * math.sqrt(self.high), self.high).ppf(probability)

    def __str__(self) -> str:
        return f"lognormal({self.low:g},{self.high:g})"


@dataclass(frozen=True, slots=True)
class Triangular:
    """Least, most likely and greatest value; the density falls to 0 at both ends."""

    low: float
    mode: float
    high: float

    def __post_init__(self) -> None:
        _ordered(str(self), self.low, self.mode, self.high)

    def ppf(self, probability: ArrayLike) -> Floats:
        """Return quantiles."""
        p, width = np.asarray(probability, np.float64), self.high - self.low
        if width == 0:
            return np.full(p.shape, self.low)
        rise = self.low + np.sqrt(p * width * (self.mode - self.low))
        fall = self.high - np.sqrt((1 - p) * width * (self.high - self.mode))
        return np.asarray(np.where(p * width < self.mode - self.low, rise, fall))

    def __str__(self) -> str:
        return f"triangular({self.low:g},{self.mode:g},{self.high:g})"


@dataclass(frozen=True, slots=True)
class Uniform:
    """Least and greatest value, all between them equally likely."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _ordered(str(self), self.low, self.high)

    def ppf(self, probability: ArrayLike) -> Floats:
        """Return quantiles."""
        return np.asarray(self.low + (self.high - self.low) * np.asarray(probability, np.float64))

    def __str__(self) -> str:
        return f"uniform({self.low:g},{self.high:g})"


@dataclass(frozen=True, slots=True)
class Table:
    """Values with their weights, which need not add up to 1."""

    values: tuple[float, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values or len(self.values) != len(self.weights):
            raise CallerError("a table needs one weight for each of its values, and at least one value")
        _finite(str(self), *self.values, *self.weights)
        if list(self.values) != sorted(set(self.values)):
            raise CallerError(f"{self}: values must increase")
        if min(self.weights) < 0 or sum(self.weights) <= 0:
            raise CallerError(f"{self}: weights must be at least 0 and not all 0")

    def ppf(self, probability: ArrayLike) -> Floats:
        """Return the smallest value whose cumulative share reaches each probability."""
        shares = np.cumsum(self.weights) / sum(self.weights)
        place = np.searchsorted(shares, np.asarray(probability, np.float64) * (1 - 2.0**-53))
        return np.asarray(self.values)[np.minimum(place, len(self.values) - 1)]

    def __str__(self) -> str:
        return f"table({','.join(f'{v:g}:{w:g}' for v, w in zip(self.values, self.weights, strict=False))})"


def parse(text: str, domain: Domain = Domain.POSITIVE) -> Distribution:
    """Return the distribution that ``text`` names, in one of the forms above.

    Raises:
        CallerError: another form, quantiles out of order, or values outside of the domain.
    """
    word = text.strip()
    if call := _CALL.fullmatch(word):
        made = _call(text, call[1], call[2].split(","), domain)
    elif "/" in word:
        numbers = [_number(text, each) for each in word.split("/")]
        if len(numbers) != 3:
            raise CallerError(f"{text!r}: a range has three numbers, LOW/MEDIAN/HIGH (5, 50 and 95 %)")
        made = Range(numbers[0], numbers[1], numbers[2], domain)
    else:
        return Fixed(_number(text, word))
    low, high = (float(each) for each in made.ppf(np.array([0.0, 1.0])))
    if low < 0 or (domain is Domain.SHARE and high > 1):
        raise CallerError(f"{text!r} reaches {low if low < 0 else high:g}, which is not possible")
    return made


def _call(text: str, name: str, words: list[str], domain: Domain) -> Distribution:
    if name == "table":
        pairs = [each.split(":") for each in words]
        if any(len(pair) != 2 for pair in pairs):
            raise CallerError(f"{text!r}: a table is table(VALUE:WEIGHT,...)")
        values, weights = zip(*((_number(text, v), _number(text, w)) for v, w in pairs), strict=True)
        return Table(values, weights)
    numbers = [_number(text, each) for each in words]
    if name == "lognormal" and domain is Domain.SHARE:
        raise CallerError(f"{text!r}: a log-normal can exceed 1, so it cannot be a probability; give LOW/MEDIAN/HIGH")
    if len(numbers) != (3 if name == "triangular" else 2):
        raise CallerError(f"{text!r} must be {FORMS}")
    if name == "triangular":
        return Triangular(*numbers)
    return LogNormal(*numbers) if name == "lognormal" else Uniform(*numbers)


def _number(text: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise CallerError(f"{text!r} must be {FORMS}") from None
    _finite(repr(text), value)
    return value


def _finite(text: str, *values: float) -> None:
    if not all(map(math.isfinite, values)):
        raise CallerError(f"{text} must hold finite numbers")


def _ordered(text: str, *values: float) -> None:
    _finite(text, *values)
    if list(values) != sorted(values):
        raise CallerError(f"{text}: the numbers must be in ascending order")
