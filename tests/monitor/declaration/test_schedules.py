"""Rules for learning rates, as data."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firmware_sim.errors import CallerError, EvidenceError
from inspector.inspection.judging import verify
from inspector.inspection.verdict import Outcome
from monitor.declaration.schedules import Schedule
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
        assert not rule.agrees(5.0, used, 5000)
    assert not rule.agrees("fast", 5.0, 5000)


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
    with pytest.raises(CallerError, match=r"the learning rate of step 2 is .* but the declared schedule gives"):
        record("refused", (1.0, 1.0, 1.0))
    with monkeypatch.context() as blind:
        blind.setattr(Schedule, "agrees", lambda *_: True)
        liar = record("liar", (1.0, 1.0, 1.0))
        assert verify(liar.run, liar.trust, now=liar.now).outcome is Outcome.ACCEPT  # the guard is off
    verdict = verify(liar.run, liar.trust, now=liar.now)
    assert verdict.outcome is Outcome.REJECT
    assert "step 2 uses learning rate" in verdict.reasons[0].text
