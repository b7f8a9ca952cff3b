"""``planner``: how close the planner comes to exhaustive search, how good its bound is, and what its commands take.

The search is written from the formulas: binomial sums for a visit, products over visits. The Prover places its run as
the planner's does, in parts of chips: on a grid of quarter chips, then on a finer one around the best place there.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from analysis.bench.origin import write
from firmware_sim.errors import CallerError
from inspector.probability.detection import FLOP_PER_CHIP_DAY
from inspector.probability.planning import (
    AS_DECLARED,
    Evasion,
    Problem,
    VisitedSite,
    Visits,
    VisitSchedule,
    best_response,
    cheapest_plan,
    false_alarm,
)

__all__ = ["CASES", "run", "several", "summary", "table", "verdict", "write"]

Floats = NDArray[np.float64]
Option = tuple[float, int, int]
"""Period, samples and number tolerated of a site."""
Row = dict[str, Any]
REFUSE = Evasion(name="refuse", refuses=True)
_STEPS = (1 / 4, 1 / 64, 1 / 1024)
_ROUNDING = 1e-6
"""By how much two searches for the Prover's best place may differ in the detection that they find."""
_COMMANDS = {
    "today": ("", 5.0),
    "today, refusals": ("--refusals 0.001", 8.0),
    "today, bands": ("--days 180/365/730", 25.0),
    "today, sensitivity": ("--sensitivity", 9.0),
}
"""What ``plan --today`` is asked beside, and the processor seconds that it may take."""
_FEW = {"one": (1, 200, 0.95), "two": (2, 30, 0.8), "three": (3, 30, 0.8)}
"""By case: the number of sites, most chips of one, and the least share of the least work that a bound may be."""
_PROBLEMS = {"one": 100, "two": 60, "three": 60, "twelve": 8}
CASES = ("one", "two", "three", "twelve", "example", "commands")
_MANY = 12


def passes(samples: int, allowed: int, broken: float, evident: Floats | float, *, refuses: bool) -> Floats:
    """P(one visit accuses nobody): at most ``allowed`` of the drawn chips are missing, and none is seen."""
    evident = np.asarray(evident, dtype=np.float64)
    missing = broken + (1 - broken) * evident if refuses else np.full_like(evident, broken)
    clean = (1 - broken) * (1 - evident)
    total = np.zeros_like(evident)
    for number in range(min(allowed, samples) + 1):
        total += math.comb(samples, number) * missing**number * clean ** (samples - number)
    return np.asarray(total)


class Adversary:
    """The Prover that knows the schedule: both conducts, and all placements of ``used`` chips in parts of chips."""

    def __init__(self, problem: Problem, used: int) -> None:
        self._problem, self._used = problem, used
        self._sites = [math.floor(site.chips) for site in problem.sites]

    def log_miss(self, place: int, option: Option, used: Floats | float, *, refuses: bool) -> Floats:
        """Log of the chance that a site's visits accuse nobody while so many of its chips are in the run."""
        (period, samples, allowed), problem = option, self._problem
        if not samples:
            return np.zeros_like(np.asarray(used, dtype=np.float64))
        catch = -math.expm1(-problem.rate * min(problem.days, period))
        evident = catch * np.minimum(np.asarray(used) / self._sites[place], 1.0)
        with np.errstate(divide="ignore"):
            passed = np.log(passes(samples, allowed, problem.honest_refusal_rate, evident, refuses=refuses))
        return np.asarray(max(1.0, problem.days / period) * np.maximum(passed, -1e6))

    def quietest(self, options: Sequence[Option], *, refuses: bool) -> tuple[float, Floats]:
        """The least detection by one conduct, and the placement at which it is."""
        low, high = np.zeros(len(options)), np.minimum(self._sites, self._used).astype(float)
        for step in _STEPS:
            low, high = np.round(low / step), np.round(high / step)
            total = round(self._used / step) - int(low.sum())
            parts, sums = [], [np.zeros(1)]
            for place, option in enumerate(options):
                cells = np.arange(low[place], high[place] + 1) * step
                parts.append(self.log_miss(place, option, cells, refuses=refuses))
                longer = np.full(min(total + 1, len(sums[-1]) + len(cells) - 1), -np.inf)
                for first, part in enumerate(parts[-1][: len(longer)]):
                    reached = sums[-1][: len(longer) - first]
                    here = slice(first, first + len(reached))
                    longer[here] = np.maximum(longer[here], reached + part)
                sums.append(longer)
            miss, best, left = float(sums[-1][total]), np.zeros(len(options)), total
            for place in range(len(options) - 1, -1, -1):
                more = np.arange(max(0, left - len(sums[place]) + 1), min(left, len(parts[place]) - 1) + 1)
                chosen = int(more[np.argmax(sums[place][left - more] + parts[place][more])])
                best[place], left = (low[place] + chosen) * step, left - chosen
            low = np.maximum(best - 2 * step, 0.0)
            high = np.minimum(best + 2 * step, np.minimum(self._sites, self._used))
        return -math.expm1(miss), best


def choices(problem: Problem, ceiling: float) -> list[tuple[Floats, Floats, list[Option]]]:
    """By site, the work, the log of the chance that an honest lab is left in peace, and each option within the cap."""
    found = []
    quiet = math.log1p(-problem.false_alarms)
    for site in problem.sites:
        rows: list[tuple[float, float, Option]] = [(0.0, 0.0, (365.0, 0, 0))]
        for period, samples in itertools.product(problem.periods, range(1, math.floor(site.chips) + 1)):
            work = 365.0 / period * (site.visit_work + samples)
            for allowed in range(samples) if work <= ceiling + 1e-9 else ():
                passed = float(passes(samples, allowed, problem.honest_refusal_rate, 0.0, refuses=False))
                log = max(1.0, problem.days / period) * math.log(min(passed, 1.0))
                if log >= quiet:
                    rows.append((work, log, (period, samples, allowed)))
                if passed > 1.0 - 1e-9:
                    break
        found.append((np.array([row[0] for row in rows]), np.array([row[1] for row in rows]), [row[2] for row in rows]))
    return found


def exhaustive(problem: Problem, used: int, ceiling: float) -> float:
    """Return the least work of all schedules that cost no more than ``ceiling``; infinite if none holds.

    All that are cheap enough and keep the cap are listed, the cheapest first. Whatever evades one is held against all
    that are left, which strikes most of them off.
    """
    by_site, adversary = choices(problem, ceiling), Adversary(problem, used)
    quiet = math.log1p(-problem.false_alarms)
    picks, work, log = np.zeros((1, 0), dtype=np.int16), np.zeros(1), np.zeros(1)
    for works, logs, _ in by_site:
        kept, costs, sums = [], [], []
        for number, (cost, peace) in enumerate(zip(works, logs, strict=True)):
            able = (work + cost <= ceiling + 1e-9) & (log + peace >= quiet)
            kept.append(np.column_stack([picks[able], np.full(able.sum(), number, dtype=np.int16)]))
            costs.append(work[able] + cost)
            sums.append(log[able] + peace)
        picks, work, log = np.concatenate(kept), np.concatenate(costs), np.concatenate(sums)
    order = np.argsort(work, kind="stable")
    picks, work = picks[order], work[order]
    while len(picks):
        options = [each[2][number] for each, number in zip(by_site, picks[0], strict=True)]
        found = [(refuses, *adversary.quietest(options, refuses=refuses)) for refuses in (True, False)]
        refuses, least, placement = min(found, key=lambda each: each[1])
        if least >= problem.confidence - _ROUNDING:
            return float(work[0])
        missed = np.zeros(len(picks))
        for place, (_, _, each) in enumerate(by_site):
            passed = [adversary.log_miss(place, option, placement[place], refuses=refuses) for option in each]
            missed += np.array(passed)[picks[:, place]]
        holds = -np.expm1(missed) >= problem.confidence - _ROUNDING
        holds[0] = False
        picks, work = picks[holds], work[holds]
    return math.inf


def drawn(rng: np.random.Generator, chips: Sequence[int]) -> tuple[Problem, int]:
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


def holds(problem: Problem, used: int, plan: VisitSchedule) -> bool:
    """Whether a plan catches what this module's Prover does, and keeps the cap by this module's sums."""
    options = [(each.period, each.samples, each.refusals_allowed) for each in plan.visits]
    least = min(Adversary(problem, used).quietest(options, refuses=refuses)[0] for refuses in (False, True))
    alone = [
        float(passes(samples, allowed, problem.honest_refusal_rate, 0.0, refuses=False))
        ** max(1.0, problem.days / period)
        for period, samples, allowed in options
        if samples
    ]
    return least >= problem.confidence - _ROUNDING and 1.0 - math.prod(alone) <= problem.false_alarms + 1e-9


def compared(rng: np.random.Generator, chips: Sequence[int]) -> tuple[float, float, float] | None:
    """Return the work of the plan, its bound and the work of exhaustive search; None where neither finds a plan."""
    problem, used = drawn(rng, chips)
    try:
        plan = cheapest_plan(problem)
    except CallerError:
        if len(chips) == 1 and math.isfinite(exhaustive(problem, used, math.inf)):
            raise AssertionError(f"exhaustive search finds a schedule of {problem}") from None
        return None
    if not holds(problem, used, plan):
        raise AssertionError(f"the plan for {problem} does not hold: {plan.visits}")
    return plan.work, plan.lower_bound, exhaustive(problem, used, plan.work)


def several(number: int, *, sites: int, most: int, seed: int) -> list[tuple[float, float, float]]:
    """Return ``number`` comparisons of random problems that have a plan."""
    rng = np.random.default_rng((seed, sites))
    found: list[tuple[float, float, float]] = []
    while len(found) < number:
        row = compared(rng, rng.integers(4, most + 1, size=sites).tolist())
        if row is not None:
            found.append(row)
    return found


def summary(rows: Sequence[tuple[float, float, float]]) -> Row:
    """Return how far plans lie above the exhaustive search, and their bounds below it."""
    return {
        "problems": len(rows),
        "equal": sum(abs(work - least) <= 1e-6 * work for work, _, least in rows),
        "dearest": max(work / (least or 1.0) for work, _, least in rows),
        "most_chips_above": max(work - least for work, _, least in rows),
        "beyond": sum(work > max(1.01 * least, least + 1.0) + 1e-9 for work, _, least in rows),
        "least_bound": min(bound / (least or 1.0) for _, bound, least in rows),
        "largest_bound": max(bound / (least or 1.0) for _, bound, least in rows),
    }


def many(number: int, seed: int) -> list[tuple[float, float]]:
    """Return work and bound of ``number`` random problems of twelve sites that have a plan."""
    rng = np.random.default_rng((seed, _MANY))
    found: list[tuple[float, float]] = []
    while len(found) < number:
        chips = np.exp(rng.uniform(math.log(300), math.log(1e5), size=_MANY)).astype(int)
        problem = Problem(
            flop=float(rng.uniform(0.02, 0.3)) * float(chips.sum()) * FLOP_PER_CHIP_DAY * 365,
            sites=tuple(VisitedSite(name=f"site {place}", chips=int(each)) for place, each in enumerate(chips)),
            evasions=(AS_DECLARED, REFUSE),
            confidence=float(rng.choice([0.5, 0.9])),
            honest_refusal_rate=float(rng.choice([0.0005, 0.001, 0.005])),
            false_alarms=float(rng.choice([0.01, 0.05])),
        )
        try:
            plan = cheapest_plan(problem)
        except CallerError:
            continue
        found.append((plan.work, plan.lower_bound))
    return found


def three_equal_sites() -> Row:
    """Return the plan for three sites of 10,000 chips against 500, and one found by hand that costs 406."""
    problem = Problem(
        flop=500 * FLOP_PER_CHIP_DAY * 365,
        sites=tuple(VisitedSite(name=name, chips=10_000) for name in "abc"),
        evasions=(AS_DECLARED, REFUSE),
        honest_refusal_rate=0.001,
    )
    known = [
        Visits(site=site.name, period=365.0, samples=samples, refusals_allowed=allowed)
        for site, (samples, allowed) in zip(problem.sites, ((98, 1), (101, 1), (177, 2)), strict=True)
    ]
    plan = cheapest_plan(problem)
    return {
        "plan": plan.work,
        "bound": plan.lower_bound,
        "visits": [[each.period, each.samples, each.refusals_allowed] for each in plan.visits],
        "known": sum(10 + each.samples for each in known),
        "known_detection": min(best_response(problem, known, each).detection for each in problem.evasions),
        "known_false_alarm": false_alarm(problem, known, problem.longest),
    }


def seconds_of(words: str) -> float:
    """Return the processor seconds of ``plan --today`` with these words, in a process of its own, on one thread."""
    before = os.times()
    command = [sys.executable, "-m", "analysis.cli", "plan", "--flop", "1e27", "--today", *words.split()]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def run(
    *,
    cases: Sequence[str] = CASES,
    problems: int | None = None,
    seed: int = 20261126,
    progress: Callable[[int], object] = lambda done: None,
) -> list[Row]:
    """Compare plans of random problems with exhaustive search, and time the command for today's chips.

    Rows have ``work`` (the case), ``mode`` (``an allowance each``, or ``command``), ``seconds`` (of the processor),
    ``ratio`` (None), ``missed`` (what is not as it must be) and what the case found.

    Args:
        cases: some of ``CASES``.
        problems: of each number of sites; None: 100 of one site, 60 of two and of three, 8 of twelve.
    """
    rows: list[Row] = []
    for case in cases:
        begin = time.process_time()
        found = _commands() if case == "commands" else [_case(case, problems or _PROBLEMS.get(case, 1), seed)]
        seconds = time.process_time() - begin
        rows += [{"work": case, "mode": "an allowance each", "seconds": seconds, "ratio": None, **row} for row in found]
        progress(1)
    return rows


def _case(case: str, problems: int, seed: int) -> Row:
    """Return what a case found, and what of it is ``missed``."""
    if case == "example":
        found = three_equal_sites()
        return found | {"missed": ["dearer than a known plan"] if found["plan"] > found["known"] else []}
    if case == "twelve":
        plans = many(problems, seed)
        least = min(bound / work for work, bound in plans)
        missed = [f"a bound is {least:.3f} of the plan"] if least < 0.5 else []
        return {"seed": seed, "problems": problems, "least_bound": least, "plans": plans, "missed": missed}
    sites, most, share = _FEW[case]
    found = summary(several(problems, sites=sites, most=most, seed=seed))
    dearer = found["beyond"] if sites > 1 else problems - found["equal"]
    missed = [f"{dearer} plans are dearer than may be"] if dearer else []
    missed += ["a bound lies above the least work"] if found["largest_bound"] > 1 + 1e-6 else []
    missed += [f"a bound is {found['least_bound']:.3f} of the least"] if found["least_bound"] < share else []
    return {"seed": seed, "sites": sites, "most_chips": most, **found, "missed": missed}


def _commands() -> list[Row]:
    rows: list[Row] = []
    for name, (words, most) in _COMMANDS.items():
        took = seconds_of(words)
        missed = [f"takes {took:.1f} s, not {most:g}"] if took > most else []
        rows.append({"work": name, "mode": "command", "seconds": took, "most": most, "missed": missed})
    return rows


def verdict(rows: Sequence[Row]) -> str | None:
    """What is not as promised, or None."""
    problems = [f"{row['work']}: {text}" for row in rows for text in row["missed"]]
    return "; ".join(problems) or None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    hidden = ("work", "mode", "seconds", "ratio", "seed", "plans")
    return [
        f"{row['work']:22} {row['seconds']:7.1f} s  "
        + ", ".join(f"{key} {value}" for key, value in row.items() if key not in hidden)
        for row in rows
    ]
