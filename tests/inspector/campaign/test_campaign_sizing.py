"""Samples for a wanted confidence under a cap on false alarms, against brute force over both numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
from scipy.stats import binom

from firmware_sim.errors import CallerError
from inspector.campaign import NoScheduleError, Plan, Scenario, ScenarioError, load_scenario, predict
from inspector.campaign.predictions import Prediction
from inspector.campaign.sizing import false_alarm
from inspector.probability.detection import log_miss_without_replacement

PERIODS = 4
TEXT = """\
title = "test"
days = 120
[rule]
threshold_flop = 1e23
evidence = "whole-run"
[inspection]
period_days = 30
confidence = 0.9
snapshot_rate = 0.1
honest_refusal_rate = 0.02
refusals_allowed = "fewest"
[detection]
assumed = { undeclared-run = 1.0, "swap-weights" = 0.5 }
[[kind]]
name = "unit"
flop_per_second = 1.1574074074074073e15
[[lab]]
name = "A"
site = [{ name = "s", chips = [{ kind = "unit", count = 400 }] }]
[[run]]
name = "run"
lab = "A"
flop = 2.4e23
days = 120
[[strategy]]
name = "plain"
[[strategy]]
name = "hides"
policies = [{ policy = "hide-logs" }]
"""


def tolerated(checks: int, allowed: int, rate: Fraction = Fraction(1, 50)) -> float:
    return float(sum(math.comb(checks, j) * rate**j * (1 - rate) ** (checks - j) for j in range(allowed + 1)))


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Scenario]:
    def loaded(*changes: tuple[str, str], cap: float | None = None) -> Scenario:
        text = TEXT
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "scenario.toml"
        path.write_text(text, encoding="utf-8")
        return load_scenario(path, false_alarms=cap)

    return loaded


def by_hand(samples: int, allowed: int, *, hides: bool) -> float:
    """Detection over four periods: 20 of 400 chips, each with a snapshot of the last 30 days at rate 0.1."""
    holds, broken, quiet = -math.expm1(-3.0), 0.02, 0.0
    for involved in range(min(20, samples) + 1):
        drawn = math.comb(20, involved) * math.comb(380, samples - involved) / math.comb(400, samples)
        for evident in range(involved + 1):
            chance = math.comb(involved, evident) * holds**evident * (1 - holds) ** (involved - evident)
            for missing in range(min(allowed, samples) + 1):
                # The chips with evidence must all be missing: broken, or refused.
                others = missing - evident
                if others < 0:
                    continue
                rest = samples - evident
                passes = math.comb(rest, others) * broken**others * (1 - broken) ** (rest - others)
                quiet += drawn * chance * passes * (1.0 if hides else broken**evident)
    return 1 - quiet**PERIODS


@pytest.mark.parametrize("number", [0, 1], ids=["plain", "hides"])
def test_fewest_samples_and_refusals_by_brute_force(number: int, load: Callable[..., Scenario]) -> None:
    scenario = load()
    found = scenario.sizing(scenario.strategies[number])
    for samples in range(1, 400):
        allowed = next(n for n in range(samples + 1) if 1 - tolerated(samples, n) ** PERIODS <= 0.01)
        if by_hand(samples, allowed, hides=number == 1) >= 0.9:
            break
    assert (found.samples, found.refusals_allowed, found.reason) == (samples, allowed, "")


def test_a_scenario_sized_by_confidence_keeps_the_cap(load: Callable[..., Scenario]) -> None:
    scenario = load()
    samples, allowed = scenario.inspection.samples, scenario.inspection.refusals_allowed
    alarm = 1 - tolerated(samples, allowed) ** PERIODS
    assert scenario.false_alarm() == pytest.approx(alarm, rel=1e-9)
    assert alarm <= 0.01
    found = predict(scenario.plan(scenario.strategies[0])).detection
    assert found == pytest.approx(by_hand(samples, allowed, hides=False), rel=1e-6)
    assert found is not None
    assert found >= 0.9


def test_a_smaller_cap_tolerates_more_refusals(load: Callable[..., Scenario]) -> None:
    loose, tight = load(cap=0.05), load(("snapshot_rate", "false_alarms = 1e-5\nsnapshot_rate"))
    assert loose.inspection.refusals_allowed < tight.inspection.refusals_allowed
    assert loose.inspection.samples <= tight.inspection.samples
    assert tight.false_alarm() <= 1e-5
    assert load(("snapshot_rate", "false_alarms = 1e-5\nsnapshot_rate"), cap=0.05).inspection == loose.inspection


def test_given_samples_get_the_fewest_refusals(load: Callable[..., Scenario]) -> None:
    scenario = load(("confidence = 0.9", "samples = 50"))
    allowed = scenario.inspection.refusals_allowed
    assert 1 - tolerated(50, allowed) ** PERIODS <= 0.01 < 1 - tolerated(50, allowed - 1) ** PERIODS


def test_what_a_fixed_threshold_cannot_do_is_said(load: Callable[..., Scenario]) -> None:
    fixed = ('"fewest"', "1")
    with pytest.raises(NoScheduleError) as raised:
        load(fixed)
    shown = str(raised.value)
    assert "\n" not in shown
    assert "line 8: inspection.confidence: no number of samples reaches 0.9 against 'plain' with false alarms" in shown
    assert "accuse an honest lab with" in shown
    scenario = load(fixed, ("confidence = 0.9", "samples = 12"))
    sizing = scenario.sizing(scenario.strategies[0])
    assert (sizing.samples, sizing.refusals_allowed) == (None, None)
    assert "above the cap of 0.01" in sizing.reason
    assert load(fixed, cap=0.2).inspection.refusals_allowed == 1


def test_a_lie_that_nobody_sees_is_not_caught_by_false_alarms(load: Callable[..., Scenario]) -> None:
    with pytest.raises(NoScheduleError, match="drawing all 400 chips finds evidence with 0 only"):
        load(("undeclared-run = 1.0", "undeclared-run = 0.0"))


@pytest.mark.parametrize(("samples", "allowed"), [(300, 12), (390, 40), (400, 9), (400, 399)])
def test_many_tolerated_refusals_by_a_direct_sum(samples: int, allowed: int, load: Callable[..., Scenario]) -> None:
    """Broken chips are a random part of the draw, so the others are a smaller draw of their own."""
    scenario = load(("confidence = 0.9", f"samples = {samples}"), ('"fewest"', str(allowed)))
    quiet = sum(
        binom.pmf(broken, samples, 0.02)
        * math.exp(log_miss_without_replacement(chips=400, used=20, samples=samples - broken, catch=-math.expm1(-3.0)))
        for broken in range(allowed + 1)
    )
    found = predict(scenario.plan(scenario.strategies[0])).by_period[0]
    assert found == pytest.approx(math.log(quiet), rel=1e-9)


def test_losses_may_use_up_the_cap(load: Callable[..., Scenario]) -> None:
    losses = ("snapshot_rate", "loss_rate_per_year = 0.1\nloss_alarm = 0.05\nsnapshot_rate")
    for sampled in ((), (("confidence = 0.9", "samples = 12"),)):
        with pytest.raises(
            NoScheduleError,
            match=r"accused with more than 0\.01, however many chips that could not be shown are tolerated",
        ):
            load(losses, *sampled)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"fewest"', '"most"', "refusals_allowed: must be a whole number or 'fewest'"),
        ("snapshot_rate", "false_alarms = 1.5\nsnapshot_rate", "false_alarms: must be between 0 and 1"),
        ("snapshot_rate", "false_alarms = 0.9\nsnapshot_rate", "already reaches the wanted confidence of 0.9"),
    ],
)
def test_nonsense_is_refused(old: str, new: str, text: str, load: Callable[..., Scenario]) -> None:
    with pytest.raises(ScenarioError, match=text):
        load((old, new))
    with pytest.raises(CallerError, match="false alarms must be between 0 and 1"):
        load(cap=-1.0)


def test_the_honest_figure_is_that_of_a_world_without_violation(load: Callable[..., Scenario]) -> None:
    scenario = load()
    with pytest.raises(ValueError, match="'plain' is not a plan of a world without violation"):
        false_alarm(scenario.plan(scenario.strategies[0]))


def test_sizing_goes_on_from_the_samples_that_were_not_enough(
    load: Callable[..., Scenario], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where honest chips are refused often, the tolerated refusals and the samples raise each other many times."""
    asked: list[int] = []

    def counting(plan: Plan) -> Prediction:
        asked.append(plan.inspection.samples)
        return predict(plan)

    monkeypatch.setattr("inspector.campaign.sizing.predict", counting)
    scenario = load(("honest_refusal_rate = 0.02", "honest_refusal_rate = 0.9"))
    asked.clear()
    found = scenario.sizing(scenario.strategies[0])
    assert found.samples is not None
    assert len(asked) < 600  # 763 where each search begins at one
