"""The per-chip engine: every chip has its own snapshot times and its own place in the draw.

Written from the story, not from the aggregated engine's formulas, so that agreement of the two means something. Worlds
are simulated in batches; the arrays are (worlds, chips) in small types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from inspector.campaign.checks import whole
from inspector.campaign.counts import TrialResults, overlap
from inspector.campaign.plan import Plan, Stratum, finished, forgets
from inspector.campaign.reactions import Control, FloatArray, IntArray

__all__ = ["simulate_agents"]

BoolArray = NDArray[np.bool_]
# Chips simulated together; bounds the memory of a batch of small worlds and of one block of a large one.
_BATCH = 2_000_000
_BLOCK = 1_000_000


def simulate_agents(
    plan: Plan,
    trials: int,
    rng: Generator,
    *,
    stop_when_caught: bool = True,
    progress: Callable[[int], None] | None = None,
) -> TrialResults:
    """Simulate ``trials`` independent campaigns chip by chip; ``progress`` receives the trials done.

    With ``stop_when_caught`` a batch ends once all its worlds were caught, which changes no detection.
    """
    whole("trials", trials, 1)
    size = max(1, _BATCH // max(urn.chips for urn in plan.urns))
    outcomes = []
    done = 0
    while done < trials:
        worlds = min(size, trials - done)
        outcomes.append(_Worlds(plan, worlds, rng).run(stop_when_caught))
        done += worlds
        if progress is not None:
            progress(worlds)
    return TrialResults(
        caught_period=np.concatenate([outcome.caught_period for outcome in outcomes]),
        finished=np.concatenate([outcome.finished for outcome in outcomes]),
        period_days=plan.inspection.period_days,
    )


@dataclass(slots=True)
class _Group:
    """The chips of one stratum in every world: which work, which hold an incriminating snapshot."""

    stratum: Stratum
    first: int
    working: BoolArray
    holds: BoolArray


class _Worlds:
    """One batch of worlds. In each urn the involved chips come first; draws are uniform, so place means nothing."""

    def __init__(self, plan: Plan, worlds: int, rng: Generator) -> None:
        self.plan, self.worlds, self.rng = plan, worlds, rng
        self.control = Control.fresh(worlds)
        self.caught = np.zeros(worlds, np.bool_)
        self.logged = [np.zeros((worlds, urn.chips), np.uint16) for urn in plan.urns]
        self.inspected = [None if plan.inspection.redraw else np.zeros((worlds, u.chips), np.bool_) for u in plan.urns]
        self.groups: list[_Group] = []
        used = [0] * len(plan.urns)
        for stratum in plan.strata:
            shape = (worlds, stratum.count)
            self.groups.append(_Group(stratum, used[stratum.urn], np.ones(shape, np.bool_), np.zeros(shape, np.bool_)))
            used[stratum.urn] += stratum.count

    def run(self, stop_when_caught: bool) -> TrialResults:
        plan, control = self.plan, self.control
        caught_period = np.full(self.worlds, -1, np.int64)
        for period in range(plan.periods):
            advance = control.advance(plan.inspection.period_days)
            if plan.reaction is not None:
                self._rest()
            self._work(advance)
            hits = np.zeros(self.worlds, np.int64)
            for urn in range(len(plan.urns)):
                hits += self._inspect(urn, advance)
            self._search(advance)
            control.clock = control.clock + advance
            control.drawn += hits
            if plan.reaction is not None:
                plan.reaction.react(control, hits)
            caught_period[self.caught & (caught_period < 0)] = period
            if stop_when_caught and self.caught.all():
                break
        late = self._losses()
        if plan.weighing is not None:
            late = late | plan.weighing.accused(self.worlds, self.rng)
        caught_period[late & (caught_period < 0)] = plan.periods - 1
        return TrialResults(
            caught_period=caught_period, finished=finished(plan, control), period_days=plan.inspection.period_days
        )

    def _work(self, advance: FloatArray) -> None:
        """Each chip takes a Poisson number of snapshots at uniform times; those in the run's window incriminate."""
        inspection = self.plan.inspection
        expected = inspection.snapshot_rate * inspection.period_days
        for urn, logged in enumerate(self.logged):
            flat = logged.reshape(-1)
            for start in range(0, flat.size, _BLOCK):
                block = flat[start : start + _BLOCK]
                block[:] = np.minimum(self.rng.poisson(expected, block.size), np.iinfo(np.uint16).max)
            for group in self.groups:
                if group.stratum.urn == urn:
                    self._mark(group, logged[:, group.first : group.first + group.stratum.count], advance)

    def _mark(self, group: _Group, logged: NDArray[np.uint16], advance: FloatArray) -> None:
        control, stratum, period_days = self.control, group.stratum, self.plan.inspection.period_days
        if forgets(self.plan):
            group.holds[:] = False
        days = overlap(control.clock, advance, control.scale, stratum.begin, stratum.end)
        if stratum.rate == 0 or not days.any():
            return
        share = stratum.rate / self.plan.inspection.snapshot_rate
        if share >= 1 and (days >= period_days * (1 - 1e-12)).all():
            # The run's window is the whole period, so no time of day can fall outside it.
            group.holds |= group.working & (logged > 0)
            return
        begins = np.maximum(stratum.begin - control.clock, 0.0) / control.scale
        world, chip = np.nonzero(group.working & (days > 0)[:, None])
        times = logged[world, chip]
        world, chip = np.repeat(world, times), np.repeat(chip, times)
        when = self.rng.random(world.size) * period_days
        inside = (when >= begins[world]) & (when < begins[world] + days[world])
        # Tampered firmware keeps only a share of the snapshots of the run.
        if share < 1:
            inside &= self.rng.random(world.size) < share
        group.holds[world[inside], chip[inside]] = True

    def _rest(self) -> None:
        """Chips that a smaller run or a move to inspected chips no longer needs stop working."""
        plan, control = self.plan, self.control
        hides = plan.reaction is not None and plan.reaction.hides_in_inspected
        room = [
            np.zeros(self.worlds, np.int64) if seen is None else np.asarray(np.count_nonzero(seen, axis=1), np.int64)
            for seen in self.inspected
        ]
        for group in self.groups:
            stratum = group.stratum
            wanted = np.ceil(control.scale * stratum.count).astype(np.int64)
            chips = slice(group.first, group.first + stratum.count)
            seen = self.inspected[stratum.urn]
            in_urn = group.working if seen is None else group.working & ~seen[:, chips]
            elsewhere = np.count_nonzero(group.working & ~in_urn, axis=1)
            if hides:
                elsewhere = np.where(control.clock < stratum.busy_end, np.minimum(room[stratum.urn], wanted), 0)
                room[stratum.urn] = room[stratum.urn] - elsewhere
            excess = np.count_nonzero(in_urn, axis=1) - np.maximum(wanted - elsewhere, 0)
            for world in np.flatnonzero(excess > 0):
                resting = self.rng.choice(np.flatnonzero(in_urn[world]), excess[world], replace=False)
                group.working[world, resting] = False

    def _draw(self, urn: int) -> IntArray:
        """Return the drawn chips of each world, (worlds, samples)."""
        chips, samples = self.plan.urns[urn].chips, self.plan.urns[urn].samples
        if samples == 0:
            return np.zeros((self.worlds, 0), np.int64)
        if self.plan.inspection.replacement:
            return self.rng.integers(0, chips, (self.worlds, samples))
        seen = self.inspected[urn]
        if self.worlds == 1:
            stock = chips if seen is None else np.flatnonzero(~seen[0])
            return np.asarray(self.rng.choice(stock, samples, replace=False, shuffle=False)).reshape(1, samples)
        keys = self.rng.random((self.worlds, chips))
        if seen is not None:
            keys[seen] = 2.0
        return np.argpartition(keys, samples - 1, axis=1)[:, :samples]

    def _inspect(self, urn: int, advance: FloatArray) -> IntArray:
        """Draw chips, let the lab refuse some, replay the rest; return the working involved chips drawn."""
        plan, rng, control = self.plan, self.rng, self.control
        drawn = self._draw(urn)
        rows = np.arange(self.worlds)[:, None]
        seen = self.inspected[urn]
        if seen is not None:
            seen[rows, drawn] = True
        broken = rng.random(drawn.shape) < plan.inspection.honest_refusal_rate
        refusals = np.count_nonzero(broken, axis=1)
        risk = np.zeros(drawn.shape)
        evident = np.zeros(drawn.shape, np.bool_)
        hits = np.zeros(self.worlds, np.int64)
        after = control.clock + advance
        for group in self.groups:
            stratum = group.stratum
            if stratum.urn != urn:
                continue
            mine = (drawn >= group.first) & (drawn < group.first + stratum.count)
            world, place = np.nonzero(mine)
            chip = drawn[world, place] - group.first
            holds = group.holds[world, chip]
            begun = after[world] > stratum.busy_begin
            risk[world, place] = np.where(holds, stratum.catch_snapshot, np.where(begun, stratum.catch_bare, 0.0))
            evident[world, place] = holds
            in_use = np.minimum(after, stratum.busy_end) > np.maximum(control.clock, stratum.busy_begin)
            hit = group.working[world, chip] & in_use[world]
            hits += np.bincount(world[hit], minlength=self.worlds)
        allowed = plan.inspection.refusals_allowed
        shown = ~broken
        if plan.refuse:
            for row in range(self.worlds):
                risky = np.flatnonzero(shown[row] & (risk[row] > 0))
                # Chips with a snapshot first; a stable sort keeps the order of the draw otherwise.
                risky = risky[np.argsort(~evident[row, risky], kind="stable")]
                shown[row, risky[: max(0, allowed - refusals[row])]] = False
        caught = shown & (rng.random(drawn.shape) < risk)
        self.caught |= caught.any(axis=1) | (refusals > allowed)
        return hits

    def _search(self, advance: FloatArray) -> None:
        clock, after = self.control.clock, self.control.clock + advance
        for search in self.plan.searches:
            busy = np.minimum(after, search.busy_end) > np.maximum(clock, search.busy_begin)
            self.caught |= busy & (self.rng.random(self.worlds) < search.catch)

    def _losses(self) -> BoolArray:
        test = self.plan.loss_test
        if test is None:
            return np.zeros(self.worlds, np.bool_)
        lost: IntArray = np.full(self.worlds, test.diverted, np.int64)
        for start in range(0, test.chips, _BLOCK):
            size = min(_BLOCK, test.chips - start)
            for world in range(self.worlds):
                lost[world] += int(np.count_nonzero(self.rng.random(size) < test.loss))
        return lost > test.tolerated
