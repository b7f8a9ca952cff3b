"""How often a run should keep a state: rarer states take less room, and make each segment that is replayed longer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from inspector.probability.odds import Violation

__all__ = ["IntervalPlan", "plan_intervals"]

_MOST_INTERVALS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalPlan:
    """What one checkpoint interval costs.

    Attributes:
        interval: steps from one kept state to the next.
        states: kept states, the first and the last among them.
        segments: number of segments.
        drawn: of these, besides the first, are drawn so that the violation shows with the confidence.
        replayed_steps: expected, on one device.
        share: of the run's steps.
        cost: of states and replayed steps together; None without costs.
    """

    interval: int
    states: int
    segments: int
    drawn: int
    replayed_steps: int
    share: float
    cost: float | None


def plan_intervals(
    steps: int,
    intervals: Iterable[int],
    violation: Violation,
    confidence: float,
    *,
    state_cost: float | None = None,
    step_cost: float | None = None,
) -> Sequence[IntervalPlan]:
    """Plan an inspection of a run for each interval (``odds``: the best-informed lab, the first segment replayed).

    Args:
        steps: of the run.
        intervals: steps between kept states, each between 1 and ``steps``.
        violation: the smallest one that matters. Where there are fewer segments than scattered edits, some hold
            several, so that the edits touch all that the lab does not know to be replayed.
        confidence: the chance to catch it, in (0, 1).
        state_cost: of keeping one state, in any unit; with ``step_cost``, of replaying one step, in the same unit.

    Raises:
        CallerError: numbers that no run has, no interval, or one cost without the other.
    """
    from inspector.probability.odds import chain  # what only documents a plan needs no numpy

    _check_costs(state_cost, step_cost)
    wanted = sorted(set(intervals))
    if not 1 <= len(wanted) <= _MOST_INTERVALS or not 1 <= wanted[0] <= wanted[-1] <= steps:
        raise CallerError(f"give 1 to {_MOST_INTERVALS:,} intervals, each of 1 to {steps:,} steps")
    plans = []
    for interval in wanted:
        audit = chain(steps, interval, first=True)
        drawn = audit.needed(_spread(violation, audit.others), confidence)
        replayed, states = audit.price(drawn), len(audit.lengths) + 1
        cost = None
        if state_cost is not None and step_cost is not None:
            cost = states * state_cost + replayed * step_cost
        plans.append(
            IntervalPlan(
                interval=interval,
                states=states,
                segments=len(audit.lengths),
                drawn=drawn,
                replayed_steps=replayed,
                share=replayed / steps,
                cost=cost,
            )
        )
    return plans


def _check_costs(state: float | None, step: float | None) -> None:
    from inspector.probability._logspace import reals

    if (state is None) != (step is None):
        raise CallerError("give the costs of a kept state and of a replayed step together, or neither")
    for name, cost in (("the cost of a kept state", state), ("the cost of a replayed step", step)):
        if cost is not None:
            reals(name, cost, low=0, high=math.inf)


def _spread(violation: Violation, others: int) -> Violation:
    """The violation as scattered as these segments allow."""
    if violation.kind != "scattered" or not others:
        return violation
    return replace(violation, amount=min(violation.amount, Fraction(others)))
