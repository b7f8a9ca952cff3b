"""Estimates and their intervals: coverage on known cases, rare escapes, and the uncertainty of measured rates."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import binom

from analysis.montecarlo import (
    Estimate,
    TooNoisyError,
    TrialEngine,
    estimate_detection,
    estimate_rare_miss,
    run_campaign,
)
from analysis.scenarios import open_regimes, open_scenario, public_catalogue, ready_scenarios
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
    Scenario,
    Site,
    Strategy,
    Threshold,
    clopper_pearson,
    load_rates,
    make_plan,
    policy_from,
    predict,
    wilson,
)


def generator(name: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=16).digest()))


def fleet(chips: int) -> Fleet:
    kind = Kind(name="unit", flop_per_day=1.0)
    return Fleet(labs=(Lab(name="A", sites=(Site(name="s", pools=(Pool(kind=kind, count=chips),)),)),))


def plan(
    *policies: tuple[str, dict[str, object]],
    chips: int = 1000,
    used: int = 50,
    days: float = 120,
    rates: RateBook | None = None,
    **regime: object,
) -> Plan:
    return make_plan(
        fleet(chips),
        [Run(name="run", lab="A", flop=used * days, days=days)],
        Threshold(threshold_flop=1.0, evidence=Evidence.WHOLE_RUN),
        Inspection(**{"period_days": 30, "samples": 5, "snapshot_rate": 0.1, **regime}),  # type: ignore[arg-type]
        Strategy(name="s", policies=tuple(policy_from(name, p) for name, p in policies)),
        rates or RateBook(assumed={"undeclared-run": 1.0}),
        days=days * 3,
    )


@pytest.mark.parametrize("probability", [0.003, 0.1, 0.5, 0.97])
def test_exact_interval_covers_at_least_as_often_as_it_says(probability: float) -> None:
    """Over all outcomes, not over a sample of them: coverage is a finite sum."""
    trials, confidence = 150, 0.9
    coverage = {"exact": 0.0, "wilson": 0.0}
    for successes in range(trials + 1):
        mass = float(binom.pmf(successes, trials, probability))
        for name, interval in (("exact", clopper_pearson), ("wilson", wilson)):
            low, high = interval(successes, trials, confidence)
            assert low <= successes / trials <= high
            coverage[name] += mass * (low <= probability <= high)
    assert coverage["exact"] >= confidence
    assert coverage["wilson"] == pytest.approx(confidence, abs=0.07)


def test_interval_of_the_simulation_covers_a_known_case(request: pytest.FixtureRequest) -> None:
    """300 intervals at 90 %: fewer than 90 % + slack may miss; false alarm 1e-6 by the binomial law."""
    known = plan(samples=3)
    truth = predict(known).detection
    assert truth is not None
    rng = generator(request.node.name)
    estimates = [estimate_detection(known, 400, rng, confidence=0.9) for _ in range(300)]
    missed = sum(not e.low <= truth <= e.high for e in estimates)
    assert missed <= binom.isf(1e-6, 300, 0.1)
    # Nor may it cover because it is wide: about twice 1.645 deviations.
    assert np.mean([e.high - e.low for e in estimates]) < 2.2 * 1.645 * math.sqrt(truth * (1 - truth) / 400)


def test_interval_of_splitting_covers_a_known_case(request: pytest.FixtureRequest) -> None:
    """60 runs of small islands at 90 %, miss probability 4e-4; slack of 3 % for the t law; false alarm 1e-5."""
    known = plan(samples=40)
    truth = math.exp(predict(known).log_miss or 0.0)
    assert 1e-5 < truth < 1e-3
    rng = generator(request.node.name)
    found = [estimate_rare_miss(known, rng, particles=300, islands=12, confidence=0.9) for _ in range(60)]
    missed = sum(not e.low <= truth <= e.high for e in found)
    assert missed <= binom.isf(1e-5, 60, 0.13)
    assert missed >= 1, "an interval that never misses in 60 is too wide to be a 90 % interval"
    mean = np.mean([e.value for e in found])
    deviation = np.std([e.value for e in found]) / math.sqrt(len(found))
    assert abs(mean - truth) < 5 * deviation


RARE = {
    "many periods": (plan(samples=90, chips=1000, used=50), 1e-9),
    "one period": (plan(samples=300, chips=1000, used=80, days=30, snapshot_rate=0.05), 1e-9),
    "replacement": (plan(samples=105, chips=1000, used=50, replacement=True), 1e-9),
    "imperfect": (plan(samples=100, used=100, rates=RateBook(assumed={"undeclared-run": 0.5})), 1e-9),
    "waves": (plan(("waves", {"groups": 3}), samples=90), 1e-9),
    "innocent refusals": (plan(samples=60, honest_refusal_rate=0.03), 1e-9),
    "tolerated refusals": (plan(("hide-logs", {}), samples=120, refusals_allowed=2), 1e-6),
    "far": (plan(chips=10_000, used=500, samples=500), 1e-30),
}


@pytest.mark.parametrize("name", RARE)
def test_rare_escapes(name: str, request: pytest.FixtureRequest) -> None:
    """Within 10 % of the truth and inside the 99.99 % interval: false alarm below 1e-3 for all eight."""
    rare, at_most = RARE[name]
    log_miss = predict(rare).log_miss
    assert log_miss is not None
    assert log_miss < math.log(at_most * 100)
    found = estimate_rare_miss(rare, generator(request.node.name), particles=4000, islands=20, confidence=0.9999)
    truth = math.exp(log_miss)
    assert found.low <= truth <= found.high
    if log_miss > -30:
        assert found.value == pytest.approx(truth, rel=0.1)
    assert found.effective > 10


def test_splitting_agrees_with_plain_trials_for_an_adaptive_prover(request: pytest.FixtureRequest) -> None:
    """No closed form here: plain trials at 99.99 % against splitting at 99.99 %."""
    adaptive = plan(("pause-when-drawn", {"periods": 2}), samples=12, rates=RateBook(assumed={"undeclared-run": 0.6}))
    rng = generator(request.node.name)
    plain = estimate_detection(adaptive, 40_000, rng, confidence=0.9999).complement()
    split = estimate_rare_miss(adaptive, rng, confidence=0.9999)
    assert max(plain.low, split.low) <= min(plain.high, split.high)
    assert 0.01 < plain.value < 0.9


def test_certain_detection_has_no_rare_estimate() -> None:
    certain = plan(chips=50, used=50, samples=50, snapshot_rate=50.0)
    with pytest.raises(TooNoisyError, match="no world of"):
        estimate_rare_miss(certain, generator("certain"), particles=50, islands=4)


def test_islands_that_disagree_are_not_an_estimate() -> None:
    """A draw of most chips is survived only by worlds of few snapshots, which a hundred particles hardly meet."""
    with pytest.raises(TooNoisyError, match="the 20 independent simulations differ so much that they count as"):
        estimate_rare_miss(plan(chips=100, used=30, samples=60), generator("noisy"), particles=100, islands=20)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p, g: estimate_detection(p, 0, g), "trials must be at least 1"),
        (lambda p, g: estimate_detection(p, 2.5, g), "trials must be a whole number"),  # type: ignore[arg-type]
        (lambda p, g: estimate_detection(p, 10, g, confidence=1.0), "strictly between 0 and 1"),
        (lambda p, g: estimate_detection(p, 10, g, confidence=math.nan), "finite number"),
        (lambda p, g: estimate_rare_miss(p, g, confidence=0.0), "strictly between 0 and 1"),
        (lambda p, g: estimate_rare_miss(p, g, islands=3), "4 islands"),
        (lambda p, g: clopper_pearson(5, 4, 0.9), "but only 4 trials"),
        (lambda p, g: wilson(-1, 4, 0.9), "at least 0"),
        (lambda p, g: wilson(0, 0, 0.9), "at least 1"),
    ],
)
def test_nonsense_is_the_callers_mistake(call, message: str) -> None:
    with pytest.raises(CallerError, match=message):
        call(plan(), generator("nonsense"))


def test_an_estimate_cannot_be_built_wrong() -> None:
    with pytest.raises(ValueError, match="not an interval"):
        Estimate(value=0.5, low=0.6, high=0.7, confidence=0.9, trials=1, effective=1.0, method="plain")


def scenario(rates: RateBook, samples: int = 6) -> Scenario:
    return Scenario(
        title="t",
        description="",
        days=120,
        fleet=fleet(1000),
        runs=(Run(name="r", lab="A", flop=50 * 120.0, days=120),),
        rule=Threshold(threshold_flop=1.0, evidence=Evidence.WHOLE_RUN),
        inspection=Inspection(period_days=30, samples=samples, snapshot_rate=0.1),
        strategies=(
            Strategy(name="plain"),
            Strategy(name="swap", policies=(policy_from("weight-swap", {}),)),
        ),
        rates=rates,
        wanted=0.9,
        chips_per_inspector_year=1000,
    )


def measured(folder: Path, trials: int, caught: int) -> RateBook:
    row = {"lie": "swap-weights", "trials": trials, "caught": caught, "settings": "s", "device": "d"}
    path = folder / "rates.json"
    path.write_text(json.dumps({"format": "chipwitness-rates/1", "rows": [row]}), encoding="utf-8")
    return RateBook(measured=load_rates(path), assumed={"undeclared-run": 1.0})


def test_few_measurements_make_a_wide_interval(tmp_path: Path) -> None:
    widths = []
    for trials in (8, 80, 8000):
        honest, plain, swap = run_campaign(scenario(measured(tmp_path, trials, trials // 2)), 4000, 7)
        assert swap.measured_lies == ("swap-weights",)
        assert swap.assumed_lies == ()
        assert plain.assumed_lies == ("undeclared-run",)
        assert honest.measured_lies == ()
        widths.append(swap.detection.high - swap.detection.low)
        assert plain.detection.high - plain.detection.low < 0.04
        assert swap.detection.low <= (swap.predicted.detection or 0) <= swap.detection.high
    assert widths[0] > 2 * widths[1] > 4 * widths[2]


def test_interval_with_measured_rates_covers_the_truth() -> None:
    """The rate is measured anew 60 times in 25 trials; the 90 % interval may miss 60·0.1 times and a few more.

    False alarm 1e-4 by the binomial law.
    """
    rng = generator("measured rates")
    truth = predict(_swap(0.6)).detection
    assert truth is not None
    missed = 0
    for seed in range(60):
        caught = int(rng.binomial(25, 0.6))
        book = RateBook(measured={"swap-weights": _rate(caught, 25)}, assumed={"undeclared-run": 1.0})
        found = run_campaign(scenario(book), 1000, seed, confidence=0.9)[2].detection
        missed += not found.low <= truth <= found.high
    assert missed <= binom.isf(1e-4, 60, 0.1)


def _rate(caught: int, trials: int):
    from inspector.campaign import MeasuredRate

    return MeasuredRate(lie="swap-weights", trials=trials, caught=caught, settings="s", device="d")


def _swap(rate: float) -> Plan:
    made = scenario(RateBook(assumed={"undeclared-run": 1.0, "swap-weights": rate}))
    return made.plan(made.strategies[1])


def test_all_caught_in_measurements_still_leaves_doubt(tmp_path: Path) -> None:
    """20 of 20 caught: the escape probability's interval must reach up to that of a rate of about 0.8."""
    _, _, swap = run_campaign(scenario(measured(tmp_path, 20, 20), samples=60), 2000, 3)
    doubtful = _swap_miss(0.85, 60)
    assert swap.miss.high > doubtful > swap.miss.low
    assert swap.miss.method == "splitting, rates from measurement"


def _swap_miss(rate: float, samples: int) -> float:
    made = scenario(RateBook(assumed={"undeclared-run": 1.0, "swap-weights": rate}), samples)
    return math.exp(predict(made.plan(made.strategies[1])).log_miss or 0.0)


def test_campaigns_repeat_and_rows_have_their_own_stream() -> None:
    rates = RateBook(assumed={"undeclared-run": 1.0, "swap-weights": 1.0})
    first, again, other = (run_campaign(scenario(rates), 500, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first[1].detection != first[2].detection


def test_engines_give_the_same_campaign() -> None:
    rates = RateBook(assumed={"undeclared-run": 1.0, "swap-weights": 0.4})
    rows = [run_campaign(scenario(rates), 1500, 5, engine=engine, confidence=0.99999) for engine in TrialEngine]
    for agents, counts in zip(*rows, strict=True):
        assert max(agents.detection.low, counts.detection.low) <= min(agents.detection.high, counts.detection.high)


@pytest.mark.parametrize("name", sorted(ready_scenarios()))
def test_ready_scenarios_agree_with_theory(name: str) -> None:
    """50 rows at most in all: 1e-3/50 each by Bonferroni. Of several regimes the first."""
    for made in open_regimes(name)[:1]:
        for row in run_campaign(made, 4000, 1, confidence=1 - 1e-3 / 50):
            truth = row.predicted.detection
            if truth is not None:
                assert row.detection.low <= truth <= row.detection.high
            else:
                assert row.predicted.reason.startswith("none: ")
            # What splitting found and what plain trials completed are different samples.
            if row.detection.method == "plain" and row.name != "honest":
                assert row.detection.value + row.completed <= 1 + 1e-9


def test_an_escape_that_no_float_holds_is_left_to_plain_trials() -> None:
    """A census of a million chips: splitting would cut each of its draws into thousands of parts."""
    (made,) = [each for each in open_regimes("regimes") if each.regime == "tamper-proof enclaves"]
    made = dataclasses.replace(made, strategies=made.strategies[:1])
    _, planned = run_campaign(made, 50, 1)
    assert planned.predicted.log_miss is not None
    assert planned.predicted.log_miss < -1e4
    assert (planned.miss.method, planned.miss.value) == ("plain", 0)


def test_the_real_stocks_are_those_of_the_shipped_table() -> None:
    made = open_scenario("real-stocks")
    stocks = public_catalogue().stocks
    total = sum(stocks[lab.name, "2025-12"][1] for lab in made.fleet.labs)
    assert made.fleet.registered() == total
    (reached,) = [made.samples_needed(s) for s in made.strategies[:1]]
    assert reached == made.inspection.samples
    found = predict(made.plan(made.strategies[0])).detection
    assert found is not None
    assert found >= made.wanted


def test_an_unknown_scenario_lists_the_ready_ones() -> None:
    with pytest.raises(
        CallerError, match="ready ones are draft-agreement, evasions, evidence, paper-table-1, real-stocks"
    ):
        open_scenario("none")
