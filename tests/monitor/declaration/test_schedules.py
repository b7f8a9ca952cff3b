"""Rules for learning rates, as data."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler as of_pytorch

from firmware_sim.errors import CallerError, EvidenceError
from inspector.inspection.inspection import verify
from inspector.inspection.verdict import Outcome
from monitor.declaration.schedules import Schedule, declared_groups
from monitor.presets.task import Task
from tests.monitor.recording.test_recorder import mlp, pairs, plain, sgd

RULES = [
    Schedule.of("constant"),
    Schedule.of("warmup", steps=4),
    Schedule.of("linear", steps=5, last=0.5),
    Schedule.of("cosine", steps=5, last=0.1),
    Schedule.of("step", every=2, factor=0.5),
    Schedule.of("table", factors=[1.0, 0.25]),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind)
def test_a_rule_is_the_same_after_json_and_starts_where_it_should(rule):
    assert Schedule.from_json(rule.to_json()) == rule
    assert rule.factor(1) == (0.25 if rule.kind == "warmup" else 1.0)
    assert rule.factor(9) == {"linear": 0.5, "cosine": 0.1, "step": 0.0625, "table": 0.25}.get(rule.kind, 1.0)


@settings(deadline=None, derandomize=True, database=None)
@given(st.integers(1, 9), st.integers(1, 12), st.floats(1e-6, 1.0))
def test_warmup_is_that_of_a_task(warmup, step, rate):
    task = Task.for_preset("digits-cnn", seed=1, steps=12, warmup=warmup, learning_rate=rate)
    assert Schedule.of("warmup", steps=warmup).rate(rate, step) == task.learning_rate_at(step)


@pytest.mark.parametrize(
    "data",
    [
        *([], {}, {"kind": 1}, {"kind": "sine"}, {"kind": "linear"}, {"kind": "constant", "steps": 1}),
        *({"kind": "warmup", "steps": 0}, {"kind": "warmup", "steps": 10**12}, {"kind": "warmup", "steps": "2"}),
        *({"kind": "table", "factors": []}, {"kind": "table", "factors": [1]}, {"kind": "table", "factors": 1.0}),
        *({"kind": "step", "every": 1, "factor": -1.0}, {"kind": "step", "every": 1, "factor": math.inf}),
    ],
    ids=str,
)
def test_another_form_is_refused(data):
    with pytest.raises(EvidenceError):
        Schedule.from_json(data)


@pytest.mark.parametrize("rule", [Schedule.of("step", every=1, factor=2.0), Schedule.of("table", factors=[1.7e308])])
def test_a_rule_without_a_finite_rate_agrees_with_none(rule):
    for used in (0.0, 1.0, math.inf, math.nan):
        assert not rule.agrees(5.0, used, 5000, math.inf)
        assert not rule.agrees(10**400, used, 1, 5.0)
    assert not rule.agrees("fast", 5.0, 5000, 5.0)


def optimizer_of(groups: int = 1, rate: float = 0.1) -> torch.optim.SGD:
    weights = [torch.zeros(1, requires_grad=True) for _ in range(groups)]
    return torch.optim.SGD([{"params": [weight], "lr": rate * 3**i} for i, weight in enumerate(weights)], lr=1.0)


def test_a_scheduler_is_foreseen_on_a_copy_of_it():
    optimizer = optimizer_of(2)
    scheduler = of_pytorch.SequentialLR(
        optimizer, [of_pytorch.LinearLR(optimizer, 0.1, 1.0, 3), of_pytorch.CosineAnnealingLR(optimizer, 5)], [3]
    )
    before = repr([scheduler.state_dict(), *optimizer.param_groups])
    rule = Schedule.of_scheduler(scheduler, steps=8)
    assert repr([scheduler.state_dict(), *optimizer.param_groups]) == before
    assert rule.kind == "table"
    assert rule.rates == pytest.approx((0.1, 0.3))
    (declared, other) = declared_groups(rule, optimizer.param_groups, {})
    assert (declared["lr"], other["lr"]) == rule.rates
    assert Schedule.from_json(rule.to_json()) == rule


def test_a_scheduler_may_go_on_less_often_than_once_a_step():
    rule = Schedule.of_scheduler(of_pytorch.ExponentialLR(optimizer_of(), 0.5), steps=9, every=3)
    assert rule == Schedule.of("step", every=3, factor=0.5)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (of_pytorch.ReduceLROnPlateau, r"step 2 of 'ReduceLROnPlateau' cannot be foreseen: .*'metrics'"),
        (lambda optimizer: of_pytorch.CosineAnnealingLR(optimizer, 9, 0.01), "gives its groups different factors"),
        (
            lambda optimizer: of_pytorch.LambdaLR(optimizer, lambda step: -1.0),
            "gives a rate that is not a number of at l",
        ),
        (lambda optimizer: 1 / 3, "'float' is not a scheduler"),
    ],
)
def test_what_cannot_be_foreseen_is_refused_with_a_remedy(make, text):
    with pytest.raises(CallerError, match=f"{text}.*; declare no schedule, and the rates are listed") as found:
        Schedule.of_scheduler(make(optimizer_of(2)), steps=10)
    assert "\n" not in str(found.value)
    with pytest.raises(CallerError, match=r"'StepLR' is not a schedule; take Schedule\.of_scheduler"):
        declared_groups(of_pytorch.StepLR(optimizer_of(), 1), [], {})  # type: ignore[arg-type]
    with pytest.raises(CallerError, match=r"computed for 1 … \d+ steps"):
        Schedule.of_scheduler(of_pytorch.StepLR(optimizer_of(), 1), steps=0)


def test_recorded_rates_follow_the_declared_schedule_or_are_refused_and_rejected(record_loop, monkeypatch):
    rule = Schedule.of("step", every=1, factor=0.5)

    def record(name, rates):
        model = mlp()
        optimizer = sgd(model)
        first = optimizer.param_groups[0]["lr"]

        def before(recorder, step):
            optimizer.param_groups[0]["lr"] = first * rates[step - 1]

        return record_loop(model, optimizer, pairs(3), plain, name=name, schedule=rule, before=before)

    honest = record("honest", (1.0, 0.5, 0.25))
    assert verify(honest.run, honest.trust, now=honest.now).outcome is Outcome.ACCEPT
    with pytest.raises(CallerError, match=r"step 2 uses learning rate .*; let the optimizer follow that"):
        record("refused", (1.0, 1.0, 1.0))
    with monkeypatch.context() as blind:
        blind.setattr(Schedule, "agrees", lambda *_: True)
        liar = record("liar", (1.0, 1.0, 1.0))
        assert verify(liar.run, liar.trust, now=liar.now).outcome is Outcome.ACCEPT  # the guard is off
    verdict = verify(liar.run, liar.trust, now=liar.now)
    assert verdict.outcome is Outcome.REJECT
    assert "step 2 uses learning rate" in verdict.reasons[0].text
