"""The aggregated engine: exchangeable chips are counts, drawn by binomial and hypergeometric thinning.

Its cost grows with trials, periods and strata, and does not depend on the number of chips.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from firmware_sim.errors import CallerError
from inspector.campaign.checks import whole
from inspector.campaign.plan import Plan, Stratum, finished, forgets
from inspector.campaign.reactions import Control, FloatArray, IntArray

__all__ = ["CountsWorld", "TrialResults", "simulate_counts"]

# numpy's hypergeometric sampler refuses larger urns.
LARGEST_URN = 999_999_999
_ACTIVE, _IDLE = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResults:
    """Results of all trials.

    Attributes:
        caught_period: 0-based period whose inspection caught the lab, -1 if none did.
        finished: whether the runs reached their end by the horizon, if they were not stopped.
        period_days: length of a period, so that caught_period k means day (k + 1)·period_days.
    """

    caught_period: NDArray[np.int64]
    finished: NDArray[np.bool_]
    period_days: float

    @property
    def caught(self) -> NDArray[np.bool_]:
        """Whether the lab was caught at all."""
        return self.caught_period >= 0

    def detection_days(self) -> FloatArray:
        """Return the day of detection for each trial that was caught."""
        return np.asarray((self.caught_period[self.caught] + 1.0) * self.period_days, np.float64)


def overlap(clock: FloatArray, advance: FloatArray, scale: FloatArray, begin: float, end: float) -> FloatArray:
    """Return world days that the plan window [begin, end) gets while the clock advances at speed ``scale``."""
    days = np.minimum(clock + advance, end) - np.maximum(clock, begin)
    return np.asarray(np.maximum(days, 0.0) / scale, np.float64)


class CountsWorld:
    """The state of ``trials`` worlds in the middle of a campaign; one period is begin, draws, end."""

    def __init__(self, plan: Plan, trials: int) -> None:
        for urn in plan.urns:
            if urn.chips > LARGEST_URN:
                raise CallerError(
                    f"{urn.name!r} has {urn.chips} chips, but the aggregated engine takes at most {LARGEST_URN} in one "
                    "urn"
                )
        strata = len(plan.strata)
        self.plan = plan
        self.control = Control.fresh(trials)
        self.caught = np.zeros(trials, np.bool_)
        counts = np.array([s.count for s in plan.strata], np.int64).reshape(strata, 1)
        # Chips still in the urn, by stratum and (active, idle): with and without an incriminating snapshot in the log.
        self.snap = np.zeros((strata, 2, trials), np.int64)
        self.bare = np.zeros((strata, 2, trials), np.int64)
        self.bare[:, _ACTIVE, :] = counts
        self.out = np.zeros((strata, trials), np.int64)
        self.pending = np.zeros((strata, 2, trials), np.int64)
        self.broken = np.zeros((len(plan.urns), trials), np.int64)
        self.hits = np.zeros(trials, np.int64)
        self.left = [urn.chips for urn in plan.urns]
        self._advance = np.zeros(trials)
        self._pool = list(self.left)
        self._undrawn: list[tuple[IntArray, IntArray]] = []

    def take(self, index: IntArray) -> CountsWorld:
        """Return the worlds at ``index`` (with repetition) as a new object."""
        other = object.__new__(CountsWorld)
        other.plan, other.left, other._pool = self.plan, list(self.left), list(self._pool)
        other.control = self.control.take(index)
        for name in ("snap", "bare", "out", "pending", "broken"):
            setattr(other, name, getattr(self, name)[..., index])
        other.caught, other.hits, other._advance = self.caught[index], self.hits[index], self._advance[index]
        other._undrawn = [(snap[..., index], bare[..., index]) for snap, bare in self._undrawn]
        return other

    def begin(self, rng: Generator) -> None:
        """Let one period pass: chips work and take snapshots; then the draw of this period is open."""
        control, plan = self.control, self.plan
        self._advance = control.advance(plan.inspection.period_days)
        if forgets(plan):
            self.bare += self.snap
            self.snap[:] = 0
        if plan.reaction is not None:
            self._rest(rng)
        for index, stratum in enumerate(plan.strata):
            if stratum.rate == 0 or stratum.begin >= stratum.end:
                continue
            days = overlap(control.clock, self._advance, control.scale, stratum.begin, stratum.end)
            if not days.any():
                continue
            fresh = rng.binomial(self.bare[index, _ACTIVE], -np.expm1(-stratum.rate * days))
            self.bare[index, _ACTIVE] -= fresh
            self.snap[index, _ACTIVE] += fresh
        self.hits[:] = 0
        self.pending[:] = 0
        self.broken[:] = 0
        self._pool = list(self.left)
        self._undrawn = [(self.snap.copy(), self.bare.copy())] if plan.inspection.redraw else []

    def _rest(self, rng: Generator) -> None:
        """Take chips out of work: those that a smaller run or a move to inspected chips no longer needs."""
        control, plan = self.control, self.plan
        inspected = [
            np.full(control.clock.shape, urn.chips - left, np.int64)
            for urn, left in zip(plan.urns, self.left, strict=True)
        ]
        for index, stratum in enumerate(plan.strata):
            wanted = np.ceil(control.scale * stratum.count).astype(np.int64)
            elsewhere = self.out[index]
            if plan.reaction is not None and plan.reaction.hides_in_inspected:
                room = inspected[stratum.urn]
                elsewhere = np.where(control.clock < stratum.busy_end, np.minimum(room, wanted), 0)
                room -= elsewhere
            target = np.maximum(wanted - elsewhere, 0)
            active_snap, active_bare = self.snap[index, _ACTIVE], self.bare[index, _ACTIVE]
            excess = np.maximum(active_snap + active_bare - target, 0)
            if not excess.any():
                continue
            moved = rng.hypergeometric(active_snap, active_bare, excess)
            self.snap[index, _ACTIVE] -= moved
            self.snap[index, _IDLE] += moved
            self.bare[index, _ACTIVE] -= excess - moved
            self.bare[index, _IDLE] += excess - moved

    def draw(self, urn: int, samples: int, rng: Generator) -> None:
        """Draw and inspect ``samples`` more chips of one urn; draws of a period may come in several parts."""
        inspection = self.plan.inspection
        left = np.full(self.caught.shape, samples, np.int64)
        pool = np.full(self.caught.shape, self._pool[urn], np.int64)
        mine = [(index, stratum) for index, stratum in enumerate(self.plan.strata) if stratum.urn == urn]
        for (index, stratum), holds, part in product(mine, (True, False), (_ACTIVE, _IDLE)):
            chips = self.snap[index] if holds else self.bare[index]
            group = chips[part]
            if not group.any():
                continue
            drawn = self._draw_group(group, pool, left, rng)
            left = left - drawn
            pool = pool - group
            if not inspection.replacement:
                chips[part] = group - drawn
            if part == _ACTIVE:
                self.hits += np.where(self._in_use(stratum), drawn, 0)
                self.out[index] += drawn
            shown = self._not_broken(urn, drawn, rng)
            catch = stratum.catch_snapshot if holds else stratum.catch_bare
            if catch > 0:
                begun = self.control.clock + self._advance > stratum.busy_begin
                self._inspect(index, holds, np.where(holds | begun, shown, 0), catch, rng)
        self._not_broken(urn, left, rng)
        if not inspection.replacement:
            self._pool[urn] -= samples
        allowed = inspection.refusals_allowed
        self.caught |= self.broken[urn] > allowed
        if self.plan.refuse:
            self.caught |= self.broken[urn] + self._certain(urn) > allowed

    def _draw_group(self, group: IntArray, pool: IntArray, left: IntArray, rng: Generator) -> IntArray:
        if self.plan.inspection.replacement:
            # Rounding only: pool is 0 only where no draw is left for this group.
            share = np.minimum(group / np.maximum(pool, 1), 1.0)
            return rng.binomial(left, share)
        return rng.hypergeometric(group, pool - group, left)

    def _not_broken(self, urn: int, drawn: IntArray, rng: Generator) -> IntArray:
        """Return how many of the drawn chips can answer; those that are broken are counted as refusals."""
        rate = self.plan.inspection.honest_refusal_rate
        if rate <= 0:
            return drawn
        broken = rng.binomial(drawn, rate)
        self.broken[urn] += broken
        return drawn - broken

    def _inspect(self, index: int, holds: bool, shown: IntArray, catch: float, rng: Generator) -> None:
        if self.plan.refuse:
            self.pending[index, 0 if holds else 1] += shown
        elif catch == 1:
            self.caught |= shown > 0
        else:
            self.caught |= rng.random(shown.shape) < -np.expm1(shown * np.log1p(-catch))

    def _certain(self, urn: int) -> IntArray:
        """Return drawn chips that must be refused because their inspection would surely end in a REJECT."""
        total = np.zeros(self.caught.shape, np.int64)
        for index, stratum in enumerate(self.plan.strata):
            if stratum.urn == urn:
                total += self.pending[index, 0] * (stratum.catch_snapshot == 1)
                total += self.pending[index, 1] * (stratum.catch_bare == 1)
        return total

    def end(self, rng: Generator) -> None:
        """Close the period: pending refusals are settled, sites searched, and the lab reacts."""
        control, plan = self.control, self.plan
        if plan.refuse:
            self._settle(rng)
        after = control.clock + self._advance
        for search in plan.searches:
            busy = np.minimum(after, search.busy_end) > np.maximum(control.clock, search.busy_begin)
            self.caught |= busy & (rng.random(busy.shape) < search.catch)
        control.clock = after
        control.drawn += self.hits
        if plan.reaction is not None:
            plan.reaction.react(control, self.hits)
        if plan.inspection.redraw:
            ((self.snap, self.bare),) = self._undrawn
            self.out[:] = 0
        else:
            self.left = list(self._pool)

    def _settle(self, rng: Generator) -> None:
        """Refuse as many pending chips as is tolerated, chips with a snapshot first; the rest is inspected."""
        for urn in range(len(self.plan.urns)):
            budget = np.maximum(self.plan.inspection.refusals_allowed - self.broken[urn], 0)
            for holds in (0, 1):
                for index, stratum in enumerate(self.plan.strata):
                    if stratum.urn != urn:
                        continue
                    refused = np.minimum(self.pending[index, holds], budget)
                    budget = budget - refused
                    catch = stratum.catch_bare if holds else stratum.catch_snapshot
                    shown = self.pending[index, holds] - refused
                    with np.errstate(divide="ignore", invalid="ignore"):
                        passes = np.where(shown > 0, shown * np.log1p(-catch), 0.0)
                    self.caught |= rng.random(shown.shape) < -np.expm1(passes)

    def _in_use(self, stratum: Stratum) -> NDArray[np.bool_]:
        clock, after = self.control.clock, self.control.clock + self._advance
        return np.minimum(after, stratum.busy_end) > np.maximum(clock, stratum.busy_begin)

    def test_losses(self, rng: Generator) -> NDArray[np.bool_]:
        """Return where claimed losses at the end of the horizon cause an investigation."""
        test = self.plan.loss_test
        if test is None:
            return np.zeros(self.caught.shape, np.bool_)
        return rng.binomial(test.chips, test.loss, self.caught.shape) + test.diverted > test.tolerated


def simulate_counts(plan: Plan, trials: int, rng: Generator) -> TrialResults:
    """Simulate ``trials`` independent campaigns with aggregated counts.

    Raises:
        CallerError: ``trials`` is below 1 or an urn is larger than the sampler allows.
    """
    whole("trials", trials, 1)
    world = CountsWorld(plan, trials)
    caught_period = np.full(trials, -1, np.int64)
    for period in range(plan.periods):
        world.begin(rng)
        for index, urn in enumerate(plan.urns):
            world.draw(index, urn.samples, rng)
        world.end(rng)
        caught_period[world.caught & (caught_period < 0)] = period
    late = world.test_losses(rng)
    if plan.weighing is not None:
        late = late | plan.weighing.accused(trials, rng)
    caught_period[late & (caught_period < 0)] = plan.periods - 1
    return TrialResults(
        caught_period=caught_period, finished=finished(plan, world.control), period_days=plan.inspection.period_days
    )
