"""How likely an inspection catches a run, and how many chips to sample: closed forms (Shavit 2023, Eq. 1, App. B, C).

Laws:
    1. A probability of escape is carried as its logarithm (``log_miss``), so 1e-300 is as exact as 0.5;
       independent chances to be caught add up, and ``detection`` turns the sum into a probability at the end.
    2. Every function works elementwise on numpy arrays and broadcasts; scalars give a numpy scalar.
    3. More samples, more snapshots, a larger run or a smaller fleet never lower detection.
    4. Nonsense (NaN, negative, a confidence of 1, too few chips for the run) raises ``CallerError``; what is merely
       extreme takes its limit, which the function names.

Symbols of the paper: H ``flop``, C ``chips``, a ``flop_per_day`` (FLOP per chip and day), f ``rate`` (snapshots per
chip and day), T ``days``, T_m ``period`` (days), s ``samples`` (chips per period), p ``confidence``, k ``stretch``,
b ``share`` (of the fleet that the run uses).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import xlog1py

from firmware_sim.errors import CallerError
from inspector.probability._logspace import Floats, counts, log_none_drawn, log_pgf_hypergeometric, reals

__all__ = [
    "CHIPS_PER_INSPECTOR",
    "DAYS_PER_YEAR",
    "FLOP_PER_CHIP_DAY",
    "SHARE_SLACK",
    "ChipsTooFewError",
    "OutOfReachError",
    "appendix_b_log_miss",
    "chips_needed",
    "detection",
    "hit_probability",
    "incriminating_days",
    "incriminating_flop",
    "log_escape",
    "log_miss",
    "log_miss_without_replacement",
    "samples_for",
    "samples_needed",
    "samples_needed_without_replacement",
    "samples_per_year",
    "short_run_detection",
    "snapshot_probability",
    "stretch_detection",
    "stretch_limit",
    "used_share",
]

FLOP_PER_CHIP_DAY = 1e15 * 86_400
"""FLOP of one chip in one day at 1e15 FLOP/s and full utilisation, as in Table 1."""

DAYS_PER_YEAR = 365.0

CHIPS_PER_INSPECTOR = 1_000
"""Chips that one inspector examines in a year (footnote to Table 1)."""

SHARE_SLACK = 1e-12
"""How far b may exceed 1 by rounding before it counts as too few chips."""

_TIE = 1e-12


class OutOfReachError(CallerError):
    """Even inspecting every chip does not reach the wanted probability."""


class ChipsTooFewError(CallerError):
    """The lab owns fewer chips than the run needs (a dash in Table 1)."""


def snapshot_probability(*, rate: ArrayLike, days: ArrayLike, readable: ArrayLike = 1.0) -> Floats:
    """Return 1 - exp(-f·t·r): a used chip holds at least one usable snapshot of the last ``days``.

    Args:
        rate: Poisson rate f, snapshots per chip and day; 0 gives 0.
        days: length t of the window that the log covers.
        readable: chance r that a single snapshot can be read and is matched; it thins the Poisson process.
    """
    with np.errstate(over="ignore", under="ignore"):
        mean = reals("rate", rate, low=0, high=np.inf) * reals("days", days, low=0, high=np.inf)
        return np.asarray(-np.expm1(-mean * reals("readable", readable, low=0, high=1)))[()]


def chips_needed(*, flop: ArrayLike, days: ArrayLike, flop_per_day: ArrayLike = FLOP_PER_CHIP_DAY) -> Floats:
    """Return H/(a·T), the (real) number of chips that do ``flop`` FLOP in ``days`` days."""
    work = reals("flop", flop, low=0, high=np.inf, open_low=True)
    time = reals("days", days, low=0, high=np.inf, open_low=True)
    speed = reals("flop per chip and day", flop_per_day, low=0, high=np.inf, open_low=True)
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(work / time / speed)[()]


def used_share(
    *, flop: ArrayLike, chips: ArrayLike, days: ArrayLike, flop_per_day: ArrayLike = FLOP_PER_CHIP_DAY
) -> Floats:
    """Return b = H/(a·T·C), the share of the fleet that the run keeps busy.

    Raises:
        ChipsTooFewError: b > 1.
    """
    fleet = reals("chips", chips, low=0, high=np.inf, open_low=True)
    needed = chips_needed(flop=flop, days=days, flop_per_day=flop_per_day)
    with np.errstate(over="ignore", under="ignore"):
        share = np.asarray(needed / fleet)
    if (share > 1.0 + SHARE_SLACK).any():
        first = int(np.argmax(share.ravel() > 1.0 + SHARE_SLACK))
        need, have = (float(np.broadcast_to(part, share.shape).ravel()[first]) for part in (needed, fleet))
        raise ChipsTooFewError(f"the run needs {need:.6g} chips but the lab owns {have:.6g}")
    return np.minimum(share, 1.0)[()]


def hit_probability(*, share: ArrayLike, snapshot: ArrayLike = 1.0, readout: ArrayLike = 1.0) -> Floats:
    """Return b·p_w·r: one randomly sampled chip incriminates the run.

    Args:
        share: share b of the fleet that the run uses.
        snapshot: chance p_w that a used chip holds a snapshot.
        readout: chance that the log of a sampled chip can be read at all, and that the replay then catches it.
    """
    product = reals("share", share, low=0, high=1) * reals("snapshot probability", snapshot, low=0, high=1)
    return np.asarray(product * reals("readout", readout, low=0, high=1))[()]


def log_escape(*, share: ArrayLike, rate: ArrayLike, days: ArrayLike, readout: ArrayLike = 1.0) -> Floats:
    """Return log(1 - b·r·(1-e^(-f·t))): one randomly sampled chip does not incriminate the run.

    The same as log(1 - ``hit_probability``), but without its loss of digits where the hit is close to 1.

    Args:
        share: b.
        rate: f, snapshots per chip and day.
        days: t, window of the log.
        readout: r, as in ``hit_probability``.
    """
    used = hit_probability(share=share, readout=readout)
    hit = used * snapshot_probability(rate=rate, days=days)
    with np.errstate(divide="ignore", over="ignore"):
        mean = np.asarray(rate, np.float64) * np.asarray(days, np.float64)
        near_one = np.logaddexp(np.log1p(-used), np.log(used) - mean)
        return np.where(hit < 0.5, np.log1p(-hit), near_one)[()]


def log_miss(*, hit: ArrayLike, samples: ArrayLike) -> Floats:
    """Return s·log(1 - q): all of ``samples`` draws with replacement miss. Real ``samples`` are meant as an average."""
    return np.asarray(xlog1py(reals("samples", samples, low=0, high=np.inf), -reals("hit", hit, low=0, high=1)))[()]


def detection(log_miss: ArrayLike) -> Floats:
    """Return 1 - exp(log_miss), accurate for small detection probabilities too."""
    array = np.asarray(log_miss, dtype=np.float64)
    if np.isnan(array).any() or (array > 0).any():
        raise CallerError("a logarithm of a miss probability must be at most 0")
    return np.asarray(0.0 - np.expm1(array))[()]  # of a sure miss 0, and not -0


def samples_for(*, hit: ArrayLike, confidence: ArrayLike = 0.9, miss: ArrayLike | None = None) -> Floats:
    """Return log(1-p)/log(1-q), the real number of draws with replacement that detect with ``confidence``.

    Args:
        hit: chance q > 0 that one draw incriminates.
        confidence: wanted detection probability p, 0 <= p < 1.
        miss: wanted 1 - p, instead of ``confidence``, where p is too close to 1 for a float; > 0.

    Raises:
        CallerError: p = 1 or q = 0, which no finite number of draws can satisfy.
    """
    with np.errstate(divide="ignore"):
        escape = np.log1p(-reals("hit", hit, low=0, high=1))
    return _draws(_log_of_wanted_miss(confidence, miss), escape)


def samples_needed(
    *,
    flop: ArrayLike,
    chips: ArrayLike,
    days: ArrayLike = DAYS_PER_YEAR,
    period: ArrayLike = 30.0,
    rate: ArrayLike = 0.1,
    confidence: ArrayLike = 0.9,
    flop_per_day: ArrayLike = FLOP_PER_CHIP_DAY,
    readout: ArrayLike = 1.0,
    miss: ArrayLike | None = None,
) -> Floats:
    """Return Eq. 1: the real number s of chips to inspect in every period.

    s = log(1-p)/log(1 - b·(1-e^(-f·T_m))) · T_m/T. The run is spread over T/T_m periods, a real number.
    It promises no more than the run's own windows give, because log(1 - b·(1-e^(-f·t))) is convex in t.

    Args:
        flop: H, FLOP of the run to be caught.
        chips: C, chips of the audited lab.
        days: T, how long the run lasts.
        period: T_m, days between two inspections.
        rate: f, snapshots per chip and day; 0 raises.
        confidence: p, 0 <= p < 1.
        flop_per_day: a, FLOP per chip and day.
        readout: chance that a sampled log can be read and its replay catches the run; 1 in the paper.
        miss: 1 - p, instead of ``confidence``.

    Raises:
        ChipsTooFewError: C < H/(a·T).
        CallerError: any other nonsense.
    """
    time = reals("days", days, low=0, high=np.inf, open_low=True)
    between = reals("period", period, low=0, high=np.inf, open_low=True)
    if (np.asarray(rate) == 0).any():
        raise CallerError("rate is 0: no chip ever takes a snapshot, so no number of samples is enough")
    share = used_share(flop=flop, chips=chips, days=time, flop_per_day=flop_per_day)
    escape = log_escape(share=share, rate=rate, days=between, readout=readout)
    return np.asarray(_draws(_log_of_wanted_miss(confidence, miss), escape) * (between / time))[()]


def samples_per_year(*, per_period: ArrayLike, period: ArrayLike) -> Floats:
    """Return ceil(365·s/T_m), whole chips a year (float64, whole); at least 1 where Eq. 1's s underflows to 0."""
    samples = reals("samples per period", per_period, low=0, high=np.inf)
    between = reals("period", period, low=0, high=np.inf, open_low=True)
    return np.asarray(np.maximum(np.ceil(DAYS_PER_YEAR * samples / between), 1.0))[()]


def appendix_b_log_miss(
    *,
    flop: ArrayLike,
    chips: ArrayLike,
    samples: ArrayLike,
    days: ArrayLike = DAYS_PER_YEAR,
    period: ArrayLike = 30.0,
    rate: ArrayLike = 0.1,
    flop_per_day: ArrayLike = FLOP_PER_CHIP_DAY,
) -> Floats:
    """Return ceil(T/T_m)·s·log(1 - b·p_w), Appendix B.

    Errata of the appendix: it once prints (1-p_n)^ceil(T/T_m) where 1 - p_n^ceil(T/T_m) is meant (the run escapes
    only if every period misses), and its last line turns both the inequality and the ratio of T and T_m around.
    The ceiling counts the last, shorter period as a full one; Eq. 1 and ``timing.log_miss_by_day`` do not.
    """
    share = used_share(flop=flop, chips=chips, days=days, flop_per_day=flop_per_day)
    escape = log_escape(share=share, rate=rate, days=period)
    inspections = np.ceil(np.asarray(days, np.float64) / reals("period", period, low=0, high=np.inf, open_low=True))
    return np.asarray(inspections * reals("samples", samples, low=0, high=np.inf) * escape)[()]


def stretch_detection(*, stretch: ArrayLike, share: ArrayLike, confidence: ArrayLike = 0.9) -> Floats:
    """Return p_d(k) = 1 - (1 - b/k)^(k·s) with s = log(1-p)/log(1-b) (App. C.1, every used chip holds a snapshot).

    p_d(1) = p, p_d falls with k towards ``stretch_limit`` and with b; the limit for b = 0 is p.

    Args:
        stretch: k >= 1; the lab uses 1/k of the chips for k times as long.
        share: b, 0 <= b < 1 (at b = 1 Eq. 1 asks for no sample at all).
        confidence: p.
    """
    factor = reals("stretch", stretch, low=1, high=np.inf)
    used = _share_below_one(share)
    exponent = _log1p_ratio(used / factor) / _log1p_ratio(used)
    return np.asarray(-np.expm1(exponent * _log_of_wanted_miss(confidence, None)))[()]


def stretch_limit(*, share: ArrayLike, confidence: ArrayLike = 0.9) -> Floats:
    """Return the limit of p_d(k) for k to infinity, 1 - exp(-b·s) (App. C.1)."""
    return np.asarray(-np.expm1(_log_of_wanted_miss(confidence, None) / _log1p_ratio(_share_below_one(share))))[()]


def short_run_detection(
    *,
    days: ArrayLike,
    samples: ArrayLike,
    flop: ArrayLike,
    chips: ArrayLike,
    rate: ArrayLike = 0.1,
    flop_per_day: ArrayLike = FLOP_PER_CHIP_DAY,
) -> Floats:
    """Return p_d(t) = 1 - (1 - b(t)·(1-e^(-f·t)))^s, b(t) = H/(a·C·t), of one inspection (App. C.2).

    Theorem 1: p_d(t) >= p_d(T) for t < T, so doing the same work on more chips in less time does not help the lab.

    Raises:
        ChipsTooFewError: t is too short even for all chips.
    """
    share = used_share(flop=flop, chips=chips, days=days, flop_per_day=flop_per_day)
    escape = log_escape(share=share, rate=rate, days=days)
    return detection(reals("samples", samples, low=0, high=np.inf) * escape)


def log_miss_without_replacement(
    *, chips: ArrayLike, used: ArrayLike, samples: ArrayLike, catch: ArrayLike = 1.0
) -> Floats:
    """Return log E[(1-v)^J], J hypergeometric: ``samples`` different chips are drawn and none incriminates.

    It never exceeds the value with replacement at b = used/chips.

    Args:
        chips: whole number C of chips.
        used: whole number of chips that the run uses, at most C.
        samples: whole number of different chips drawn, at most C.
        catch: chance v that a drawn used chip incriminates (snapshot present, read and replayed).
    """
    fleet, busy, drawn, chance = np.broadcast_arrays(
        counts("chips", chips, low=1),
        counts("used chips", used),
        counts("samples", samples),
        reals("catch", catch, low=0, high=1),
    )
    for name, part in (("used chips", busy), ("samples", drawn)):
        if (part > fleet).any():
            raise CallerError(f"{name} must not exceed the number of chips")
    result = np.empty(fleet.shape)
    for index in np.ndindex(fleet.shape):
        result[index] = _log_miss_one(int(fleet[index]), int(busy[index]), int(drawn[index]), float(chance[index]))
    return result[()]


def samples_needed_without_replacement(
    *,
    chips: int,
    used: int,
    catch: float = 1.0,
    confidence: float = 0.9,
    inspections: float = 1.0,
    miss: float | None = None,
) -> int:
    """Return the fewest different chips per inspection that detect with ``confidence`` over ``inspections``.

    A tie within 1e-12 of the logarithm counts as reached.

    Raises:
        OutOfReachError: even drawing every chip every time is not enough.
    """
    wanted = float(_log_of_wanted_miss(confidence, miss))
    times = float(reals("inspections", inspections, low=0, high=np.inf, open_low=True))

    def escapes(samples: int) -> bool:
        miss = times * float(log_miss_without_replacement(chips=chips, used=used, samples=samples, catch=catch))
        return miss > wanted * (1.0 - _TIE)

    low, high = -1, int(counts("chips", chips, low=1))
    if escapes(high):
        raise OutOfReachError(f"inspecting all {high} chips {times:g} times does not reach the wanted confidence")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if escapes(middle) else (low, middle)
    return high


def incriminating_flop(*, run_flop: ArrayLike, threshold: ArrayLike) -> Floats:
    """Return max(0, F - H): only work beyond the threshold leaves snapshots that show a run above it.

    A scheme laid out with Eq. 1 for H therefore guarantees its confidence for runs of at least 2H.
    """
    run = reals("run flop", run_flop, low=0, high=np.inf)
    return np.maximum(run - reals("threshold", threshold, low=0, high=np.inf), 0.0)[()]


def incriminating_days(*, run_flop: ArrayLike, threshold: ArrayLike, days: ArrayLike) -> Floats:
    """Return T·max(0, 1 - H/F), the days at the end of a run of constant speed whose snapshots incriminate."""
    run = reals("run flop", run_flop, low=0, high=np.inf, open_low=True)
    beyond = incriminating_flop(run_flop=run, threshold=threshold)
    return np.asarray(reals("days", days, low=0, high=np.inf) * (beyond / run))[()]


def _log_miss_one(chips: int, used: int, samples: int, catch: float) -> float:
    if catch == 0 or used == 0 or samples == 0:
        return 0.0
    if catch == 1:
        return log_none_drawn(chips, used, samples)
    return log_pgf_hypergeometric(chips, used, samples, float(np.log1p(-catch)))


def _draws(log_wanted: Floats, log_escape: Floats) -> Floats:
    if (log_escape == 0).any():
        raise CallerError("no number of samples is enough: a sampled chip shows a violation with probability 0")
    return np.asarray(log_wanted / log_escape)[()]


def _log_of_wanted_miss(confidence: ArrayLike, miss: ArrayLike | None) -> Floats:
    if miss is not None:
        return np.asarray(np.log(reals("miss", miss, low=0, high=1, open_low=True)))[()]
    wanted = reals("confidence", confidence, low=0, high=1)
    if (wanted == 1).any():
        raise CallerError("confidence must be below 1: certainty would need infinitely many samples")
    return np.asarray(np.log1p(-wanted))[()]


def _share_below_one(share: ArrayLike) -> Floats:
    used = reals("share", share, low=0, high=1)
    if (used == 1).any():
        raise CallerError("share must be below 1: Eq. 1 gives no number of samples where the run uses the whole fleet")
    return used


def _log1p_ratio(x: Floats) -> Floats:
    """Return -log(1-x)/x, 1 at x = 0."""
    safe = np.where(x == 0, 1.0, x)
    with np.errstate(divide="ignore"):
        return np.where(x == 0, 1.0, -np.log1p(-safe) / safe)
