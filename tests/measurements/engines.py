"""Closed form, aggregated engine and per-chip engine on random settings: detection, false alarm, excess, posterior."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.random import Generator, Philox

from analysis.bench.origin import write
from analysis.montecarlo import TrialEngine, simulate
from firmware_sim.errors import CallerError
from inspector.campaign import (
    Evidence,
    Fleet,
    Inspection,
    Kind,
    Lab,
    Plan,
    Pool,
    RateBook,
    Run,
    Site,
    Status,
    Strategy,
    Threshold,
    clopper_pearson,
    honest_plan,
    make_plan,
    policy_from,
    predict,
)
from inspector.campaign.checks import whole
from inspector.campaign.evidence import Books, Monitor, Observations, Sightings, Weighing
from inspector.probability.alarms import posterior
from inspector.probability.hidden_sites import FindingRate

__all__ = ["FALSE_ALARM", "run", "table", "verdict", "write"]

FALSE_ALARM = 1e-3
"""Chance that any of a run's comparisons fails where closed form and engines agree (Bonferroni)."""

_PRIOR = 0.1
_KIND = Kind(name="unit", flop_per_day=1.0, watts=1_000.0)
_RATES = RateBook(
    assumed={
        "undeclared-run": 0.9,
        "swap-weights": 0.4,
        "run-old-firmware": 0.3,
        "chained-runs": 0.6,
        "undeclared-chips": 0.2,
    }
)
_POLICIES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("stretch", {"factor": 2}),
    ("rush", {"factor": 2}),
    ("waves", {"groups": 2}),
    ("weight-swap", {}),
    ("firmware", {"snapshot_share": 0.5}),
    ("chain", {"parts": 3}),
    ("divert", {"status": Status.UNDECLARED, "share": "stock"}),
    ("divert", {"status": Status.LOST, "share": "stock"}),
    ("split", {"labs": ("B",)}),
)
_OBSERVED = Observations(
    each=(
        Monitor(name="meter", group="g", detection=0.7, evaded=0.3, false_alarm=0.04),
        Monitor(name="taps", group="g", detection=0.5, evaded=0.2, false_alarm=0.03),
        Sightings(
            name="satellites", finding=FindingRate(per_year=1.0, reference=0.02), concealed=0.5, false_alarm=0.02
        ),
        Books(name="books", error=10.0, explained=0.5, false_alarm=0.02),
    ),
    shared=(("g", 0.4),),
    cap=0.06,
)


def run(
    *,
    settings: int = 40,
    trials: int = 40_000,
    agents: int = 3_000,
    seed: int = 1,
    progress: Callable[[int], object] = lambda done: None,
) -> list[dict[str, Any]]:
    """Simulate each setting and its world without violation with both engines; return a row for each.

    Rows have what the setting is, and for each engine detection, false alarm, excess and posterior: the closed form,
    and the interval that the simulation gives. Intervals of detection and false alarm err with ``FALSE_ALARM`` over all
    of a run's comparisons; those of excess and posterior are what both at once leave possible.

    Raises:
        CallerError: numbers below 1.
    """
    for name, number in (("settings", settings), ("trials", trials), ("agents", agents)):
        whole(name, number, 1)
    confidence = 1 - FALSE_ALARM / (4 * settings)
    rows: list[dict[str, Any]] = []
    for number in range(settings):
        rng = Generator(Philox(np.random.SeedSequence([seed, number])))
        about, guilty, honest = _setting(rng)
        for engine, tries in ((TrialEngine.COUNTS, trials), (TrialEngine.AGENTS, agents)):
            rows.append(
                {"setting": number, **about, "engine": engine.value, "trials": tries, "seed": seed}
                | _compared(guilty, honest, engine, tries, rng, confidence)
            )
        progress(1)
    return rows


def _compared(
    guilty: Plan, honest: Plan, engine: TrialEngine, trials: int, rng: Generator, confidence: float
) -> dict[str, Any]:
    exact, ends = [], []
    for plan in (guilty, honest):
        found = predict(plan).detection
        assert found is not None
        exact.append(found)
        caught = int(simulate(plan, trials, rng, engine=engine).caught.sum())
        ends.append(clopper_pearson(caught, trials, confidence))
    (low, high), (least, most) = ends
    kept = {
        "detection": (exact[0], low, high),
        "false_alarm": (exact[1], least, most),
        "excess": (exact[0] - exact[1], low - most, high - least),
        "posterior": (_after(exact[0], exact[1]), _after(low, most), _after(high, least)),
    }
    return {
        name: dict(zip(("closed_form", "low", "high"), map(float, each), strict=True)) for name, each in kept.items()
    }


def _after(detection: float, false_alarm: float) -> float:
    """Return the chance of a violation after an accusation; 1 where nobody is accused without one."""
    found = float(posterior(prior=_PRIOR, detection=detection, false_alarm=false_alarm))
    return 1.0 if np.isnan(found) else found


def _setting(rng: Generator) -> tuple[dict[str, Any], Plan, Plan]:
    """Return a random setting with a closed form: what it is, the plan of its violation, and of the honest world."""
    while True:
        chips, samples = int(rng.integers(100, 400)), int(rng.integers(3, 12))
        name, parameters = _POLICIES[rng.integers(len(_POLICIES))]
        refusals = float(rng.choice([0.0, 0.01, 0.03]))
        inspection = Inspection(
            period_days=30.0,
            samples=samples,
            snapshot_rate=float(rng.choice([0.02, 0.1, 0.5])),
            replacement=bool(rng.random() < 0.3 and refusals == 0),
            honest_refusal_rate=refusals,
            refusals_allowed=2 if refusals else 0,
            searches=bool(rng.random() < 0.5),
            search_chips=10,
            aggregates=0.5,
            loss_rate_per_year=0.02,
            loss_alarm=0.02 if rng.random() < 0.3 else None,
        )
        weighed = bool(rng.random() < 0.5)
        about = {"policy": name, "chips": chips, "samples": samples, "refusals": refusals, "evidence": weighed}
        try:
            guilty, honest = _plans(inspection, chips, Strategy(name=name, policies=(policy_from(name, parameters),)))
        except CallerError:
            continue
        if weighed:
            guilty, honest = _weighed(guilty, honest)
        if predict(guilty).detection is not None:
            return about, guilty, honest


def _plans(inspection: Inspection, chips: int, strategy: Strategy) -> tuple[Plan, Plan]:
    hall = Site(name="hall", pools=(Pool(kind=_KIND, count=chips), Pool(kind=_KIND, count=12, status=Status.LOST)))
    cave = Site(name="cave", declared=False, pools=(Pool(kind=_KIND, count=15, status=Status.UNDECLARED),))
    far = Site(name="far", pools=(Pool(kind=_KIND, count=chips // 2),))
    fleet = Fleet(labs=(Lab(name="A", sites=(hall, cave)), Lab(name="B", sites=(far,))))
    flop = chips // 10 * 90.0
    guilty = make_plan(
        fleet,
        [Run(name="run", lab="A", flop=flop, days=90.0)],
        Threshold(threshold_flop=0.8 * flop, evidence=Evidence.WHOLE_RUN),
        inspection,
        strategy,
        _RATES,
        days=180.0,
    )
    return guilty, honest_plan(fleet, inspection, days=180.0)


def _weighed(guilty: Plan, honest: Plan) -> tuple[Plan, Plan]:
    rule, sources = _OBSERVED.rule([guilty.target]), _OBSERVED.of(guilty.target)
    return (
        replace(guilty, weighing=Weighing(rule=rule, sources=sources, evading=frozenset({"meter"}))),
        replace(honest, weighing=Weighing(rule=rule, sources=sources, evading=None)),
    )


_COMPARED = ("detection", "false_alarm", "excess", "posterior")


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each row: the closed forms, marked where the simulation excludes them."""
    lines = [f"{'setting':>7} {'engine':7} {'policy':12} " + " ".join(f"{name:>12}" for name in _COMPARED)]
    for row in rows:
        cells = [f"{row[name]['closed_form']:11.4f}{' ' if _inside(row[name]) else '!'}" for name in _COMPARED]
        lines.append(f"{row['setting']:7} {row['engine']:7} {row['policy']:12} " + " ".join(cells))
    return lines


def _inside(found: Mapping[str, float]) -> bool:
    return found["low"] - 1e-12 <= found["closed_form"] <= found["high"] + 1e-12


def verdict(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return which comparisons exclude the closed form, or None."""
    odd = [f"{row['setting']} ({row['engine']})" for row in rows if not all(_inside(row[name]) for name in _COMPARED)]
    return f"the closed form lies outside of what was simulated: setting {', '.join(odd)}" if odd else None
