"""What uncertain inputs do to a plan: to the cheapest one, and to the detection of the one for the medians."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from analysis.commands._influences import UncertainAnswer, influence_lines, influences
from analysis.commands._uncertainty import band_text, banded
from firmware_sim.errors import CallerError

if TYPE_CHECKING:
    from inspector.probability.distributions import Distribution
    from inspector.probability.planning import Problem, VisitSchedule

__all__ = ["bands", "lines"]

_HELD = 1_000
"""Draws under which the plan for the medians is held; each takes milliseconds, where a new plan takes a second."""


def bands(
    problem_at: Callable[[Mapping[str, float]], Problem],
    inputs: Mapping[str, Distribution],
    plan: VisitSchedule,
    *,
    number: int,
    seed: int,
) -> UncertainAnswer:
    """Return bands of the cheapest plan over ``number`` draws, and of what ``plan`` then detects."""
    import numpy as np
    from tqdm import tqdm

    from inspector.probability.distributions import Fixed
    from inspector.probability.planning import cheapest_plan
    from inspector.probability.uncertainty import band, draws

    drawn = draws(inputs, number=number, seed=seed)
    swinging = sum(not isinstance(each, Fixed) for each in inputs.values())
    answers = np.full((3, number), math.nan)
    with tqdm(total=number + 2 * swinging, unit="plan", disable=not sys.stderr.isatty(), leave=False) as bar:

        def solved(at: Mapping[str, float]) -> VisitSchedule:
            bar.update()
            return cheapest_plan(problem_at(at))

        for place in range(number):
            try:
                found = solved({name: float(values[place]) for name, values in drawn.items()})
            except CallerError:
                continue
            answers[:, place] = found.work, found.inspectors, found.samples_per_year
        work, inspectors, samples = (banded(band(row)) for row in answers)
        held = banded(band(_held(problem_at, inputs, plan, seed)))
        made = {"work": work, "inspectors": inspectors, "samples_per_year": samples, "detection": held}
        return influences(made, lambda at: solved(at).work, answers[0].tolist(), inputs, number=number, seed=seed)


def _held(
    problem_at: Callable[[Mapping[str, float]], Problem],
    inputs: Mapping[str, Distribution],
    plan: VisitSchedule,
    seed: int,
) -> list[float]:
    """Return the least detection of one plan over its evasions in each draw; NaN where no evasion fits."""
    from inspector.probability.detection import ChipsTooFewError
    from inspector.probability.planning import best_response
    from inspector.probability.uncertainty import draws

    drawn = draws(inputs, number=_HELD, seed=seed)
    found = []
    for place in range(_HELD):
        problem = problem_at({name: float(values[place]) for name, values in drawn.items()})
        least = math.nan
        for evasion in problem.evasions:
            try:
                caught = best_response(problem, plan.visits, evasion).detection
            except ChipsTooFewError:
                continue
            least = caught if math.isnan(least) else min(least, caught)
        found.append(least)
    return found


def lines(answer: UncertainAnswer) -> list[str]:
    """Return the bands as text."""
    held = answer.bands["detection"]
    names = {"work": "work, chips a year", "inspectors": "inspectors", "samples_per_year": "chips examined a year"}
    text = [
        "",
        f"{answer.draws:,} draws of the uncertain inputs (seed {answer.seed}), planned anew: median (5 % to 95 %)",
        *(f"  {name}: {band_text(answer.bands[key])}" for key, name in names.items()),
        f"The plan above, which is for the medians, detects in {_HELD:,} draws with "
        + ("-" if held.median is None else f"{held.median:.4f} ({held.low:.4f} to {held.high:.4f})"),
        f"  inputs: {', '.join(f'{name} {word}' for name, word in answer.inputs.items())}",
    ]
    return [*text, *influence_lines(answer, "work at the input's 5 % and 95 %")]
