"""What uncertain numbers of a scenario do to each strategy's detection, in closed form.

The regime stays as it is for the medians: an inspectorate that does not know the numbers cannot adapt to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from firmware_sim.errors import CallerError
from inspector.campaign.predictions import predict
from inspector.campaign.scenario import Scenario
from inspector.probability.uncertainty import Band, band, draws

__all__ = ["detection_bands"]


def detection_bands(
    scenario: Scenario,
    drawn: Callable[[Mapping[str, float]], Scenario],
    *,
    number: int,
    seed: int,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, Band]:
    """Return the band of each strategy's closed form, by its name.

    Args:
        scenario: the scenario at the medians.
        drawn: makes it of drawn values, by dotted key.
        number: draws.
        seed: of the draws.
        progress: called after each draw.

    Returns:
        Bands over the draws that the closed form covers; a draw in which the strategy cannot be carried out, for want
        of chips or time, has no answer.
    """
    at = draws(scenario.uncertain, number=number, seed=seed)
    names = [strategy.name for strategy in scenario.strategies]
    found = np.full((len(names), number), math.nan)
    for place in range(number):
        progress(1)
        try:
            other = drawn({name: float(values[place]) for name, values in at.items()})
        except CallerError:
            continue
        for row, strategy in enumerate(other.strategies):
            detection = predict(other.plan(strategy)).detection
            if detection is not None:
                found[row, place] = detection
    return {name: band(row) for name, row in zip(names, found, strict=True)}
