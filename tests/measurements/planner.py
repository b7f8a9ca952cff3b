"""How close the planner comes to exhaustive search; ``python -m tests.measurements.planner`` writes ``planner.json``.

The searches are written from the formulas: binomial sums for a visit, products over visits, whole placements of the
run (a finer grid would only make the Prover stronger by rounding: the planner is compared on whole chips).
"""

from __future__ import annotations

import itertools
import json
import math
import platform
import subprocess
import time
from pathlib import Path

import numpy as np

from firmware_sim.errors import CallerError
from inspector.probability.detection import FLOP_PER_CHIP_DAY
from inspector.probability.planning import AS_DECLARED, Evasion, Problem, VisitedSite, cheapest_plan

__all__ = ["several", "summary"]

SEED = 20261126
REFUSE = Evasion(name="refuse", refuses=True)


def passes(samples: int, allowed: int, broken: float, evident: float, *, refuses: bool) -> float:
    """P(one visit accuses nobody): at most ``allowed`` of the drawn chips are missing, and none is seen."""
    missing = broken + (1 - broken) * evident if refuses else broken
    clean = (1 - broken) * (1 - evident)
    return math.fsum(
        math.comb(samples, number) * missing**number * clean ** (samples - number)
        for number in range(min(allowed, samples) + 1)
    )


def quietest(options: list[tuple[float, int, int]], problem: Problem, chips: tuple[int, ...], used: int) -> float:
    """Return the least detection over both conducts and all placements of ``used`` whole chips."""
    least = 1.0
    for refuses in (False, True):
        best = {0: 1.0}  # chips placed so far: the largest chance to pass
        for (period, samples, allowed), room in zip(options, chips, strict=True):
            times = max(1.0, problem.days / period) if samples else 0.0
            catch = -math.expm1(-problem.rate * min(problem.days, period))
            part = [
                passes(samples, allowed, problem.honest_refusal_rate, catch * x / room, refuses=refuses) ** times
                for x in range(min(room, used) + 1)
            ]
            best = {
                total: max(best.get(total - x, 0.0) * part[x] for x in range(len(part)) if total - x in best)
                for total in range(used + 1)
                if any(total - x in best for x in range(len(part)))
            }
        least = min(least, 1.0 - best.get(used, 0.0))
    return least


def exhaustive(problem: Problem, chips: tuple[int, ...], used: int, ceiling: float) -> float:
    """Return the least work of all schedules that cost no more than ``ceiling``; infinite if none holds."""
    broken, quiet = problem.honest_refusal_rate, 1.0 - problem.false_alarms
    choices = []
    for site, room in zip(problem.sites, chips, strict=True):
        rows = [(0.0, 1.0, (365.0, 0, 0))]
        for period, samples in itertools.product(problem.periods, range(1, room + 1)):
            times = max(1.0, problem.days / period)
            work = 365.0 / period * (site.visit_work + samples)
            for allowed in range(samples):
                passed = passes(samples, allowed, broken, 0.0, refuses=False) ** times
                if passed >= quiet and work <= ceiling + 1e-9:
                    rows.append((work, passed, (period, samples, allowed)))
                if passed == 1.0 or passed > 1.0 - 1e-9:
                    break
        choices.append(rows)
    found = []
    for picks in itertools.product(*choices):
        work = sum(each[0] for each in picks)
        if work <= ceiling + 1e-9 and math.prod(each[1] for each in picks) >= quiet:
            found.append((work, [each[2] for each in picks]))
    for work, options in sorted(found):
        if quietest(options, problem, chips, used) >= problem.confidence:
            return work
    return math.inf


def drawn(rng: np.random.Generator, chips: tuple[int, ...]) -> tuple[Problem, int]:
    """Return a random problem over sites of so many chips, and how many the run uses."""
    used = int(rng.integers(1, max(2, sum(chips) // 2) + 1))
    periods = tuple(sorted(rng.choice([60.0, 90.0, 180.0, 365.0], size=2, replace=False).tolist()))
    problem = Problem(
        flop=used * FLOP_PER_CHIP_DAY * 365,
        sites=tuple(
            VisitedSite(name=f"site {place}", chips=each, visit_work=float(rng.integers(0, 12)))
            for place, each in enumerate(chips)
        ),
        periods=periods,
        evasions=(AS_DECLARED, REFUSE),
        confidence=float(rng.choice([0.5, 0.7, 0.9])),
        honest_refusal_rate=float(rng.choice([0.001, 0.005, 0.02])),
        false_alarms=float(rng.choice([0.01, 0.05, 0.2])),
    )
    return problem, used


def compared(rng: np.random.Generator, chips: tuple[int, ...]) -> tuple[float, float, float] | None:
    """Return the work of the plan, its bound and the work of exhaustive search; None where neither finds a plan."""
    problem, used = drawn(rng, chips)
    try:
        plan = cheapest_plan(problem)
    except CallerError:
        if len(chips) == 1 and math.isfinite(exhaustive(problem, chips, used, math.inf)):
            raise AssertionError(f"exhaustive search finds a schedule of {problem}") from None
        return None
    return plan.work, plan.lower_bound, exhaustive(problem, chips, used, plan.work)


def several(number: int, *, sites: int, most: int, seed: int = SEED) -> list[tuple[float, float, float]]:
    """Return ``number`` comparisons of random problems that have a plan."""
    rng = np.random.default_rng((seed, sites))
    found: list[tuple[float, float, float]] = []
    while len(found) < number:
        row = compared(rng, tuple(rng.integers(4, most + 1, size=sites).tolist()))
        if row is not None:
            found.append(row)
    return found


def summary(rows: list[tuple[float, float, float]]) -> dict[str, float]:
    """Return how far plans lie above the exhaustive search, and their bounds below it."""
    return {
        "problems": len(rows),
        "dearest": max(work / (least or 1.0) for work, _, least in rows),
        "most_chips_above": max(work - least for work, _, least in rows),
        "least_bound": min(bound / (least or 1.0) for _, bound, least in rows),
        "largest_bound": max(bound / (least or 1.0) for _, bound, least in rows),
    }


def main() -> None:
    """Measure and write the summary."""
    begin = time.process_time()
    result: dict[str, object] = {"seed": SEED, "processor": platform.processor() or platform.machine()}
    result["commit"] = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    for sites, number, most in ((1, 100, 200), (2, 30, 30), (3, 30, 12)):
        result[f"sites_{sites}_chips_{most}"] = summary(several(number, sites=sites, most=most))
        print(json.dumps(result, indent=1), flush=True)
    result["cpu_seconds"] = round(time.process_time() - begin, 1)
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
