"""Regimes side by side: what each catches, how late, at what cost, and how often it accuses honest labs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator, Philox

from analysis.montecarlo import TrialEngine, in_time, median_of, simulate
from firmware_sim.errors import CallerError
from inspector.campaign import Scenario, Strategy, clopper_pearson, predict
from inspector.campaign.checks import fraction, whole

__all__ = ["RegimeCell", "RegimeResult", "compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeCell:
    """One strategy under one regime.

    Attributes:
        detection: the closed form where ``exact``, else simulated.
        low, high: interval of a simulated detection; the closed form itself where there is one.
        delay: median day of detection among caught trials; None if none was caught.
        delay_low, delay_high: interval of that median.
        in_time: the part of detection that comes before the run ends; None where the run reacts.
        found: the chance that each source which looks for undeclared sites finds one, false alarms aside.
    """

    strategy: str
    detection: float
    low: float
    high: float
    exact: bool
    delay: float | None
    delay_low: float | None = None
    delay_high: float | None = None
    in_time: float | None = None
    found: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeResult:
    """One regime against every strategy, in the file's order."""

    scenario: Scenario
    cells: tuple[RegimeCell, ...]

    @property
    def worst(self) -> RegimeCell:
        """The strategy with the least detection; of equals, the one that is found last."""
        return min(self.cells, key=lambda cell: (cell.detection, -(cell.delay or float("inf"))))


def compare(
    scenarios: Sequence[Scenario],
    trials: int,
    seed: int,
    *,
    engine: TrialEngine = TrialEngine.COUNTS,
    confidence: float = 0.95,
    progress: Callable[[int], object] = lambda done: None,
) -> list[RegimeResult]:
    """Return every strategy under every regime: closed forms where they exist, delays from simulation.

    Args:
        scenarios: the regimes; their strategies must be the same.
        trials: campaigns that each cell plays, with the same random numbers in every regime.
        seed: of these.
        engine: that plays them.
        confidence: of the intervals of what has no closed form.
        progress: called after each cell.

    Raises:
        CallerError: no regime, or strategies that differ.
    """
    fraction("confidence", confidence)
    whole("seed", seed)
    if not scenarios or len({tuple(each.name for each in one.strategies) for one in scenarios}) > 1:
        raise CallerError("a comparison of regimes needs at least one regime, and the same strategies in each")
    results = []
    for scenario in scenarios:
        streams = np.random.SeedSequence(seed).spawn(len(scenario.strategies))
        cells = []
        for strategy, stream in zip(scenario.strategies, streams, strict=True):
            cells.append(_cell(scenario, strategy, trials, stream, engine, confidence))
            progress(1)
        results.append(RegimeResult(scenario=scenario, cells=tuple(cells)))
    return results


def _cell(
    scenario: Scenario,
    strategy: Strategy,
    trials: int,
    stream: np.random.SeedSequence,
    engine: TrialEngine,
    confidence: float,
) -> RegimeCell:
    plan = scenario.plan(strategy)
    outcome = simulate(plan, trials, Generator(Philox(stream)), engine=engine)
    closed = predict(plan).detection
    days, caught = outcome.detection_days(), int(outcome.caught.sum())
    median, least, most = median_of(days, confidence) or (None, None, None)
    low, high = (closed, closed) if closed is not None else clopper_pearson(caught, trials, confidence)
    return RegimeCell(
        strategy=strategy.name,
        detection=caught / trials if closed is None else closed,
        low=low,
        high=high,
        exact=closed is not None,
        delay=median,
        delay_low=least,
        delay_high=most,
        in_time=in_time(plan, days, caught / trials if closed is None else closed),
        found=scenario.observations.found(plan.target),
    )
