"""A run that is spread over several sites or several labs: the placement decides how likely it is seen.

Laws: chances at different sites add up in log space; the lab knows the schedule and picks the placement; sites or
labs that are judged separately can each hide what stays below their own threshold.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from inspector.probability._logspace import Floats, reals
from inspector.probability.detection import (
    DAYS_PER_YEAR,
    FLOP_PER_CHIP_DAY,
    SHARE_SLACK,
    ChipsTooFewError,
    hit_probability,
    incriminating_flop,
    log_miss,
)

__all__ = ["collusion_log_miss", "sites_log_miss", "worst_placement"]

_BISECTIONS = 200
_NEGLIGIBLE = 1e-270


def sites_log_miss(*, used: ArrayLike, chips: ArrayLike, samples: ArrayLike, catch: ArrayLike = 1.0) -> Floats:
    """Return sum over sites of s_i·log(1 - v_i·x_i/C_i); the last axis counts the sites.

    Args:
        used: x_i, real number of chips that the run uses at each site, at most C_i.
        chips: C_i.
        samples: s_i, draws over the whole run (per period times periods).
        catch: v_i, chance that a drawn used chip incriminates.
    """
    fleet = reals("chips", chips, low=0, high=np.inf, open_low=True)
    hit = hit_probability(share=np.asarray(used, np.float64) / fleet, snapshot=catch)
    return np.asarray(np.atleast_1d(log_miss(hit=hit, samples=samples)).sum(axis=-1))[()]


def worst_placement(*, total: float, chips: ArrayLike, samples: ArrayLike, catch: ArrayLike = 1.0) -> Floats:
    """Return how a lab spreads ``total`` chips over the sites so that ``sites_log_miss`` is largest.

    The log of the miss is concave in the placement, so at the best one all sites neither empty nor full have the same
    marginal risk s·v/(C - v·x): sites without samples are filled first, the others to one water level.

    Returns:
        Chips used at each site, shape (sites,), summing to ``total``.

    Raises:
        ChipsTooFewError: the sites hold fewer chips than ``total``.
    """
    fleet, drawn, chance = np.broadcast_arrays(
        np.atleast_1d(reals("chips", chips, low=0, high=np.inf, open_low=True)),
        np.atleast_1d(reals("samples", samples, low=0, high=np.inf)),
        np.atleast_1d(reals("catch", catch, low=0, high=1)),
    )
    wanted = float(reals("total", total, low=0, high=np.inf))
    if wanted > fleet.sum() * (1.0 + SHARE_SLACK):
        raise ChipsTooFewError(f"the run needs {wanted:.6g} chips but the sites hold {fleet.sum():.6g}")
    free = drawn * chance < _NEGLIGIBLE * fleet
    placed = np.where(free, fleet * min(1.0, wanted / fleet[free].sum()) if free.any() else 0.0, 0.0)
    rest = wanted - placed.sum()
    if rest <= 0 or free.all():
        return placed

    most = fleet / np.where(free, 1, chance)

    def at(level: float) -> Floats:
        return np.where(free, placed, np.minimum(np.maximum(most - drawn / level, 0.0), fleet))

    risk = (drawn * chance)[~free] / fleet[~free]
    with np.errstate(divide="ignore", over="ignore"):
        full = (risk / (1.0 - chance[~free])).max()
    low, high = risk.min(), full if np.isfinite(full) else risk.max() * 2.0**60
    for _ in range(_BISECTIONS):
        if high <= low * (1.0 + 1e-15):
            break
        level = np.sqrt(low) * np.sqrt(high)
        low, high = (level, high) if at(level).sum() < wanted else (low, level)
    answer = at(high)
    movable = np.where(free, 0.0, answer)
    return answer if movable.sum() == 0 else np.minimum(answer - movable + movable * (rest / movable.sum()), fleet)


def collusion_log_miss(
    *,
    flops: ArrayLike,
    chips: ArrayLike,
    samples: ArrayLike,
    threshold: float,
    joint: bool,
    days: float = DAYS_PER_YEAR,
    catch: ArrayLike = 1.0,
    flop_per_day: float = FLOP_PER_CHIP_DAY,
) -> Floats:
    """Return the log of the miss when labs share one run; the last axis counts the labs.

    Joint sampling treats them as one lab, so everything beyond one ``threshold`` incriminates, in proportion to
    each one's part. Separate sampling grants each its own threshold: parts that stay below it leave no trace at all.

    Args:
        flops: each lab's part of the run, FLOP.
        chips: each lab's chips.
        samples: draws over the whole run at each lab.
        threshold: H.
        joint: whether snapshots of all of them are judged together.
        days: T.
        catch: chance that a drawn chip with incriminating work incriminates.
        flop_per_day: a.
    """
    parts = np.atleast_1d(reals("flops", flops, low=0, high=np.inf))
    if joint:
        whole = parts.sum(axis=-1, keepdims=True)
        seen = parts * incriminating_flop(run_flop=whole, threshold=threshold) / np.where(whole > 0, whole, 1.0)
    else:
        seen = np.asarray(incriminating_flop(run_flop=parts, threshold=threshold))
    speed = reals("flop per chip and day", flop_per_day, low=0, high=np.inf, open_low=True)
    time = reals("days", days, low=0, high=np.inf, open_low=True)
    if (parts / (speed * time) > reals("chips", chips, low=0, high=np.inf) * (1.0 + SHARE_SLACK)).any():
        raise ChipsTooFewError("a lab owns fewer chips than its part of the run needs")
    return sites_log_miss(used=seen / (speed * time), chips=chips, samples=samples, catch=catch)
