"""The honest lab's figure and the excess: closed forms, hand sums, and both engines of campaigns.

Each comparison asks that a probability lies in the Clopper-Pearson interval of a simulation (40,000 trials of the
aggregated engine, 3,000 chip by chip). All comparisons of this file together raise a false alarm with probability 1e-3
at most (Bonferroni). Seeds come from the names of the tests.
"""

from __future__ import annotations

import hashlib
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

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
    Sampling,
    Site,
    Strategy,
    Threshold,
    clopper_pearson,
    honest_plan,
    make_plan,
    policy_from,
    predict,
    simulate_agents,
    simulate_counts,
)
from inspector.probability.planning import Evasion, Problem, Visits, best_response
from inspector.probability.planning import VisitedSite as PlannedSite

JOINT_FALSE_ALARM = 1e-3
ENGINES: dict[str, tuple[Any, int]] = {"counts": (simulate_counts, 40_000), "agents": (simulate_agents, 3_000)}
RATE = Fraction(3, 100)


def tolerated(checks: int, allowed: int, rate: Fraction = RATE) -> float:
    """P(at most ``allowed`` of ``checks`` chips cannot be shown), summed exactly."""
    return float(sum(math.comb(checks, j) * rate**j * (1 - rate) ** (checks - j) for j in range(allowed + 1)))


def fleet(chips: int = 400, labs: int = 2) -> Fleet:
    pool = Pool(kind=Kind(name="unit", flop_per_day=1.0), count=chips // labs)
    return Fleet(labs=tuple(Lab(name=f"lab {n}", sites=(Site(name="s", pools=(pool,)),)) for n in range(labs)))


def regime(**changes: Any) -> Inspection:
    values = {"period_days": 30.0, "samples": 20, "snapshot_rate": 0.1, "honest_refusal_rate": float(RATE)}
    return Inspection(**(values | {"refusals_allowed": 2} | changes))


LOSS = Fraction(1, 50)  # of the chips, in 120 days
TOLERATED_LOSSES = 14
HONEST: dict[str, tuple[Inspection, float]] = {
    "pooled": (regime(), 1 - tolerated(20, 2) ** 4),
    "none tolerated": (regime(samples=5, refusals_allowed=0), 1 - tolerated(5, 0) ** 4),
    "each lab": (regime(sampling=Sampling.PER_LAB, refusals_allowed=1), 1 - tolerated(10, 1) ** 8),
    "replacement": (regime(replacement=True), 1 - tolerated(20, 2) ** 4),
    "never again": (regime(redraw=False), 1 - tolerated(20, 2) ** 4),
    "capacity": (regime(samples=90, capacity=20), 1 - tolerated(20, 2) ** 4),
    "losses": (
        regime(loss_rate_per_year=-math.log(1 - float(LOSS)) * 365 / 120, loss_alarm=0.02),
        1 - tolerated(20, 2) ** 4 * tolerated(400, TOLERATED_LOSSES, LOSS),
    ),
}
LIES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("stretch", {"factor": 1}),
    "hides": ("hide-logs", {}),
    "swaps": ("weight-swap", {}),
    "lawful": ("stay-under", {"times": 1.0}),
}
# Honest worlds in both engines; lies with both simulations of an excess; planning's two conducts; all in both engines.
COMPARISONS = 2 * (len(HONEST) + 2 * len(LIES) + 2 * 2)
CONFIDENCE = 1 - JOINT_FALSE_ALARM / COMPARISONS


def interval(engine: str, plan: Plan, name: str) -> tuple[float, float]:
    simulate, trials = ENGINES[engine]
    seed = int.from_bytes(hashlib.blake2b(f"{name} {plan.name}".encode(), digest_size=16).digest())
    caught = int(simulate(plan, trials, np.random.Generator(np.random.Philox(seed))).caught.sum())
    return clopper_pearson(caught, trials, CONFIDENCE)


def strategy_plan(name: str, inspection: Inspection, world: Fleet, used: int = 20) -> Plan:
    policy, parameters = LIES[name]
    return make_plan(
        world,
        [Run(name="run", lab="lab 0", flop=used * 120.0, days=120.0)],
        Threshold(threshold_flop=used * 60.0, evidence=Evidence.WHOLE_RUN),
        inspection,
        Strategy(name=name, policies=(policy_from(policy, parameters),)),
        RateBook(assumed={"undeclared-run": 1.0, "swap-weights": 0.3}),
        days=120.0,
    )


@pytest.mark.parametrize("name", HONEST)
def test_closed_form_is_the_hand_sum(name: str) -> None:
    inspection, exact = HONEST[name]
    assert predict(honest_plan(fleet(), inspection, days=120)).detection == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", HONEST)
def test_engines_accuse_honest_labs_as_often_as_the_hand_sum(name: str, engine: str, request: Any) -> None:
    inspection, exact = HONEST[name]
    assert 0.01 < exact < 0.99
    low, high = interval(engine, honest_plan(fleet(), inspection, days=120), request.node.name)
    assert low <= exact <= high


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LIES)
def test_engines_measure_the_predicted_excess(name: str, engine: str, request: Any) -> None:
    """Simulated detection less simulated false alarm, each with its own interval and stream."""
    plan, honest = strategy_plan(name, regime(), fleet()), honest_plan(fleet(), regime(), days=120)
    detection, alarm = predict(plan).detection, predict(honest).detection
    assert detection is not None
    assert alarm is not None
    caught, accused = interval(engine, plan, request.node.name), interval(engine, honest, request.node.name)
    assert caught[0] - accused[1] <= detection - alarm <= caught[1] - accused[0]
    if name == "lawful":
        assert detection == pytest.approx(alarm, rel=1e-12)
    else:
        assert detection - alarm > 0.05


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("refuses", [False, True])
def test_plans_and_campaigns_tell_the_same_figures(refuses: bool, engine: str, request: Any) -> None:
    """The closed form of ``plan`` takes draws as independent; of 3,000 chips few are drawn twice in a visit."""
    inspection, world = regime(samples=40, refusals_allowed=3, replacement=True), fleet(3_000, labs=1)
    problem = Problem(
        flop=60 * 120.0,
        sites=(PlannedSite(name="all", chips=3_000),),
        periods=(30.0,),
        evasions=(Evasion(name="x", refuses=refuses),),
        days=120.0,
        flop_per_day=1.0,
        honest_refusal_rate=float(RATE),
    )
    visits = [Visits(site="all", period=30.0, samples=40, refusals_allowed=3)]
    response = best_response(problem, visits, problem.evasions[0])
    assert response.false_alarm == pytest.approx(1 - tolerated(40, 3) ** 4, rel=1e-9)
    plan = strategy_plan("hides" if refuses else "plain", inspection, world, used=60)
    low, high = interval(engine, plan, request.node.name)
    assert low <= response.detection <= high
    low, high = interval(engine, honest_plan(world, inspection, days=120), request.node.name)
    assert low <= response.false_alarm <= high
    assert response.excess > 0.1
