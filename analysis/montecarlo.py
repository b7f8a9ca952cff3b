"""Probabilities from simulated campaigns, each with an interval that states its confidence.

Plain trials give a Clopper-Pearson interval. Escapes too rare for plain trials are reached by splitting: worlds that
survived a part of a draw are multiplied, so each step has an ordinary probability and the product is the rare one.
Independent repetitions of the whole procedure ("islands") give a t interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from firmware_sim.errors import CallerError
from inspector.campaign import (
    IntervalEnd,
    Plan,
    Scenario,
    Sizing,
    Strategy,
    TrialResults,
    predict,
    simulate_agents,
    simulate_counts,
)
from inspector.campaign.checks import fraction, whole
from inspector.campaign.counts import CountsWorld
from inspector.campaign.intervals import clopper_pearson
from inspector.campaign.predictions import Prediction

__all__ = [
    "CampaignRow",
    "Estimate",
    "TooNoisyError",
    "TrialEngine",
    "estimate_detection",
    "estimate_rare_miss",
    "in_time",
    "median_of",
    "run_campaign",
    "simulate",
]

Progress = Callable[[int], None]
# A handful of escapes still gives an interval, but a wide one; below this splitting takes over.
FEW_ESCAPES = 20
_CHUNK = 20_000
_SMALLEST_LOG = -700.0
"""Logarithm of an escape that no float holds: splitting would take for ever to say 0, so plain trials have to do."""


class TrialEngine(StrEnum):
    """Which engine plays the campaign."""

    AGENTS = "agents"
    COUNTS = "counts"


class TooNoisyError(CallerError):
    """The islands of a splitting run disagree too much for their interval to mean anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A probability with its interval at ``confidence``; ``effective`` is the number of equally good trials."""

    value: float
    low: float
    high: float
    confidence: float
    trials: int
    effective: float
    method: str

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.value <= self.high <= 1:
            raise ValueError(f"not an interval around a probability: {self.low}, {self.value}, {self.high}")

    def complement(self) -> Estimate:
        """Return the estimate of 1 - p."""
        return Estimate(
            value=1 - self.value,
            low=1 - self.high,
            high=1 - self.low,
            confidence=self.confidence,
            trials=self.trials,
            effective=self.effective,
            method=self.method,
        )


def simulate(
    plan: Plan,
    trials: int,
    rng: Generator,
    *,
    engine: TrialEngine = TrialEngine.COUNTS,
    progress: Progress | None = None,
) -> TrialResults:
    """Play ``trials`` independent campaigns; ``progress`` receives how many more are done."""
    whole("trials", trials, 1)
    if engine is TrialEngine.AGENTS:
        return simulate_agents(plan, trials, rng, progress=progress)
    parts = []
    for start in range(0, trials, _CHUNK):
        size = min(_CHUNK, trials - start)
        parts.append(simulate_counts(plan, size, rng))
        if progress is not None:
            progress(size)
    return TrialResults(
        caught_period=np.concatenate([part.caught_period for part in parts]),
        finished=np.concatenate([part.finished for part in parts]),
        period_days=plan.inspection.period_days,
    )


def estimate_detection(
    plan: Plan,
    trials: int,
    rng: Generator,
    *,
    engine: TrialEngine = TrialEngine.COUNTS,
    confidence: float = 0.95,
    progress: Progress | None = None,
) -> Estimate:
    """Estimate the detection probability by plain trials with a Clopper-Pearson interval."""
    return _detection(simulate(plan, trials, rng, engine=engine, progress=progress), confidence)


def _detection(outcome: TrialResults, confidence: float) -> Estimate:
    caught, trials = int(outcome.caught.sum()), outcome.caught.size
    low, high = clopper_pearson(caught, trials, confidence)
    return Estimate(
        value=caught / trials,
        low=low,
        high=high,
        confidence=confidence,
        trials=trials,
        effective=float(trials),
        method="plain",
    )


def estimate_rare_miss(
    plan: Plan,
    rng: Generator,
    *,
    particles: int = 2000,
    islands: int = 20,
    confidence: float = 0.95,
    progress: Progress | None = None,
) -> Estimate:
    """Estimate an escape probability, however small, by splitting.

    Each island is unbiased for every number of particles. Draws are cut so that about half of the worlds survive a
    part; the cuts follow from the plan alone, since cuts that depend on the worlds would bias the product.

    Args:
        particles: worlds in an island.
        islands: independent repetitions; ``progress`` is called after each.

    Raises:
        TooNoisyError: The effective number of islands is below half of them.
    """
    from scipy.stats import t as student

    fraction("confidence", confidence)
    if particles < 2 or islands < 4:
        raise CallerError(f"splitting needs at least 2 particles and 4 islands, got {particles} and {islands}")
    cuts = [[_cuts(plan, urn, period) for urn in range(len(plan.urns))] for period in range(plan.periods)]
    logs = np.empty(islands)
    for island in range(islands):
        logs[island] = _island(plan, particles, cuts, rng)
        if progress is not None:
            progress(1)
    weights, effective, top = _weighed(logs, particles)
    mean = float(weights.mean())
    half = float(student.isf((1 - confidence) / 2, islands - 1) * weights.std(ddof=1) / math.sqrt(islands))
    scale = math.exp(top)
    return Estimate(
        value=min(1.0, mean * scale),
        low=max(0.0, mean - half) * scale,
        high=min(1.0, (mean + half) * scale),
        confidence=confidence,
        trials=islands * particles,
        effective=effective,
        method="splitting",
    )


def _weighed(logs: NDArray[np.float64], particles: int) -> tuple[NDArray[np.float64], float, float]:
    """Weights of the islands, how many equal ones they are worth, and the logarithm of their scale."""
    top = float(logs.max())
    if math.isinf(top):
        raise TooNoisyError(f"no world of {logs.size}·{particles} escaped; use more particles")
    weights = np.exp(logs - top)
    effective = float(weights.sum() ** 2 / (weights**2).sum())
    if effective < logs.size / 2:
        raise TooNoisyError(
            f"the {logs.size} independent simulations differ so much that they count as {effective:.1f}; use more "
            "particles"
        )
    return weights, effective, top


def _cuts(plan: Plan, urn: int, period: int) -> list[int]:
    """Return the sizes of the parts of one draw, about half of the worlds surviving each."""
    stock, inspection = plan.urns[urn], plan.inspection
    length = inspection.period_days
    risk = inspection.honest_refusal_rate if inspection.refusals_allowed == 0 else 0.0
    for s in plan.strata:
        if s.urn == urn:
            days = max(0.0, min((period + 1) * length, s.end) - max(period * length, s.begin))
            holds = -math.expm1(-s.rate * days)
            risk += s.count / stock.chips * (holds * s.catch_snapshot + (1 - holds) * s.catch_bare)
    if risk <= 0:
        size = stock.samples
    else:
        size = stock.samples if risk < 1e-12 else max(1, int(math.log(0.5) / math.log1p(-min(risk, 0.999999))))
    whole, rest = divmod(stock.samples, max(1, size))
    return [size] * whole + ([rest] if rest else [])


def _island(plan: Plan, particles: int, cuts: list[list[list[int]]], rng: Generator) -> float:
    world = CountsWorld(plan, particles)
    total = 0.0
    for period in range(plan.periods):
        world.begin(rng)
        for urn, parts in enumerate(cuts[period]):
            for part in parts:
                world.draw(urn, part, rng)
                world, gain = _resampled(world, rng)
                if math.isinf(gain):
                    return gain
                total += gain
        world.end(rng)
        world, gain = _resampled(world, rng)
        if math.isinf(gain):
            return gain
        total += gain
    return total + _escape_at_the_end(plan)


def _resampled(world: CountsWorld, rng: Generator) -> tuple[CountsWorld, float]:
    """Return as many worlds as before, drawn from the survivors, and the log of the surviving share."""
    size = world.caught.size
    alive = np.flatnonzero(~world.caught)
    if alive.size == size:
        return world, 0.0
    if alive.size == 0:
        return world, -math.inf
    # Systematic resampling: each survivor is copied the same number of times, give or take one.
    places = (np.arange(size) + rng.random()) * (alive.size / size)
    return world.take(rng.permutation(alive)[places.astype(np.int64)]), math.log(alive.size / size)


def _escape_at_the_end(plan: Plan) -> float:
    """Return the log of the chance that neither claimed losses nor other evidence accuse.

    Both are independent of all draws, so their exact probability replaces a last simulated step.
    """
    total = 0.0
    if plan.loss_test is not None:
        from scipy.stats import binom

        test = plan.loss_test
        total += float(binom.logcdf(test.tolerated - test.diverted, test.chips, test.loss))
    if plan.weighing is not None:
        accused = plan.weighing.probability()
        total += -math.inf if accused >= 1 else math.log1p(-accused)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class CampaignRow:
    """One strategy: what the simulation measured and what theory predicts.

    Attributes:
        detection: measured detection probability. Its interval also holds the uncertainty of measured rates: each end
            comes from the simulation at that end of the rates' own intervals (detection never falls when a rate rises),
            and the error probability is shared between rates and trials.
        miss: measured escape probability, by splitting where escapes are rare.
        predicted: the closed form at the rates' point values.
        false_alarm: exact probability that a world of honest labs alone is accused under the same regime over the same
            days; the row of that world measures it.
        completed: share of the trials in which the runs were finished unseen.
        days_to_detection: (10 %, 50 %, 90 %) quantiles of the day of detection among caught trials.
        median_interval: of that median, at the campaign's confidence; None where no trial was caught.
        in_time: the part of detection that comes before the run ends; None where the run reacts.
        measured_lies: lies whose rates came from measurements; ``assumed_lies`` those that the scenario assumed.
        lawful_runs: runs that spend the threshold or less, which no snapshot incriminates.
        sizing: what the wanted probability takes within the cap on false alarms; None for the world of honest labs.
    """

    name: str
    detection: Estimate
    miss: Estimate
    predicted: Prediction
    false_alarm: float
    completed: float
    days_to_detection: tuple[float, float, float] | None
    median_interval: tuple[float, float] | None
    in_time: float | None
    involved_chips: int
    hidden_chips: int
    samples_per_period: int
    measured_lies: tuple[str, ...]
    assumed_lies: tuple[str, ...]
    lawful_runs: tuple[str, ...]
    sizing: Sizing | None

    @property
    def excess(self) -> tuple[float, float, float]:
        """Measured detection less false alarm, and the ends of its interval; below 0 by chance alone."""
        found = self.detection
        return found.value - self.false_alarm, found.low - self.false_alarm, found.high - self.false_alarm

    @property
    def predicted_excess(self) -> float | None:
        """Predicted detection less false alarm; None without closed form."""
        return None if self.predicted.detection is None else self.predicted.detection - self.false_alarm


def run_campaign(
    scenario: Scenario,
    trials: int,
    seed: int,
    *,
    engine: TrialEngine = TrialEngine.COUNTS,
    confidence: float = 0.95,
    progress: Progress | None = None,
) -> list[CampaignRow]:
    """Simulate the honest world and every strategy of a scenario.

    Each row has its own random stream, derived from ``seed`` and its number; ``progress`` receives finished
    trials, ``trials`` for each row.

    Raises:
        CallerError: A parameter is out of range, or a strategy cannot be carried out.
    """
    fraction("confidence", confidence)
    whole("seed", seed)
    rows = []
    streams = np.random.SeedSequence(seed).spawn(len(scenario.strategies) + 1)
    for strategy, stream in zip((None, *scenario.strategies), streams, strict=True):
        rows.append(_row(scenario, strategy, trials, stream, engine, confidence, progress))
    return rows


def median_of(days: NDArray[np.float64], confidence: float) -> tuple[float, float, float] | None:
    """Return the median with the order statistics that enclose it; None of nothing."""
    from scipy.stats import binom

    if not days.size:
        return None
    ordered = np.sort(days)
    low = int(binom.ppf((1 - confidence) / 2, days.size, 0.5)) - 1
    places = ((days.size - 1) // 2, max(low, 0), min(days.size - 1 - low, days.size - 1))
    median, least, most = (float(ordered[place]) for place in places)
    return median, least, most


def in_time(plan: Plan, days: NDArray[np.float64], detection: float) -> float | None:
    """Return the part of ``detection`` that comes before the runs end, by simulated ``days``.

    None where the runs react, so that their end is not known, or where there are none.
    """
    if plan.reaction is not None or plan.end == 0:
        return None
    return detection * float((days <= plan.end * (1 + 1e-12)).mean()) if days.size else 0.0


def _is_beyond(predicted: Prediction) -> bool:
    """Whether an escape is too rare to be counted."""
    return predicted.log_miss is not None and predicted.log_miss < _SMALLEST_LOG


def _quantiles(days: NDArray[np.float64]) -> tuple[float, float, float] | None:
    """10 %, 50 % and 90 % quantiles of days of detection; None without any."""
    if not days.size:
        return None
    tenth, half, ninth = np.quantile(days, (0.1, 0.5, 0.9), method="inverted_cdf")
    return float(tenth), float(half), float(ninth)


def _row(
    scenario: Scenario,
    strategy: Strategy | None,
    trials: int,
    stream: np.random.SeedSequence,
    engine: TrialEngine,
    confidence: float,
    progress: Progress | None,
) -> CampaignRow:
    plan = scenario.honest() if strategy is None else scenario.plan(strategy)
    measured = tuple(lie for lie in plan.lies if scenario.rates.is_measured(lie))
    # Half of the error probability for the trials, half shared by the measured rates.
    own = (1 + confidence) / 2 if measured else confidence
    main, lower, upper = stream.spawn(3)
    outcome = simulate(plan, trials, Generator(Philox(main)), engine=engine, progress=progress)
    detection = _detection(outcome, own)
    miss = detection.complement()
    predicted = predict(plan)
    if trials - outcome.caught.sum() < FEW_ESCAPES and not _is_beyond(predicted):
        miss = _rare(plan, own, main.spawn(1)[0]) or miss
        detection = miss.complement()
    if measured and strategy is not None:
        shared = 1 - (1 - confidence) / 2 / len(measured)
        ends = []
        for bound, source in ((IntervalEnd.LOW, lower), (IntervalEnd.HIGH, upper)):
            other = scenario.plan(strategy, bound, shared)
            found = _detection(simulate(other, trials, Generator(Philox(source)), engine=engine), own)
            rare = _rare(other, own, source.spawn(1)[0]) if miss.method == "splitting" else None
            ends.append((rare.complement(), rare) if rare else (found, found.complement()))
        detection = _spread(detection, ends[0][0].low, ends[1][0].high, confidence)
        miss = _spread(miss, ends[1][1].low, ends[0][1].high, confidence)
    days = outcome.detection_days()
    return CampaignRow(
        name=plan.name,
        detection=detection,
        miss=miss,
        predicted=predicted,
        false_alarm=scenario.false_alarm(),
        completed=float((outcome.finished & ~outcome.caught).mean()) if strategy is not None else 0.0,
        days_to_detection=_quantiles(days),
        median_interval=None if (median := median_of(days, confidence)) is None else median[1:],
        in_time=in_time(plan, days, detection.value),
        involved_chips=plan.involved,
        hidden_chips=plan.hidden_chips,
        samples_per_period=plan.samples_per_period,
        measured_lies=measured,
        assumed_lies=tuple(lie for lie in plan.lies if lie not in measured),
        lawful_runs=plan.lawful,
        sizing=None if strategy is None else scenario.sizing(strategy),
    )


def _rare(plan: Plan, confidence: float, stream: np.random.SeedSequence) -> Estimate | None:
    """Return the splitting estimate; None where no or too few worlds escape, so that plain trials' bound has to do."""
    try:
        return estimate_rare_miss(plan, Generator(Philox(stream)), confidence=confidence)
    except TooNoisyError:
        return None


def _spread(estimate: Estimate, low: float, high: float, confidence: float) -> Estimate:
    return Estimate(
        value=estimate.value,
        low=min(low, estimate.low),
        high=max(high, estimate.high),
        confidence=confidence,
        trials=estimate.trials,
        effective=estimate.effective,
        method=f"{estimate.method}, rates from measurement",
    )
