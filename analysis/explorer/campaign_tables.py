"""Campaigns for the explorer: simulated when the page is made, since no page can play them while a slider moves."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable, Sequence

from analysis.hidden_sites import hidden_lines, target_json
from analysis.regimes import RegimeResult, compare
from analysis.scenarios import open_regimes

__all__ = ["precomputed"]


def precomputed(
    names: Sequence[str], *, trials: int, seed: int, progress: Callable[[str], object] = lambda name: None
) -> dict[str, object]:
    """Return every strategy of each scenario under each of its regimes, for JSON.

    Args:
        names: scenario files, or names of ready scenarios.
        trials: campaigns that each cell plays; a detection that has a closed form is that instead.
        seed: of these.
        progress: receives the name of each finished scenario.

    Raises:
        CallerError: as ``compare``, or no such scenario.
    """
    found = []
    for name in names:
        found.append(_scenario(name, compare(open_regimes(name), trials, seed), trials, seed))
        progress(name)
    return {"trials": trials, "seed": seed, "scenarios": found}


def _scenario(name: str, results: Sequence[RegimeResult], trials: int, seed: int) -> dict[str, object]:
    first = results[0].scenario
    return {
        "name": name,
        "command": shlex.join(["chipwitness", "campaign", name, "--trials", str(trials), "--seed", str(seed)]),
        "title": first.title,
        "thresholds": sorted({result.scenario.rule.threshold_flop for result in results}),
        "days": first.days,
        "registered_chips": first.fleet.registered(),
        "strategies": [cell.strategy for cell in results[0].cells],
        "hidden": hidden_lines({each.name: target_json(first.plan(each).target) for each in first.strategies}),
        "regimes": [_regime(result) for result in results],
    }


def _regime(result: RegimeResult) -> dict[str, object]:
    scenario, inspection = result.scenario, result.scenario.inspection
    samples = inspection.samples_done()
    return {
        "name": scenario.regime or "the scenario's inspections",
        "source": scenario.source,
        "worst": result.worst.strategy,
        "false_alarm": scenario.false_alarm(),
        "samples_per_year": math.ceil(samples * 365 / inspection.period_days),
        "inspectors": scenario.inspectors(samples),
        "cost_per_year": scenario.cost_per_year(),
        "cells": [dataclasses.asdict(cell) for cell in result.cells],
    }
