"""What theory says about a plan: the exact escape probability of a campaign, where one exists.

With logs that reach back one period, what inspections see in different periods is independent, so escapes multiply.
Inside a period the chips of a stratum are independent and exchangeable, so the escape probability is a coefficient of
a generating function: with n_i chips that pass an inspection with probability q_i,

    without replacement   P(escape) = [z^s] prod (1 + q_i z)^n_i / binomial(C, s)
    with replacement      P(escape) = [z^s] prod E_i(z)^n_i · s!/C^s,   E_i(z) = (1-p_i) e^(z q_bare) + p_i e^(z q_snap)

Eq. 1 of the paper treats repeated draws of one chip as independent; the second line does not. A coefficient is read
off by Cauchy's integral through the saddle point, in log space, which holds its accuracy far below 1e-300.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inspector.campaign.counts import overlap
from inspector.campaign.plan import Plan, Stratum, forgets
from inspector.probability.alarms import log_tolerated
from inspector.probability.detection import log_miss_without_replacement

__all__ = ["Prediction", "predict"]

ComplexArray = NDArray[np.complex128]
LogSeries = Callable[[ComplexArray], ComplexArray]
# Beyond this mean the series of refusals starts below the smallest float.
_LARGEST_MEAN = 600.0
_LARGEST_ALLOWANCE = 500
# The chance of a refusal that cannot happen, with a finite logarithm.
_NEVER = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The closed form of a campaign, or why there is none.

    Attributes:
        log_miss: natural logarithm of the escape probability, -inf for certain detection; None without closed form.
        by_period: log_miss after each period's inspection, empty without closed form.
        reason: which law was used, or why none applies.
    """

    log_miss: float | None
    by_period: tuple[float, ...]
    reason: str

    @property
    def detection(self) -> float | None:
        """Probability to be caught, or None."""
        return None if self.log_miss is None else abs(math.expm1(self.log_miss))


def predict(plan: Plan) -> Prediction:
    """Return the closed form of ``plan``; simulation is the only answer where it is None."""
    reason = _obstacle(plan)
    if reason:
        return Prediction(log_miss=None, by_period=(), reason=reason)
    total = 0.0
    course = []
    cache: dict[tuple[object, ...], float] = {}
    for period in range(plan.periods):
        for urn in range(len(plan.urns)):
            key = (urn, *_exposure(plan, urn, period))
            if key not in cache:
                cache[key] = _urn_log_miss(plan, urn, period)
            total += cache[key]
        begin, end = period * plan.inspection.period_days, (period + 1) * plan.inspection.period_days
        for search in plan.searches:
            if min(end, search.busy_end) > max(begin, search.busy_begin):
                total += _log1m(search.catch)
        course.append(total)
    if plan.loss_test is not None:
        total += _loss_log_miss(plan)
        course[-1] = total
    if plan.weighing is not None:
        total += _log1m(plan.weighing.probability())
        course[-1] = total
    kind = "with replacement" if plan.inspection.replacement else "without replacement"
    return Prediction(log_miss=total, by_period=tuple(course), reason=f"exact, {kind}")


def _obstacle(plan: Plan) -> str:
    inspection = plan.inspection
    if plan.reaction is not None:
        return "none: the lab reacts to inspections"
    if not plan.strata:
        return ""
    if not inspection.redraw:
        return "none: chips are not drawn again"
    if not forgets(plan) and any(s.rate > 0 for s in plan.strata):
        return "none: logs span the run, so periods are not independent"
    allowed = inspection.refusals_allowed
    if allowed and (plan.refuse or inspection.honest_refusal_rate):
        if inspection.replacement:
            return "none: chips that could not be shown, tolerated with replacement"
        if allowed > _LARGEST_ALLOWANCE or _mean_refusals(plan) > _LARGEST_MEAN:
            return "none: too many tolerated chips that could not be shown"
        if plan.refuse and any({s.catch_snapshot, s.catch_bare} - {0.0, 1.0} for s in plan.strata):
            return "none: refusals together with an imperfect inspection"
    return ""


def _mean_refusals(plan: Plan) -> float:
    rate = plan.inspection.honest_refusal_rate
    means = []
    for index, urn in enumerate(plan.urns):
        involved = sum(s.count for s in plan.strata if s.urn == index) if plan.refuse else 0
        means.append(urn.samples * (rate + involved / urn.chips))
    return max(means)


def _exposure(plan: Plan, urn: int, period: int) -> tuple[tuple[float, bool], ...]:
    """Return (chance of a snapshot in the log, whether work has begun) for each stratum of the urn."""
    length = plan.inspection.period_days
    clock, one = np.array([period * length]), np.ones(1)
    found = []
    for s in plan.strata:
        if s.urn == urn:
            days = float(overlap(clock, np.array([length]), one, s.begin, s.end)[0])
            found.append((-math.expm1(-s.rate * days), (period + 1) * length > s.busy_begin))
    return tuple(found)


def _urn_log_miss(plan: Plan, urn: int, period: int) -> float:
    inspection = plan.inspection
    stock = plan.urns[urn]
    if stock.samples == 0:
        return 0.0
    strata = [s for s in plan.strata if s.urn == urn]
    exposure = _exposure(plan, urn, period)
    broken = inspection.honest_refusal_rate
    if not strata or all(
        p == 0 and not (begun and s.catch_bare) for s, (p, begun) in zip(strata, exposure, strict=True)
    ):
        return _honest_log_miss(stock.samples, broken, inspection.refusals_allowed)
    if inspection.refusals_allowed and (plan.refuse or broken):
        return _tolerant_log_miss(plan, urn, strata, exposure)
    groups = [(stock.chips - sum(s.count for s in strata), 0.0, 1 - broken, 1 - broken)]
    for s, (holds, begun) in zip(strata, exposure, strict=True):
        bare = s.catch_bare if begun else 0.0
        groups.append((s.count, holds, (1 - broken) * (1 - bare), (1 - broken) * (1 - s.catch_snapshot)))
    if inspection.replacement:
        return _coefficient(_drawn_again(groups), stock.samples) + (
            math.lgamma(stock.samples + 1) - stock.samples * math.log(stock.chips)
        )
    if len(strata) == 1 and broken == 0:
        (count, holds, bare, snap) = groups[1]
        catch = 1 - (1 - holds) * bare - holds * snap
        return float(
            log_miss_without_replacement(used=count, chips=stock.chips, samples=stock.samples, catch=min(catch, 1.0))
        )
    pairs = [(count, (1 - holds) * bare + holds * snap) for count, holds, bare, snap in groups]
    if sum(count for count, passes in pairs if passes > 0) < stock.samples:
        return -math.inf
    return _coefficient(_drawn_once(pairs), stock.samples) - _coefficient(
        _drawn_once([(stock.chips, 1.0)]), stock.samples
    )


def _honest_log_miss(samples: int, broken: float, allowed: int) -> float:
    return float(log_tolerated(rate=broken, checks=samples, allowed=allowed))


def _drawn_once(groups: list[tuple[int, float]]) -> LogSeries:
    def series(z: ComplexArray) -> ComplexArray:
        total = np.zeros_like(z)
        for count, passes in groups:
            total += count * np.log1p(passes * z)
        return total

    return series


def _drawn_again(groups: list[tuple[int, float, float, float]]) -> LogSeries:
    def series(z: ComplexArray) -> ComplexArray:
        total = np.zeros_like(z)
        for count, holds, bare, snap in groups:
            # e^(z·bare) is taken out, so that large z does not overflow.
            total += count * (bare * z + np.log1p(holds * np.expm1((snap - bare) * z)))
        return total

    return series


def _coefficient(series: LogSeries, degree: int) -> float:
    """Return log [z^degree] exp(series(z)) for a power series with coefficients of at least 0."""
    return _integrate(series, degree, None)


def _integrate(series: LogSeries, degree: int, part: Callable[[ComplexArray, float], ComplexArray] | None) -> float:
    """Return log [z^degree] of exp(series(z)), or of a part of it given relative to its value at a real radius."""
    radius = math.exp(_saddle(series, degree))
    # The integrand is a bump of width 1/deviation, and the deviation is at most the root of the degree (plus a floor).
    points = 1 << max(9, math.ceil(math.log2(40 * math.sqrt(degree + 1))))
    angle = 2 * np.pi * np.arange(points // 2 + 1) / points  # below the real axis lie the conjugate values
    z = radius * np.exp(1j * angle)
    peak = series(np.array([radius + 0j]))[0].real
    relative = np.exp(series(z) - peak) if part is None else part(z, radius)
    values = (relative * np.exp(-1j * degree * angle)).real
    mean = float(2 * values.sum() - values[0] - values[-1]) / points
    return peak - degree * math.log(radius) + math.log(mean) if mean > 0 else -math.inf


def _saddle(series: LogSeries, degree: int) -> float:
    """Return log r with r·d/dr series(r) = degree, by bisection; the left side increases."""
    low, high = -60.0, 60.0
    for _ in range(80):
        middle = (low + high) / 2
        step = 1e-5
        around = series(np.exp(np.array([middle - step, middle + step])) + 0j).real
        slope = (around[1] - around[0]) / (2 * step)
        low, high = (middle, high) if slope < degree else (low, middle)
    return (low + high) / 2


def _tolerant_log_miss(plan: Plan, urn: int, strata: list[Stratum], exposure: tuple[tuple[float, bool], ...]) -> float:
    """Escape with at most A refusals: a second variable x counts them, its series is cut at x^A."""
    stock, inspection = plan.urns[urn], plan.inspection
    broken, allowed = inspection.honest_refusal_rate, inspection.refusals_allowed
    groups = [(stock.chips - sum(s.count for s in strata), 1 - broken, broken)]
    for s, (holds, begun) in zip(strata, exposure, strict=True):
        bare = s.catch_bare if begun else 0.0
        if plan.refuse:
            risky = holds * (s.catch_snapshot > 0) + (1 - holds) * (bare > 0)
            groups.append((s.count, (1 - broken) * (1 - risky), broken + (1 - broken) * risky))
        else:
            passes = holds * (1 - s.catch_snapshot) + (1 - holds) * (1 - bare)
            groups.append((s.count, (1 - broken) * passes, broken))

    def tolerated(z: ComplexArray, radius: float) -> ComplexArray:
        """Sum the powers of x up to A; each term is at most 1, being a part of its group's value at the radius."""
        product: ComplexArray | None = None
        for count, shown, refused in groups[:-1]:
            terms = _terms(z, radius, allowed, count, shown, refused)
            product = terms if product is None else _product(product, terms)
        last = _terms(z, radius, allowed, *groups[-1])
        if product is None:
            return np.asarray(last.sum(axis=0))
        return np.asarray((np.cumsum(product, axis=0)[::-1] * last).sum(axis=0))

    both = _drawn_once([(count, shown + refused) for count, shown, refused in groups])
    everything = _drawn_once([(stock.chips, 1.0)])
    return min(0.0, _integrate(both, stock.samples, tolerated) - _coefficient(everything, stock.samples))


def _terms(z: ComplexArray, radius: float, most: int, count: int, shown: float, refused: float) -> ComplexArray:
    """Return the terms x^0 to x^most of (1 + z(shown + refused·x))^count over its value at z = radius, x = 1."""
    chosen = np.arange(most + 1.0)[:, None]
    with np.errstate(divide="ignore"):
        ways = np.log(np.maximum(count - chosen[:-1], 0.0) / (chosen[:-1] + 1.0)) + math.log(max(refused, _NEVER))
    weights = np.concatenate((np.zeros((1, 1)), np.cumsum(ways, axis=0))) - count * math.log1p(
        radius * (shown + refused)
    )
    return np.asarray(np.exp(weights + chosen * np.log(z) + np.maximum(count - chosen, 0.0) * np.log1p(z * shown)))


def _product(one: ComplexArray, other: ComplexArray) -> ComplexArray:
    """Return the product of two polynomials, coefficients along the first axis, cut at their common degree."""
    return np.stack([(one[: i + 1] * other[i::-1]).sum(axis=0) for i in range(len(one))])


def _loss_log_miss(plan: Plan) -> float:
    from scipy.stats import binom

    test = plan.loss_test
    if test is None:
        return 0.0
    return float(binom.logcdf(test.tolerated - test.diverted, test.chips, test.loss))


def _log1m(value: float) -> float:
    return -math.inf if value >= 1 else math.log1p(-value)
