"""The probability that chips diverted from their recorded owners stay unseen under a random census (Shavit 2023, §6).

A census draws m of the N chips that the directory holds, uniformly without replacement, and asks the recorded owner to
show each of them. An owner who diverted n of them is unseen by one census if none of the n is drawn, or if every drawn
one is passed off as genuine (each caught with probability q, independently)::

    h = Σ_j  C(n, j)·C(N−n, m−j) / C(N, m) · (1−q)^j          one census,   q = 1:  h = C(N−n, m) / C(N, m)
    P(unseen for t months) = h^k,   k = floor(t · censuses per month)

Censuses draw independently of one another. Claiming the diverted chips lost takes them out of reach of a census and
into the reach of ``losses.assess_losses``; this module does not count on that.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from firmware_sim.errors import CallerError

__all__ = ["census_needed", "log_unseen_probability", "months_until_seen", "unseen_probability"]

_Floats = NDArray[np.float64]
_EXACT_BELOW = 16.0


def log_unseen_probability(
    *,
    diverted: ArrayLike,
    fleet: ArrayLike,
    census: ArrayLike,
    months: ArrayLike,
    per_month: float = 1.0,
    sensitivity: ArrayLike = 1.0,
) -> _Floats:
    """Natural logarithm of the probability that no census in ``months`` reveals a diverted chip.

    Arguments broadcast against one another. Absolute error is about 1e-16·(diverted + census) for each census.

    Args:
        diverted: n, chips no longer with their recorded owner (0 … fleet).
        fleet: N, chips that the directory records as held (at least 1).
        census: m, chips drawn by each census (0 … fleet).
        months: t, months since the diversion (0 or more, finite).
        per_month: censuses each month; only completed ones count.
        sensitivity: q, probability that a drawn diverted chip is recognised as missing (0 … 1).

    Returns:
        ln P, shape of the broadcast arguments; ``-inf`` where discovery is certain, 0 where no census took place.

    Raises:
        CallerError: an argument is not finite, not whole where it counts chips, or out of its range.
    """
    n = _whole("diverted", diverted)
    total = _whole("fleet", fleet)
    m = _whole("census", census)
    t = _finite("months", months)
    q = _finite("sensitivity", sensitivity)
    _check_ranges(total, q, per_month)
    try:
        n, total, m, t, q = np.broadcast_arrays(n, total, m, t, q)
    except ValueError as error:
        raise CallerError(f"diverted, fleet, census, months and sensitivity do not broadcast: {error}") from None
    if np.any(n > total) or np.any(m > total):
        raise CallerError("diverted and census cannot exceed the fleet")
    once = _log_none_drawn(total, n, m)
    for index in np.argwhere(q < 1):
        where = tuple(index)
        once[where] = _log_all_passed_off(int(total[where]), int(n[where]), int(m[where]), float(q[where]))
    completed = np.floor(t * per_month)
    # 0·(-inf) is "no census yet", not an undetermined form.
    with np.errstate(invalid="ignore"):
        return np.where(completed == 0, 0.0, completed * once)


def _check_ranges(total: _Floats, sensitivity: _Floats, per_month: float) -> None:
    if np.any(total < 1):
        raise CallerError("fleet must be at least 1 chip")
    if np.any((sensitivity < 0) | (sensitivity > 1)):
        raise CallerError("sensitivity must lie between 0 and 1")
    if not (math.isfinite(per_month) and per_month > 0):
        raise CallerError("per_month must be a positive number of censuses")


def unseen_probability(
    *,
    diverted: ArrayLike,
    fleet: ArrayLike,
    census: ArrayLike,
    months: ArrayLike,
    per_month: float = 1.0,
    sensitivity: ArrayLike = 1.0,
) -> _Floats:
    """Probability that no census in ``months`` reveals a diverted chip; arguments of ``log_unseen_probability``."""
    logarithm = log_unseen_probability(
        diverted=diverted, fleet=fleet, census=census, months=months, per_month=per_month, sensitivity=sensitivity
    )
    return np.asarray(np.exp(logarithm), dtype=np.float64)


def months_until_seen(
    *, diverted: int, fleet: int, census: int, confidence: float, per_month: float = 1.0, sensitivity: float = 1.0
) -> float:
    """Months after which a diversion has been seen with probability ``confidence`` or more; ``inf`` if never."""
    _check_confidence(confidence)
    one_census = float(
        log_unseen_probability(
            diverted=diverted, fleet=fleet, census=census, months=1.0, per_month=1.0, sensitivity=sensitivity
        )
    )
    if not (math.isfinite(per_month) and per_month > 0):
        raise CallerError("per_month must be a positive number of censuses")
    if one_census == 0.0:
        return math.inf
    if one_census == -math.inf:
        return 1.0 / per_month
    return max(1, math.ceil(math.log1p(-confidence) / one_census)) / per_month


def census_needed(
    *, diverted: int, fleet: int, months: float, confidence: float, per_month: float = 1.0, sensitivity: float = 1.0
) -> int:
    """Fewest chips per census that reveal ``diverted`` chips within ``months`` with probability ``confidence``.

    Raises:
        CallerError: no census size reaches that confidence (nothing diverted, no census in time, too insensitive).
    """
    _check_confidence(confidence)
    target = math.log1p(-confidence)

    def enough(size: int) -> bool:
        logarithm = log_unseen_probability(
            diverted=diverted,
            fleet=fleet,
            census=size,
            months=months,
            per_month=per_month,
            sensitivity=sensitivity,
        )
        return float(logarithm) <= target

    if not enough(fleet):
        raise CallerError(f"even a census of all {fleet} chips does not reach confidence {confidence:g} in time")
    low, high = 0, fleet
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _log_none_drawn(total: _Floats, n: _Floats, m: _Floats) -> _Floats:
    """ln C(N−n, m)/C(N, m) by Stirling's series; the parts that grow with N cancel on paper, not in floating point."""
    x0, x1, x2, x3 = total + 1, total - n + 1, total - m + 1, total - n - m + 1
    possible = x3 >= 1
    x3 = np.where(possible, x3, 1.0)
    # ln x_i = ln x0 + log1p(...), and the four coefficients of ln x0 add to zero; gap keeps log1p off its pole.
    gap = np.where(possible, (n + m) / x0, 0.0)
    main = (x1 - 0.5) * np.log1p(-n / x0) + (x2 - 0.5) * np.log1p(-m / x0) - (x3 - 0.5) * np.log1p(-gap)
    correction = _stirling_rest(x1) + _stirling_rest(x2) - _stirling_rest(x0) - _stirling_rest(x3)
    return np.where(possible, np.where((n == 0) | (m == 0), 0.0, np.minimum(main + correction, 0.0)), -np.inf)


def _stirling_rest(x: _Floats) -> _Floats:
    """lnΓ(x) − ((x−½)·ln x − x + ½·ln 2π), for x ≥ 1."""
    from scipy.special import gammaln

    series = (1 / 12 - (1 / 360 - (1 / 1260 - 1 / (1680 * x * x)) / (x * x)) / (x * x)) / x
    small = np.minimum(x, _EXACT_BELOW)
    exact = gammaln(small) - ((small - 0.5) * np.log(small) - small + 0.5 * math.log(2 * math.pi))
    return np.where(x < _EXACT_BELOW, exact, series)


def _log_all_passed_off(total: int, n: int, m: int, q: float) -> float:
    """ln Σ_j hypergeometric(j)·(1−q)^j: the terms are positive, so one log-sum-exp over the support is stable."""
    if q == 0.0 or n == 0 or m == 0:
        return 0.0
    first, last = max(0, n + m - total), min(n, m)
    # With fewer than m chips left over, the least number drawn is `first`; then all n' = N−n others are drawn.
    lowest = (n, m) if first == 0 else (total - n, total - m)
    start = float(_log_none_drawn(*(np.float64(value) for value in (total, *lowest))))  # type: ignore[arg-type]
    j = np.arange(first, last, dtype=np.float64)
    steps = np.log((n - j) * (m - j)) - np.log((j + 1) * (total - n - m + j + 1))
    terms = start + np.concatenate(([0.0], np.cumsum(steps))) + np.arange(first, last + 1) * math.log1p(-q)
    peak = float(terms.max())
    return min(0.0, peak + math.log(float(np.exp(terms - peak).sum())))


def _finite(name: str, values: ArrayLike) -> _Floats:
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise CallerError(f"{name} must be a number") from None
    if not np.all(np.isfinite(array)) or np.any(array < 0):
        raise CallerError(f"{name} must be finite and not negative")
    return array


def _whole(name: str, values: ArrayLike) -> _Floats:
    array = _finite(name, values)
    if np.any(array != np.floor(array)) or np.any(array > 2**53):
        raise CallerError(f"{name} must be a whole number of chips")
    return array


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise CallerError("confidence must lie strictly between 0 and 1")
