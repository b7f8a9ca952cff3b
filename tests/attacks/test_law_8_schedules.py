"""Law 8, declared schedules: every mathematical library and PyTorch's own schedulers meet them, and no other rate."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler as of_pytorch

from firmware_sim.errors import CallerError
from inspector.inspection.inspection import verify
from inspector.inspection.verdict import Outcome
from monitor.declaration.schedules import Schedule
from tests.guards import off

pytestmark = [
    pytest.mark.usefixtures("kept_devices"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
]

STEPS = 10_000
MAKERS = {
    "LambdaLR": lambda o: of_pytorch.LambdaLR(o, lambda k: min(k / 500, 1) * max(0.0, 1 - k / STEPS)),
    "MultiplicativeLR": lambda o: of_pytorch.MultiplicativeLR(o, lambda k: 0.9995),
    "StepLR": lambda o: of_pytorch.StepLR(o, 30, 0.97),
    "MultiStepLR": lambda o: of_pytorch.MultiStepLR(o, [30, 3000, 8000], 0.1),
    "ConstantLR": lambda o: of_pytorch.ConstantLR(o, 1 / 3, 50),
    "LinearLR": lambda o: of_pytorch.LinearLR(o, 1.0, 0.0, STEPS - 1),
    "ExponentialLR": lambda o: of_pytorch.ExponentialLR(o, 0.999),
    "CosineAnnealingLR": lambda o: of_pytorch.CosineAnnealingLR(o, STEPS - 1),
    "CosineAnnealingWarmRestarts": lambda o: of_pytorch.CosineAnnealingWarmRestarts(o, 100, 2),
    "PolynomialLR": lambda o: of_pytorch.PolynomialLR(o, STEPS - 1, 2.0),
    "CyclicLR": lambda o: of_pytorch.CyclicLR(o, 0.0, 0.1, 200, cycle_momentum=False),
    "OneCycleLR": lambda o: of_pytorch.OneCycleLR(o, 0.1, total_steps=STEPS, cycle_momentum=False),
    "SequentialLR": lambda o: of_pytorch.SequentialLR(
        o, [of_pytorch.LinearLR(o, 0.01, 1.0, 100), of_pytorch.CosineAnnealingLR(o, STEPS - 100)], [100]
    ),
    "ChainedScheduler": lambda o: of_pytorch.ChainedScheduler(
        [of_pytorch.ConstantLR(o, 0.1, 20), of_pytorch.ExponentialLR(o, 0.9999)]
    ),
}
KINDS = {
    "MultiplicativeLR": "step",
    "StepLR": "step",
    "ExponentialLR": "step",
    "LinearLR": "linear",
    "CosineAnnealingLR": "cosine",
}


def objects(rate: float = 0.1) -> tuple[nn.Module, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=rate)


def body(model, optimizer, batch) -> None:
    optimizer.zero_grad()
    functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
    optimizer.step()


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, 4, generator=generator), "y": torch.arange(4) % 3} for _ in range(count)]


@pytest.fixture
def record(record_loop):
    """Record steps of a loop that sets the rates given, or lets a scheduler go on; returns it."""

    def run(schedule, *, rates=None, scheduler=None, made=None, steps=5, body=body, name="loop", **options):
        model, optimizer = made or objects()

        def before(recorder, step):
            if rates is not None:
                optimizer.param_groups[0]["lr"] = rates[step - 1]
            elif scheduler is not None and step > 1:
                scheduler.step()

        return record_loop(
            model, optimizer, batches(steps), body, name=name, schedule=schedule, before=before, **options
        )

    return run


def judged(recorded):
    return verify(recorded.run, recorded.trust, now=recorded.now)


@pytest.fixture
def other_library(monkeypatch):
    """From now on the cosine ends one unit in the last place higher."""
    cos = math.cos
    return lambda: monkeypatch.setattr(
        "monitor.declaration.schedules.math.cos", lambda x: math.nextafter(cos(x), math.inf)
    )


def cosine_to_zero(record):
    rule = Schedule.of("cosine", steps=5, last=0.0)
    return record(rule, rates=[rule.rate(0.1, step) for step in range(1, 6)])


def test_c23_a_cosine_to_zero_is_met_under_another_mathematical_library(record, other_library):
    recorded = cosine_to_zero(record)
    other_library()
    assert judged(recorded).outcome is Outcome.ACCEPT


def test_c23_guard_off_rejects_the_cosine(record, other_library):
    recorded = cosine_to_zero(record)
    other_library()
    with off("largest rate"):
        verdict = judged(recorded)
    assert verdict.outcome is Outcome.REJECT
    assert "step 5 uses learning rate" in verdict.reasons[0].text


def test_c23_an_entry_that_is_never_reached_buys_no_tolerance(record):
    """Each group's tolerance is that of the rates which its own steps have used so far."""
    rule = Schedule.of("table", factors=[1.0, 1.0, 1.0, 1e12])
    with pytest.raises(CallerError, match=r"step 3 uses learning rate 0\.2 in group 0, but declares 0\.1 times"):
        record(rule, rates=[0.1, 0.1, 0.2], steps=3)
    near = 0.1 * (1 + 2.0**-33)
    with pytest.raises(CallerError, match="step 2 uses learning rate"):
        record(rule, rates=[0.1, near, 0.1], steps=3, name="near")


def schedulers_steps(make, made, steps=STEPS):
    """The rates that a scheduler of PyTorch's gives in a loop."""
    optimizer = made[1]
    scheduler = make(optimizer)
    for step in range(steps):
        yield optimizer.param_groups[0]["lr"]
        if step < steps - 1:
            optimizer.step()
            scheduler.step()


def first_off(rule: Schedule, declared: float, rates) -> int | None:
    """The first step at which a lab would be refused."""
    tops = itertools.accumulate(rates, max)
    pairs = enumerate(zip(rates, tops, strict=True), 1)
    return next((step for step, (rate, top) in pairs if not rule.agrees(declared, rate, step, top)), None)


@pytest.mark.parametrize("name", MAKERS)
def test_c24_pytorchs_own_schedulers_are_met_over_10_000_steps(name):
    rule = Schedule.of_scheduler(MAKERS[name](objects()[1]), steps=STEPS)
    rates = list(schedulers_steps(MAKERS[name], objects()))
    assert rule.kind == KINDS.get(name, "table")
    assert first_off(rule, rule.rates[0], rates) is None
    other = [*rates[:500], rates[500] + 1e-9, *rates[501:]]
    assert first_off(rule, rule.rates[0], other) == 501


@pytest.mark.parametrize(
    ("rule", "name"),
    [
        (Schedule.of("linear", steps=STEPS, last=0.0), "LinearLR"),
        (Schedule.of("cosine", steps=STEPS, last=0.0), "CosineAnnealingLR"),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_c24_a_rule_by_hand_is_met_too_and_was_not(rule, name):
    rates = list(schedulers_steps(MAKERS[name], objects()))
    assert first_off(rule, 0.1, rates) is None
    with off("largest rate"):
        assert first_off(rule, 0.1, rates) is not None


@pytest.mark.parametrize("name", MAKERS)
def test_c24_a_run_that_hands_over_its_scheduler_is_accepted(record, name):
    made = objects()
    scheduler = MAKERS[name](made[1])
    recorded = record(Schedule.of_scheduler(scheduler, steps=200), scheduler=scheduler, made=made, steps=3)
    verdict = judged(recorded)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


def test_c24_a_table_of_10_000_entries_is_declared_and_accepted(record):
    made = objects()
    scheduler = MAKERS["SequentialLR"](made[1])
    recorded = record(Schedule.of_scheduler(scheduler, steps=STEPS), scheduler=scheduler, made=made, steps=2)
    assert judged(recorded).outcome is Outcome.ACCEPT


def test_c24_the_schedule_of_another_optimizers_scheduler_is_refused_at_the_declaration(record, tmp_path):
    rule = Schedule.of_scheduler(MAKERS["LinearLR"](objects(0.3)[1]), steps=9)
    with pytest.raises(CallerError, match=r"scheduler begins with the rates \[0.3\], but the optimizer has \[0.1\]"):
        record(rule)
    assert not (tmp_path / "loop").exists()


def test_c24_a_scheduler_that_will_not_follow_the_declared_rule_is_told_at_the_declaration(record):
    """Whether it goes on once a step nobody knows, so it is a warning; declared as it goes on, it is followed."""

    def begin(name, rule=None, every=1):
        made = objects()
        scheduler = of_pytorch.CosineAnnealingLR(made[1], 1000)
        rule = rule or Schedule.of_scheduler(scheduler, steps=1001, every=every)
        turns = itertools.count(1)

        def stepped(*objects):
            body(*objects)
            if next(turns) % every == 0:
                scheduler.step()

        options = {"made": made, "stateful": {"schedule": scheduler}, "steps": 3, "body": stepped}
        return judged(record(rule, **options, name=name))

    with (
        pytest.warns(UserWarning, match=r"'schedule' gives rate .* in step 2 if it goes on once a step.*of_scheduler"),
        pytest.raises(CallerError, match="step 2 uses learning rate"),
    ):
        begin("other", Schedule.of("cosine", steps=1000, last=0.0))
    for name, rule in (("by-hand", Schedule.of("cosine", steps=1001, last=0.0)), ("handed-over", None)):
        assert begin(name, rule).outcome is Outcome.ACCEPT
    assert begin("every", every=2).outcome is Outcome.ACCEPT


def test_c24_rates_that_follow_losses_declare_no_schedule(record):
    made = objects()
    scheduler = of_pytorch.ReduceLROnPlateau(made[1], patience=0)
    with pytest.raises(CallerError, match="declare no schedule, and the rates are listed step by step"):
        Schedule.of_scheduler(scheduler, steps=5)

    def stepped(*objects):
        body(*objects)
        scheduler.step(1.0)

    verdict = judged(record(None, made=made, body=stepped))
    assert verdict.outcome is Outcome.ACCEPT
    assert verdict.evidence["execution"]["learning_rates"] == [[pytest.approx(1e-4), 0.1]]


def test_c24_an_accumulation_in_separate_steps_follows_its_scheduler(record):
    """A schedule goes on with the updates, as PyTorch's schedulers do, and lab and inspector count alike."""
    made = objects()
    scheduler = of_pytorch.LambdaLR(made[1], lambda k: 1 / (1 + k))
    rule = Schedule.of_scheduler(scheduler, steps=8)
    turns = itertools.count(1)

    def accumulated(model, optimizer, batch):
        functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        if next(turns) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()

    verdict = judged(record(rule, made=made, steps=6, body=accumulated))
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
