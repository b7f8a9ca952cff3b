"""Checked numpy inputs and the few log-space primitives that the detection formulas share."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import gammaln

from firmware_sim.errors import CallerError

__all__ = ["Floats", "counts", "log_none_drawn", "log_pgf_hypergeometric", "reals"]

Floats = NDArray[np.float64]

_EXACT_TERMS = 1_000_000
_MOST_TERMS = 8_000_000


def reals(name: str, value: ArrayLike, *, low: float, high: float, open_low: bool = False) -> Floats:
    """Return ``value`` as finite float64 with low <= value <= high (low < value where ``open_low``).

    Raises:
        CallerError: not a number, NaN, infinite or out of range; the text names the first bad value.
    """
    array = _numbers(name, value)
    inside = np.isfinite(array) & (array <= high) & ((array > low) if open_low else (array >= low))
    if not inside.all():
        worst = float(np.atleast_1d(array)[~np.atleast_1d(inside)][0])
        if not np.isfinite(worst):
            raise CallerError(f"{name} must be a finite number, not {worst}")
        lower = f"above {low:g}" if open_low else f"at least {low:g}"
        upper = "" if np.isinf(high) else f" and at most {high:.17g}"
        raise CallerError(f"{name} must be {lower}{upper}, not {worst:.12g}")
    return array


def counts(name: str, value: ArrayLike, *, low: float = 0, high: float = 2.0**53) -> Floats:
    """Return ``value`` as whole float64 numbers within [low, high].

    Raises:
        CallerError: out of range or not whole.
    """
    array = reals(name, value, low=low, high=high)
    if not (array == np.floor(array)).all():
        worst = float(np.atleast_1d(array)[np.atleast_1d(array != np.floor(array))][0])
        raise CallerError(f"{name} must be a whole number, not {worst:.12g}")
    return array


def log_none_drawn(population: int, marked: int, draws: int) -> float:
    """Return log P(no marked item among ``draws`` taken without replacement from ``population``).

    The shorter of the two products over log(1 - marked/(population - i)) is summed, which keeps the relative
    accuracy of the result both near 0 and far below exp(-700); above a million factors log-gamma is accurate enough,
    because the result itself is then large.
    """
    if marked + draws > population:
        return -np.inf
    factors, share = sorted((marked, draws))
    if factors <= _EXACT_TERMS:
        return float(np.log1p(-share / (population - np.arange(factors, dtype=np.float64))).sum())
    edges = np.array([population - marked, population - draws, population, population - marked - draws], np.float64)
    return float(gammaln(edges + 1.0) @ np.array([1.0, 1.0, -1.0, -1.0]))


def log_pgf_hypergeometric(population: int, marked: int, draws: int, log_z: float) -> float:
    """Return log E[z^J] for J marked items among ``draws`` without replacement and 0 < z <= 1.

    Successive terms differ by a rational factor, so the sum needs one log-gamma-free start and a cumulative sum.
    Where the result is close to 0 it is taken from the complement E[1 - z^J], which does not cancel.

    Raises:
        CallerError: more than 8 million terms.
    """
    fewest, most = max(0, draws + marked - population), min(draws, marked)
    if most - fewest > _MOST_TERMS:
        raise CallerError(
            f"{most - fewest} terms are too many for the exact sum without replacement: use sampling with "
            "replacement, which detects no more"
        )
    start = (
        log_none_drawn(population, marked, draws)
        if fewest == 0
        else log_none_drawn(population, population - marked, population - draws)
    )
    steps = np.arange(fewest, most, dtype=np.float64)
    ratios = np.log((marked - steps) * (draws - steps)) - np.log(
        (steps + 1.0) * (population - marked - draws + steps + 1.0)
    )
    log_mass = start + np.concatenate(([0.0], np.cumsum(ratios)))
    found = np.arange(fewest, most + 1, dtype=np.float64)
    caught = float((np.exp(log_mass) * -np.expm1(found * log_z)).sum())
    if caught < 0.5:
        return float(np.log1p(-caught))
    return float(np.logaddexp.reduce(log_mass + found * log_z))


def _numbers(name: str, value: ArrayLike) -> Floats:
    try:
        array = np.asarray(value)
    except ValueError:
        raise CallerError(f"{name} must be a number or an array of numbers") from None
    if array.dtype.kind not in "iuf":
        raise CallerError(f"{name} must be a number or an array of numbers")
    if array.size == 0:
        raise CallerError(f"{name} is empty")
    return array.astype(np.float64)
