"""What an accusation means by how many chips that could not be shown a visit tolerates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from inspector.probability import alarms
from inspector.probability.planning import Problem, Visits, best_response

__all__ = ["Tolerance", "Tolerances", "finite", "tolerances"]

_MOST = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """A rule that tolerates so many chips.

    Attributes:
        tolerated: chips that could not be shown.
        detection: of the worst evasion.
        false_alarm: chance that an honest lab is accused in as many days as the slowest evasion takes.
        worst: the evasion's name.
        excess: detection less false alarm.
        likelihood_ratio, pass_ratio: factor on the odds of a violation after an accusation, and after a pass; null if
            an honest lab never gets that verdict.
        posterior, pass_posterior: chance of a violation after that verdict; null if it never occurs.
    """

    tolerated: int
    detection: float
    false_alarm: float
    worst: str
    excess: float
    likelihood_ratio: float | None
    pass_ratio: float | None
    posterior: float | None
    pass_posterior: float | None
    expected_cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    """Every rule, by the number of chips that it tolerates.

    Attributes:
        best: number of tolerated chips with the least expected cost.
        never: expected cost without inspections.
        saved: share of that cost that the best rule saves.
        samples: chips drawn at a visit.
        period: days between visits.
        refusals: chance that an honest lab cannot show a chip.
    """

    rows: tuple[Tolerance, ...]
    best: int
    never: float
    saved: float
    samples: int
    period: float
    prior: float
    cost_miss: float
    cost_alarm: float
    refusals: float


def tolerances(problem: Problem, *, samples: int, prior: float, cost_miss: float, cost_alarm: float) -> Tolerances:
    """Return the rules of one visited site with one period, until an honest lab is practically never accused.

    Args:
        prior: chance of a violation beforehand.
        cost_miss, cost_alarm: of a violation that is missed, and of an honest lab that is accused, in one unit.

    Raises:
        CallerError: a number is out of range, or the chips cannot do the run.
    """
    (site,), (period,) = problem.sites, problem.periods
    rows: list[Tolerance] = []
    for tolerated in range(min(samples, _MOST) + 1):
        visits = [Visits(site=site.name, period=period, samples=samples, refusals_allowed=tolerated)]
        found = [best_response(problem, visits, each) for each in problem.evasions]
        worst, alarm = min(found, key=lambda each: each.detection), max(each.false_alarm for each in found)
        ratio = partial(alarms.likelihood_ratio, detection=worst.detection, false_alarm=alarm)
        chance = partial(alarms.posterior, prior=prior, detection=worst.detection, false_alarm=alarm)
        cost = alarms.expected_cost(
            prior=prior, detection=worst.detection, false_alarm=alarm, miss=cost_miss, alarm=cost_alarm
        )
        rows.append(
            Tolerance(
                tolerated=tolerated,
                detection=worst.detection,
                false_alarm=alarm,
                worst=worst.evasion,
                excess=worst.detection - alarm,
                likelihood_ratio=finite(ratio()),
                pass_ratio=finite(ratio(accused=False)),
                posterior=finite(chance()),
                pass_posterior=finite(chance(accused=False)),
                expected_cost=float(cost),
            )
        )
        if alarm < 1e-6:
            break
    best, never = min(rows, key=lambda row: row.expected_cost), prior * cost_miss
    return Tolerances(
        rows=tuple(rows),
        best=best.tolerated,
        never=never,
        saved=1 - best.expected_cost / never if never > 0 else 0.0,
        samples=samples,
        period=period,
        prior=prior,
        cost_miss=cost_miss,
        cost_alarm=cost_alarm,
        refusals=problem.honest_refusal_rate,
    )


def finite(value: Any) -> float | None:
    """A number, or None for one that is infinite or none at all."""
    return float(value) if math.isfinite(value) else None
