"""Whether a violation pays: what it gains, what being caught costs, and how the lab feels about risk.

A lab that violates gains G if it goes unnoticed and loses L if it is caught; one that does not gets 0. With constant
absolute risk aversion r its utility of x is (1 - exp(-r·x))/r, which is x itself at r = 0; r < 0 likes risk.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from inspector.probability._logspace import Floats, reals

__all__ = ["deterring_detection", "deterring_penalty", "expected_utility"]

_LARGEST_EXPONENT = 700.0


def expected_utility(*, detection: ArrayLike, gain: ArrayLike, penalty: ArrayLike, aversion: float = 0.0) -> Floats:
    """Return (1-d)·u(G) + d·u(-L): a violation pays where it is above 0.

    Args:
        detection: d, chance to be caught.
        gain: G > 0, of an unnoticed violation.
        penalty: L >= 0, of one that is caught, in the same unit.
        aversion: r, per that unit.

    Raises:
        CallerError: nonsense, or a product of aversion and stake beyond what a float holds.
    """
    caught = reals("detection", detection, low=0, high=1)
    won = _utility(reals("gain", gain, low=0, high=np.inf, open_low=True), aversion)
    lost = _utility(-reals("penalty", penalty, low=0, high=np.inf), aversion)
    return np.asarray((1.0 - caught) * won + caught * lost)[()]


def deterring_detection(*, gain: ArrayLike, penalty: ArrayLike, aversion: float = 0.0) -> Floats:
    """Return u(G)/(u(G) - u(-L)), the least chance to be caught at which a violation no longer pays."""
    won = _utility(reals("gain", gain, low=0, high=np.inf, open_low=True), aversion)
    lost = _utility(-reals("penalty", penalty, low=0, high=np.inf), aversion)
    return np.asarray(won / (won - lost))[()]


def deterring_penalty(*, detection: ArrayLike, gain: ArrayLike, aversion: float = 0.0) -> Floats:
    """Return the least penalty with which a violation does not pay; infinite where none is enough."""
    caught = reals("detection", detection, low=0, high=1)
    won = _utility(reals("gain", gain, low=0, high=np.inf, open_low=True), aversion)
    with np.errstate(divide="ignore", invalid="ignore"):
        needed = np.where(caught == 1, 0.0, (1.0 - caught) * won / caught)
        if aversion == 0:
            return np.asarray(needed)[()]
        # A lab that likes risk has a least utility, -1/|r|: no penalty takes more from it.
        inside = 1.0 + aversion * needed
        return np.asarray(np.where(inside > 0, np.log(np.maximum(inside, 0.0)) / aversion, np.inf))[()]


def _utility(value: Floats, aversion: float) -> Floats:
    rate = float(reals("risk aversion", aversion, low=-np.inf, high=np.inf))
    if rate == 0:
        return value
    reals("product of risk aversion and stake", np.abs(rate * value), low=0, high=_LARGEST_EXPONENT)
    return np.asarray(-np.expm1(-rate * value) / rate)
