"""Both engines against closed forms, and against each other where there is none.

Every comparison asks that the closed form lies in the Clopper-Pearson interval of the simulation. The interval of each
one is set so that all of this file together raises a false alarm with probability 1e-3 at most (Bonferroni). Seeds come
from the names of the tests.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scipy.stats import hypergeom, norm

from inspector.campaign import (
    CountsWorld,
    Evidence,
    Fleet,
    Inspection,
    Kind,
    Lab,
    LogSpan,
    Plan,
    Pool,
    RateBook,
    Run,
    Sampling,
    Site,
    Status,
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
from inspector.campaign.plan import Stratum, Urn
from inspector.probability import detection as closed
from inspector.probability.alarms import posterior

FALSE_ALARM = 1e-3
COUNTS_TRIALS, AGENTS_TRIALS = 40_000, 3_000
KIND = Kind(name="unit", flop_per_day=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run of ``used`` chips for ``days`` days among ``chips``; ``regime`` overrides the inspection's defaults."""

    chips: int = 400
    used: int = 40
    days: float = 120.0
    horizon: float = 120.0
    start: float = 0.0
    regime: tuple[tuple[str, Any], ...] = ()
    policies: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    rates: tuple[tuple[str, float], ...] = (("undeclared-run", 1.0),)
    evidence: Evidence = Evidence.WHOLE_RUN
    labs: int = 1
    hidden: tuple[tuple[Status, int], ...] = ()
    speeds: tuple[float, ...] = (1.0,)

    def fleet(self) -> Fleet:
        labs = []
        for number in range(self.labs):
            share = self.chips // len(self.speeds)
            pools = [
                Pool(
                    kind=Kind(name=f"x{speed}", flop_per_day=speed),
                    count=share if index else self.chips - share * (len(self.speeds) - 1),
                )
                for index, speed in enumerate(self.speeds)
            ]
            if number == 0:
                pools += [Pool(kind=KIND, count=count, status=status) for status, count in self.hidden]
            labs.append(Lab(name=f"lab {number}", sites=(Site(name="site", pools=tuple(pools)),)))
        return Fleet(labs=tuple(labs))

    def inspection(self) -> Inspection:
        return Inspection(**{"period_days": 30.0, "samples": 3, "snapshot_rate": 0.1, **dict(self.regime)})

    def honest(self) -> Plan:
        return honest_plan(self.fleet(), self.inspection(), days=self.horizon)

    def plan(self) -> Plan:
        flop = self.used * self.days
        return make_plan(
            self.fleet(),
            [Run(name="run", lab="lab 0", flop=flop, days=self.days, start=self.start)],
            Threshold(threshold_flop=flop / 2, evidence=self.evidence),
            self.inspection(),
            Strategy(name="strategy", policies=tuple(policy_from(name, dict(p)) for name, p in self.policies)),
            RateBook(assumed=dict(self.rates)),
            days=self.horizon,
        )


def case(**values: Any) -> Case:
    regime = tuple((values.pop("regime", {})).items())
    policies = tuple((name, tuple(p.items())) for name, p in values.pop("policies", {}).items())
    rates = tuple((values.pop("rates", {"undeclared-run": 1.0})).items())
    return Case(regime=regime, policies=policies, rates=rates, **values)


def generator(name: str) -> np.random.Generator:
    digest = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest)))


EXACT = {
    "base": case(),
    "one period": case(days=30.0, horizon=30.0, regime={"samples": 9}),
    "sparse snapshots": case(regime={"snapshot_rate": 0.01, "samples": 15}),
    "dense snapshots": case(regime={"snapshot_rate": 2.0}),
    "no snapshots": case(regime={"snapshot_rate": 0.0}),
    "no samples": case(regime={"samples": 0}),
    "one chip": case(used=1, regime={"samples": 60}),
    "every chip": case(used=400, regime={"samples": 1, "snapshot_rate": 0.01}),
    "large draw": case(used=3, regime={"samples": 200, "snapshot_rate": 0.03}),
    "census": case(used=2, regime={"samples": 400, "snapshot_rate": 0.02}),
    "replacement": case(regime={"replacement": True}),
    "replacement, small fleet": case(chips=30, used=3, regime={"replacement": True, "samples": 10}),
    "replacement, imperfect": case(rates={"undeclared-run": 0.3}, regime={"replacement": True, "samples": 8}),
    "imperfect": case(rates={"undeclared-run": 0.3}, regime={"samples": 8}),
    "late start": case(days=75.0, start=20.0),
    "ends mid-period": case(days=100.0),
    "after the threshold": case(evidence=Evidence.AFTER_THRESHOLD, regime={"samples": 6}),
    "stretch": case(policies={"stretch": {"factor": 3}}, horizon=360.0),
    "rush": case(policies={"rush": {"factor": 3}}),
    "waves": case(policies={"waves": {"groups": 4}}),
    "waves across periods": case(policies={"waves": {"groups": 7}}),
    "two speeds": case(speeds=(1.0, 4.0)),
    "undeclared": case(
        policies={"divert": {"status": "undeclared", "share": "stock"}}, hidden=((Status.UNDECLARED, 25),)
    ),
    "undeclared, searched": case(
        policies={"divert": {"status": "undeclared", "share": "stock"}},
        hidden=((Status.UNDECLARED, 25),),
        regime={"searches": True},
        rates={"undeclared-run": 1.0, "undeclared-chips": 0.15},
    ),
    "claimed lost": case(
        policies={"divert": {"status": "lost", "share": "stock"}},
        hidden=((Status.LOST, 8),),
        regime={"loss_rate_per_year": 0.05, "loss_alarm": 0.05},
    ),
    "tampered": case(policies={"firmware": {}}, rates={"run-old-firmware": 0.4}),
    "tampered, half the snapshots": case(
        policies={"firmware": {"snapshot_share": 0.5}}, rates={"run-old-firmware": 0.1, "undeclared-run": 0.7}
    ),
    "tampered, one group after another": case(
        policies={"firmware": {}, "waves": {"groups": 3}}, rates={"run-old-firmware": 0.4}
    ),
    "weight swap": case(policies={"weight-swap": {}}, rates={"swap-weights": 0.5}, regime={"samples": 6}),
    "spoof": case(policies={"spoof": {}}, rates={"fake-layers": 0.8}),
    "chain": case(policies={"chain": {"parts": 3}}, rates={"chained-runs": 0.6}, evidence=Evidence.AFTER_THRESHOLD),
    "stay under": case(policies={"stay-under": {"times": 1.5}}, evidence=Evidence.AFTER_THRESHOLD),
    "lawful": case(policies={"stay-under": {"times": 1.0}}),
    "collusion, pooled": case(policies={"collude": {"labs": ["lab 1"]}}, labs=2, regime={"samples": 6}),
    "collusion, each lab": case(
        policies={"collude": {"labs": ["lab 1"]}}, labs=2, regime={"samples": 7, "sampling": Sampling.PER_LAB}
    ),
    "innocent refusals": case(regime={"honest_refusal_rate": 0.02}),
    "innocent refusals, replacement": case(regime={"honest_refusal_rate": 0.02, "replacement": True}),
    "tolerated refusals": case(
        used=6, regime={"honest_refusal_rate": 0.03, "refusals_allowed": 2, "samples": 25}, chips=300
    ),
    "hidden logs": case(policies={"hide-logs": {}}, regime={"refusals_allowed": 2, "samples": 20}),
    "hidden logs, innocent refusals": case(
        policies={"hide-logs": {}}, regime={"refusals_allowed": 3, "samples": 20, "honest_refusal_rate": 0.03}
    ),
    "capacity": case(regime={"samples": 50, "capacity": 4}),
}

UNSOLVED = {
    "logs of the run": case(regime={"log": LogSpan.RUN, "snapshot_rate": 0.02, "samples": 6}),
    "logs of the run, never again": case(
        regime={"log": LogSpan.RUN, "snapshot_rate": 0.02, "redraw": False, "samples": 6}
    ),
    "logs of the run, replacement": case(
        regime={"log": LogSpan.RUN, "snapshot_rate": 0.02, "replacement": True, "samples": 6}
    ),
    "never again": case(regime={"redraw": False, "samples": 5}),
    "never again, waves": case(regime={"redraw": False, "samples": 5}, policies={"waves": {"groups": 3}}),
    "hide in inspected": case(
        chips=120,
        used=60,
        regime={"redraw": False, "samples": 25},
        policies={"hide-in-inspected": {}},
        rates={"undeclared-run": 0.05},
    ),
    "hide in inspected, long logs": case(
        chips=120,
        used=60,
        regime={"redraw": False, "samples": 25, "log": LogSpan.RUN, "snapshot_rate": 0.02},
        policies={"hide-in-inspected": {}},
        rates={"undeclared-run": 0.1},
    ),
    "pause": case(policies={"pause-when-drawn": {"periods": 2}}, horizon=360.0, rates={"undeclared-run": 0.3}),
    "shrink": case(
        policies={"shrink-when-drawn": {"factor": 2}},
        horizon=480.0,
        rates={"undeclared-run": 0.3},
        regime={"samples": 8},
    ),
    "shrink, long logs": case(
        policies={"shrink-when-drawn": {"factor": 3}},
        horizon=480.0,
        rates={"undeclared-run": 0.3},
        regime={"samples": 8, "log": LogSpan.RUN, "snapshot_rate": 0.02},
    ),
    "shrink, never again": case(
        policies={"shrink-when-drawn": {"factor": 3}},
        horizon=480.0,
        rates={"undeclared-run": 0.3},
        regime={"samples": 12, "redraw": False},
    ),
    "quit": case(policies={"quit-when-drawn": {"limit": 2}}, rates={"undeclared-run": 0.3}, regime={"samples": 8}),
    "hidden logs, imperfect": case(
        policies={"hide-logs": {}, "firmware": {"snapshot_share": 0.5}},
        rates={"undeclared-run": 0.7, "run-old-firmware": 0.2},
        regime={"refusals_allowed": 2, "samples": 20, "honest_refusal_rate": 0.02},
    ),
    "hidden logs, replacement": case(
        policies={"hide-logs": {}}, regime={"refusals_allowed": 2, "samples": 20, "replacement": True}
    ),
    "hidden chips, paused": case(
        policies={"divert": {"status": "undeclared", "share": "stock"}, "pause-when-drawn": {"periods": 1}},
        hidden=((Status.UNDECLARED, 20),),
        horizon=360.0,
        regime={"searches": True},
        rates={"undeclared-run": 0.3, "undeclared-chips": 0.05},
    ),
}

# Both engines on every exact case, on six by hand, on two solved reactions and on the honest world; and the unsolved.
COMPARISONS = 2 * len(EXACT) + 2 * 6 + 2 * 2 + 2 + len(UNSOLVED)
CONFIDENCE = 1 - FALSE_ALARM / COMPARISONS


def caught(engine: str, plan: Plan, name: str) -> tuple[int, int]:
    rng = generator(name)
    if engine == "agents":
        outcome = simulate_agents(plan, AGENTS_TRIALS, rng)
    else:
        outcome = simulate_counts(plan, COUNTS_TRIALS, rng)
    return int(outcome.caught.sum()), outcome.caught.size


def agrees(engine: str, plan: Plan, name: str, probability: float) -> None:
    successes, trials = caught(engine, plan, name)
    low, high = clopper_pearson(successes, trials, CONFIDENCE)
    assert low <= probability <= high, (successes / trials, probability, low, high)


def test_at_least_thirty_sets() -> None:
    assert len(EXACT) >= 30


@pytest.mark.parametrize("engine", ["agents", "counts"])
@pytest.mark.parametrize("name", EXACT)
def test_closed_form_inside_interval(name: str, engine: str, request: pytest.FixtureRequest) -> None:
    plan = EXACT[name].plan()
    probability = predict(plan).detection
    assert probability is not None
    successes, trials = caught(engine, plan, request.node.name)
    low, high = clopper_pearson(successes, trials, CONFIDENCE)
    assert low <= probability <= high, (successes / trials, probability, low, high)
    # Excess and posterior rise with detection, so they agree on the same terms.
    alarm = predict(EXACT[name].honest()).detection
    assert alarm is not None
    assert low - alarm <= probability - alarm <= high - alarm
    for accused, (one, other) in ((True, (low, high)), (False, (high, low))):
        after = [
            posterior(prior=0.05, detection=each, false_alarm=alarm, accused=accused)
            for each in (one, probability, other)
        ]
        known = [each for each in after if not np.isnan(each)]
        assert known == sorted(known)


BY_HAND = {
    "Eq. 1": (case(chips=2000, used=50, regime={"samples": 12, "replacement": True}), "with", 50, 12, 30.0, 4, 1.0),
    "Eq. 1, imperfect": (
        case(chips=1500, used=150, rates={"undeclared-run": 0.4}, regime={"samples": 5, "replacement": True}),
        "with", 150, 5, 30.0, 4, 0.4,
    ),
    "Eq. 1, stretched": (
        case(chips=1000, used=100, policies={"stretch": {"factor": 4}}, horizon=480.0,
             regime={"samples": 5, "replacement": True}),
        "with", 25, 5, 30.0, 16, 1.0,
    ),
    "hypergeometric": (case(chips=200, used=20, regime={"samples": 10}), "without", 20, 10, 30.0, 4, 1.0),
    "hypergeometric, imperfect": (
        case(chips=200, used=100, rates={"undeclared-run": 0.1}, regime={"samples": 10}),
        "without", 100, 10, 30.0, 4, 0.1,
    ),
    "2H": (
        case(chips=200, used=20, regime={"samples": 10}, evidence=Evidence.AFTER_THRESHOLD),
        "without", 20, 10, 30.0, 2, 1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("engine", ["agents", "counts"])
@pytest.mark.parametrize("name", BY_HAND)
def test_formulas_of_the_paper(name: str, engine: str, request: pytest.FixtureRequest) -> None:
    """Straight from inspector.probability.detection, past the campaign's own closed form."""
    world, mode, used, samples, window, periods, rate = BY_HAND[name]
    catch = rate * float(closed.snapshot_probability(rate=0.1, days=window))
    if mode == "with":
        log_miss = closed.log_miss(hit=used / world.chips * catch, samples=samples)
    else:
        log_miss = closed.log_miss_without_replacement(chips=world.chips, used=used, samples=samples, catch=catch)
    agrees(engine, world.plan(), request.node.name, float(closed.detection(periods * log_miss)))


@pytest.mark.parametrize("engine", ["agents", "counts"])
def test_hiding_in_inspected_chips_leaves_only_the_first_draw(engine: str, request: pytest.FixtureRequest) -> None:
    world = case(chips=100, used=25, regime={"redraw": False, "samples": 25, "snapshot_rate": 0.001},
                 policies={"hide-in-inspected": {}})  # fmt: skip
    log_miss = closed.log_miss_without_replacement(chips=100, used=25, samples=25, catch=-math.expm1(-0.03))
    agrees(engine, world.plan(), request.node.name, float(closed.detection(log_miss)))


@pytest.mark.parametrize("engine", ["agents", "counts"])
def test_quitting_at_the_first_draw(engine: str, request: pytest.FixtureRequest) -> None:
    """The run goes on only while no involved chip was drawn: a geometric series over the periods."""
    world = case(policies={"quit-when-drawn": {"limit": 1}}, rates={"undeclared-run": 0.3}, regime={"samples": 8})
    none_drawn = float(hypergeom.pmf(0, 400, 40, 8))
    catch = 0.3 * -math.expm1(-3.0)
    passes = math.exp(float(closed.log_miss_without_replacement(chips=400, used=40, samples=8, catch=catch)))
    agrees(engine, world.plan(), request.node.name, (1 - passes) * (1 - none_drawn**4) / (1 - none_drawn))


@pytest.mark.parametrize("engine", ["agents", "counts"])
def test_false_alarms_of_the_honest(engine: str, request: pytest.FixtureRequest) -> None:
    fleet = Fleet(labs=(Lab(name="a", sites=(Site(name="s", pools=(Pool(kind=KIND, count=300),)),)),))
    inspection = Inspection(
        period_days=30, samples=20, snapshot_rate=0.1, honest_refusal_rate=0.05, refusals_allowed=3,
        loss_rate_per_year=0.1, loss_alarm=0.05,
    )  # fmt: skip
    plan = honest_plan(fleet, inspection, days=90)
    probability = predict(plan).detection
    assert probability is not None
    assert 0.01 < probability < 0.99
    agrees(engine, plan, request.node.name, probability)


@pytest.mark.parametrize("name", UNSOLVED)
def test_engines_agree_without_closed_form(name: str, request: pytest.FixtureRequest) -> None:
    """Two-sided z test of equal proportions at level FALSE_ALARM/COMPARISONS."""
    plan = UNSOLVED[name].plan()
    prediction = predict(plan)
    assert prediction.detection is None
    assert prediction.reason.startswith("none: ")
    k, n = caught("agents", plan, request.node.name + "agents")
    j, m = caught("counts", plan, request.node.name + "counts")
    pooled = (k + j) / (n + m)
    assert 0.02 < pooled < 0.98, "a case must be able to fail"
    deviation = math.sqrt(pooled * (1 - pooled) * (1 / n + 1 / m))
    assert abs(k / n - j / m) < norm.isf((1 - CONFIDENCE) / 2) * deviation


def test_period_of_detection_is_geometric_in_both_engines() -> None:
    plan = case(regime={"samples": 3}).plan()
    course = np.array(predict(plan).by_period)
    expected = -np.diff(np.exp(np.concatenate(([0.0], course))))
    for simulate, trials in ((simulate_agents, AGENTS_TRIALS), (simulate_counts, COUNTS_TRIALS)):
        outcome = simulate(plan, trials, generator("period of detection"))
        found = np.bincount(outcome.caught_period[outcome.caught], minlength=plan.periods) / trials
        # 5 standard deviations for 8 shares: false alarm below 5e-6.
        assert np.all(np.abs(found - expected) < 5 * np.sqrt(expected / trials))
        assert set(outcome.detection_days()) <= {30.0, 60.0, 90.0, 120.0}


@pytest.mark.parametrize("simulate", [simulate_agents, simulate_counts])
def test_a_run_counts_as_finished_only_once_its_work_is_done(simulate: Any) -> None:
    rng = generator("finished")
    free = {"snapshot_rate": 0.0}
    assert simulate(case(days=100.0, horizon=100.0, regime=free).plan(), 50, rng).finished.all()
    paused = case(policies={"pause-when-drawn": {"periods": 9}}, used=400, regime=free).plan()
    assert not simulate(paused, 50, rng).finished.any()


@pytest.mark.parametrize("simulate", [simulate_agents, simulate_counts])
def test_same_seed_same_outcome(simulate: Any) -> None:
    plan = case(rates={"undeclared-run": 0.3}).plan()
    first, second, other = (simulate(plan, 300, np.random.default_rng(s)).caught_period for s in (1, 1, 2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


def test_a_draw_in_parts_is_the_same_draw() -> None:
    """Splitting needs this: sequential parts of one inspection have the law of the whole."""
    plan = case(policies={"hide-logs": {}}, regime={"refusals_allowed": 2, "samples": 20}).plan()
    rng, trials = generator("parts"), 40_000
    world = CountsWorld(plan, trials)
    world.begin(rng)
    for part in (1, 4, 7, 8):
        world.draw(0, part, rng)
    world.end(rng)
    expected = -math.expm1(predict(plan).by_period[0])
    low, high = clopper_pearson(int(world.caught.sum()), trials, 1 - 1e-5)
    assert low <= expected <= high


def test_prediction_holds_far_below_the_smallest_float() -> None:
    """Two strata with equal rates are one stratum; the saddle point must agree with the direct sum at 1e-3000."""
    regime = Inspection(period_days=30, samples=5000, snapshot_rate=0.1)

    def plan(*counts: int) -> Plan:
        base = case().plan()
        strata = tuple(
            Stratum(urn=0, count=count, begin=0, end=30, busy_begin=0, busy_end=30 + index, rate=0.1,
                    catch_snapshot=1.0, catch_bare=0.0)
            for index, count in enumerate(counts)
        )  # fmt: skip
        urns = (Urn(name="world", chips=10_000, samples=5000),)
        return Plan(
            name="p", inspection=regime, days=30, periods=1, urns=urns, strata=strata, searches=(), loss_test=None,
            end=30, refuse=False, reaction=None, lies=base.lies, hidden_chips=0,
        )  # fmt: skip

    whole, parts = predict(plan(6000)).log_miss, predict(plan(2000, 4000)).log_miss
    assert whole is not None
    assert parts is not None
    assert whole < -3000
    assert parts == pytest.approx(whole, rel=1e-10)


def test_replacement_never_detects_more() -> None:
    for name in ("base", "imperfect", "stretch", "waves", "two speeds"):
        world = EXACT[name]
        with_replacement = Case(**{**_fields(world), "regime": (*world.regime, ("replacement", True))})
        once, again = predict(world.plan()).detection, predict(with_replacement.plan()).detection
        assert once is not None
        assert again is not None
        assert again < once


def _fields(world: Case) -> dict[str, Any]:
    return {name: getattr(world, name) for name in Case.__dataclass_fields__}
