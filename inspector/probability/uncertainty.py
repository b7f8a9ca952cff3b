"""Uncertain inputs: numbers as distributions, answers as medians with bands, and which input the band comes from.

Laws:
    1. Inputs are drawn independently of one another, by Latin hypercube: each input's draws fall into equally likely
       strata, one in each.
    2. A band is the 5 % and the 95 % quantile over the draws that have an answer; the share of these is stated with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtri

from firmware_sim.errors import CallerError
from inspector.probability._logspace import Floats
from inspector.probability.detection import SHARE_SLACK, chips_needed, samples_needed
from inspector.probability.distributions import TAIL, Distribution, Fixed

__all__ = [
    "Band",
    "Index",
    "Swing",
    "band",
    "draws",
    "levels",
    "samples_where_possible",
    "sobol",
    "sobol_of_few",
    "tornado",
]

_MOST_DRAWS = 1_000_000
_EXPLAINED = 0.9
_RESAMPLES = 200


def draws(inputs: Mapping[str, Distribution], *, number: int, seed: int) -> dict[str, Floats]:
    """Return ``number`` independent draws of each input, shape (number,) each.

    Raises:
        CallerError: fewer than 20 draws, for which a 5 % quantile means nothing, or more than a million.
    """
    columns = levels(inputs, number=number, seed=seed)
    return {name: each.ppf(columns.get(name, np.full(number, 0.5))) for name, each in inputs.items()}


def levels(inputs: Mapping[str, Distribution], *, number: int, seed: int) -> dict[str, Floats]:
    """Return the probabilities at which ``draws`` takes the quantiles of each uncertain input, shape (number,) each.

    Raises:
        CallerError: as ``draws``.
    """
    from scipy.stats.qmc import LatinHypercube

    if not 20 <= number <= _MOST_DRAWS:
        raise CallerError(f"draws must be between 20 and {_MOST_DRAWS:,}, not {number}")
    uncertain = [name for name, each in inputs.items() if not isinstance(each, Fixed)]
    cube = LatinHypercube(max(1, len(uncertain)), rng=np.random.default_rng(seed)).random(number)
    return dict(zip(uncertain, cube.T, strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Median and 5 % and 95 % quantile of an answer, arrays of one shape.

    Attributes:
        possible: share of the draws that have an answer; the quantiles are over these, NaN where there are none.
    """

    low: Floats
    median: Floats
    high: Floats
    possible: Floats


def band(values: ArrayLike) -> Band:
    """Return the band over the last axis, in which NaN means a draw without an answer."""
    ordered = np.sort(np.asarray(values, np.float64), axis=-1)  # NaN comes last
    there = np.isfinite(ordered).sum(axis=-1)

    def quantile(share: float) -> Floats:
        place = np.maximum(np.ceil(share * there).astype(np.int64) - 1, 0)
        found = np.take_along_axis(ordered, place[..., None], axis=-1)[..., 0]
        return np.asarray(np.where(there > 0, found, np.nan))[()]

    return Band(
        low=quantile(TAIL),
        median=quantile(0.5),
        high=quantile(1 - TAIL),
        possible=np.asarray(there / ordered.shape[-1])[()],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Swing:
    """An answer with one input at its 5 % and at its 95 % quantile, all others at their medians; NaN if impossible."""

    parameter: str
    low: float
    high: float


def tornado(answer: Callable[[Mapping[str, float]], float], inputs: Mapping[str, Distribution]) -> list[Swing]:
    """Return the swing of each uncertain input, widest first; ``CallerError`` from ``answer`` counts as impossible."""
    middle = {name: float(each.ppf(0.5)) for name, each in inputs.items()}

    def at(name: str, probability: float) -> float:
        try:
            return answer({**middle, name: float(inputs[name].ppf(probability))})
        except CallerError:
            return math.nan

    swings = [
        Swing(parameter=name, low=at(name, TAIL), high=at(name, 1 - TAIL))
        for name, each in inputs.items()
        if not isinstance(each, Fixed)
    ]
    return sorted(
        swings, key=lambda each: -math.inf if math.isnan(each.high - each.low) else -abs(each.high - each.low)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Sobol indices of one input: the share of the answer's variance that it makes alone, and with all others.

    Each has a 95 % interval by bootstrap; estimates may fall a little outside of [0, 1].
    """

    parameter: str
    first: float
    first_low: float
    first_high: float
    total: float
    total_low: float
    total_high: float


def _answered(
    answer: Callable[[Mapping[str, Floats]], Floats],
    names: Sequence[str],
    fixed: Mapping[str, Distribution],
    points: Floats,
) -> Floats:
    """Answers at points of the uncertain inputs, the others being at their medians; CallerError where one lacks."""
    drawn = dict(zip(names, points, strict=True))
    rest = {name: each.ppf(np.full(points.shape[1:], 0.5)) for name, each in fixed.items()}
    found = np.asarray(answer({**rest, **drawn}), np.float64)
    if not np.isfinite(found).all():
        share = 1 - float(np.isfinite(found).mean())
        raise CallerError(f"no Sobol indices: {100 * share:.3g} % of the draws have no answer")
    return found


def sobol(
    answer: Callable[[Mapping[str, Floats]], Floats],
    inputs: Mapping[str, Distribution],
    *,
    number: int = 4096,
    seed: int = 0,
) -> list[Index]:
    """Return the Sobol indices of each uncertain input, largest total first (Saltelli et al. 2010, by SciPy).

    Args:
        answer: from draws of every input, shape (n,), to n answers.
        inputs: at least one of them uncertain.
        number: a power of two; ``answer`` sees ``number`` times (uncertain inputs + 2) draws.
        seed: of the draws.

    Raises:
        CallerError: no uncertain input, or a draw without an answer: variance of what is not there means nothing.
    """
    from scipy.stats import sobol_indices

    names = [name for name, each in inputs.items() if not isinstance(each, Fixed)]
    if not names:
        raise CallerError("no input is uncertain, so nothing varies")
    fixed = {name: each for name, each in inputs.items() if name not in names}

    values = partial(_answered, answer, names, fixed)
    if len(names) == 1:  # all variance by definition; SciPy takes two inputs at least
        values(draws({names[0]: inputs[names[0]]}, number=max(number, 20), seed=seed)[names[0]][None])
        ones = dict.fromkeys(("first", "first_low", "first_high", "total", "total_low", "total_high"), 1.0)
        return [Index(parameter=names[0], **ones)]
    # Quantiles at exactly 0 or 1 may be infinite.
    within = [_Inside(inputs[name]) for name in names]
    found = sobol_indices(func=values, n=number, dists=within, rng=np.random.default_rng(seed))
    spread: Any = found.bootstrap(confidence_level=0.95, n_resamples=500)
    first, total = spread.first_order.confidence_interval, spread.total_order.confidence_interval
    rows = [
        Index(
            parameter=name,
            first=float(np.atleast_1d(found.first_order)[place]),
            first_low=float(np.atleast_1d(first.low)[place]),
            first_high=float(np.atleast_1d(first.high)[place]),
            total=float(np.atleast_1d(found.total_order)[place]),
            total_low=float(np.atleast_1d(total.low)[place]),
            total_high=float(np.atleast_1d(total.high)[place]),
        )
        for place, name in enumerate(names)
    ]
    return sorted(rows, key=lambda each: -each.total)


def _polynomial(scores: Floats, terms: Sequence[tuple[int, ...]]) -> Floats:
    """Columns of a Hermite polynomial of second degree: 1, and each term at the normal scores of the inputs."""
    columns = [np.ones(scores.shape[1])]
    for term in terms:
        one = scores[term[0]]
        squared = len(term) == 2 and term[0] == term[1]
        columns.append((one**2 - 1) / math.sqrt(2) if squared else one * (scores[term[1]] if len(term) == 2 else 1.0))
    return np.column_stack(columns)


def _explained(basis: Floats, logs: Floats) -> float:
    """How much of the answers' variance the polynomial explains, each left out in turn; CallerError if too little."""
    fitted = basis @ np.linalg.lstsq(basis, logs, rcond=None)[0]
    leverage = (np.linalg.qr(basis)[0] ** 2).sum(axis=1)
    spread = float(((logs - logs.mean()) ** 2).sum())
    if spread == 0:
        raise CallerError("no Sobol indices: the answer does not vary")
    explained = 1.0 - float((((logs - fitted) / np.maximum(1.0 - leverage, 1e-9)) ** 2).sum()) / spread
    if explained < _EXPLAINED:
        raise CallerError(
            f"no Sobol indices: a polynomial of second degree explains {max(explained, 0.0):.2g} of the answers; more "
            "draws may help"
        )
    return explained


def _indices(names: Sequence[str], middle: Floats, low: Floats, high: Floats) -> list[Index]:
    return [
        Index(
            parameter=name,
            first=float(middle[0, place]),
            first_low=float(low[0, place]),
            first_high=float(high[0, place]),
            total=float(middle[1, place]),
            total_low=float(low[1, place]),
            total_high=float(high[1, place]),
        )
        for place, name in enumerate(names)
    ]


def sobol_of_few(answers: ArrayLike, at: Mapping[str, Floats], *, seed: int = 0) -> tuple[list[Index], float]:
    """Return Sobol indices of an answer that is too dear for ``sobol``, and how much of it they are based on.

    A polynomial of second degree in the normal scores of the inputs is fitted to the logarithm of the answers; its
    coefficients in Hermite polynomials give the variance that each input makes (polynomial chaos, Sudret 2008). The
    share that the polynomial explains is that of answers left out of its fit one by one.

    Args:
        answers: above 0, shape (n,).
        at: ``levels`` of the uncertain inputs at which they were found, shape (n,) each.
        seed: of the bootstrap that the 95 % intervals come from.

    Raises:
        CallerError: no uncertain input, a draw without an answer, too few draws for the polynomial, or a polynomial
            that explains less than nine tenths.
    """
    found = np.asarray(answers, np.float64)
    if not at:
        raise CallerError("no input is uncertain, so nothing varies")
    if not (np.isfinite(found) & (found > 0)).all():
        raise CallerError("no Sobol indices: some draws have no answer")
    names, scores = list(at), np.array([ndtri(np.clip(each, 1e-12, 1 - 1e-12)) for each in at.values()])
    terms = [(i,) for i in range(len(names))] + [(i, j) for i in range(len(names)) for j in range(i, len(names))]
    if found.size < 2 * (1 + len(terms)):
        raise CallerError(f"no Sobol indices: {len(names)} inputs need {2 * (1 + len(terms))} draws at least")
    basis, logs = _polynomial(scores, terms), np.log(found)
    explained = _explained(basis, logs)

    def shares(rows: NDArray[np.int64]) -> Floats:
        parts = np.linalg.lstsq(basis[rows], logs[rows], rcond=None)[0][1:] ** 2
        first = [sum(p for p, t in zip(parts, terms, strict=True) if set(t) == {i}) for i in range(len(names))]
        total = [sum(p for p, t in zip(parts, terms, strict=True) if i in t) for i in range(len(names))]
        return np.asarray(np.array([first, total]) / parts.sum())

    rng = np.random.default_rng(seed)
    middle = shares(np.arange(found.size))
    again = np.array([shares(rng.integers(0, found.size, found.size)) for _ in range(_RESAMPLES)])
    low, high = np.quantile(again, 0.025, axis=0), np.quantile(again, 0.975, axis=0)
    rows = _indices(names, middle, low, high)
    return sorted(rows, key=lambda each: -each.total), explained


def samples_where_possible(
    *,
    flop: ArrayLike,
    chips: ArrayLike,
    days: ArrayLike,
    period: ArrayLike,
    rate: ArrayLike,
    confidence: ArrayLike,
    flop_per_day: ArrayLike,
) -> Floats:
    """Return Eq. 1's samples a period as ``detection.samples_needed`` does, NaN where the chips are too few."""
    fleet, needed = np.broadcast_arrays(
        np.asarray(chips, np.float64), chips_needed(flop=flop, days=days, flop_per_day=flop_per_day)
    )
    fits = needed <= fleet * (1 + SHARE_SLACK)
    # A fleet that is just large enough replaces one that is too small, whose answer is thrown away.
    enough = np.where(fits, fleet, needed)
    found = samples_needed(
        flop=flop, chips=enough, days=days, period=period, rate=rate, confidence=confidence, flop_per_day=flop_per_day
    )
    return np.asarray(np.where(fits, found, np.nan))


@dataclass(frozen=True, slots=True)
class _Inside:
    """A distribution as SciPy wants it: quantiles of probabilities that are neither 0 nor 1."""

    of: Distribution

    def ppf(self, probability: ArrayLike) -> Floats:
        return self.of.ppf(np.clip(np.asarray(probability, np.float64), 2.0**-40, 1 - 2.0**-40))
