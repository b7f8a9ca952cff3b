"""Law 2 between steps: what operators of no program do with the state is told, allowed beforehand, and little."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim import Work
from firmware_sim.errors import CallerError
from firmware_sim.lies import Scenery
from inspector.dispute.provider import result_of
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor import Recorder
from monitor.declaration.schedules import Schedule
from monitor.lab import side_state_lies
from monitor.lab.lies import LAB_LIES
from monitor.transcript import Execution, Leaf
from tests.conftest import NOW, STARTED
from tests.guards import off

SETTINGS = Settings(samples=3, seed="x", devices=("sse41",))
BATCH = torch.linspace(-1, 1, 96).view(12, 8)


def model_of(width=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))


def body(model, optimizer, batch):
    optimizer.zero_grad()
    functional.mse_loss(model(batch), batch).backward()
    optimizer.step()


@pytest.fixture
def loop(record_loop):
    """Records five steps, before each of which `between(recorder, model)` runs, and returns the run."""

    def call(between, *, width=16, **options):
        model = model_of(width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def before(recorder, step):
            if step > 1:
                between(recorder, model)

        return record_loop(model, optimizer, [BATCH] * 5, body, before=before, **options)

    return call


@pytest.fixture
def judge(devices):
    def call(recorded, settings=SETTINGS):
        return inspect([recorded.run], recorded.trust, settings, now=recorded.now, worker=devices.run)

    return call


def norms(recorder, model):
    return [float(weight.detach().norm()) for weight in model.parameters()]


def evaluate(recorder, model):
    with recorder.evaluation(BATCH) as evaluation, torch.no_grad():
        evaluation.commit(functional.mse_loss(model(BATCH), BATCH))


def test_what_is_logged_and_evaluated_is_told_and_accepted(loop, judge):
    """Also where a snapshot falls between or into these operators, and with learning rates that follow the steps."""

    def between(recorder, model):
        assert float(model[2].bias.detach().norm()) > 0
        evaluate(recorder, model)
        assert float(model[2].bias.detach().norm()) > 0
        norms(recorder, model)

    options = {"snapshot_rate": Fraction(9, 10), "chips": 2}
    recorded = loop(between, **options, schedule=Schedule.of("constant"))
    verdict = judge(recorded, replace(SETTINGS, samples=2))
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    execution = verdict.evidence["runs"][0]["execution"]
    assert execution["evaluations"] == 4
    assert execution["writes"] == 4  # the norms of all weights, and the one right before them
    assert execution["beside_programs"]["calls"] == 4
    accepted, missing = (reason.text for reason in verdict.reasons)
    assert (
        "in addition to the committed steps (4 are evaluations and 4 lie between steps) the chips' meters count slack"
        in accepted
    )
    assert "operators outside programs (0 FLOP, " in accepted
    assert "work without a known purpose (slack), up to 5 % of the declared work" in missing
    beside = sum(chip["ledger"]["kinds"]["beside"]["moved"] for chip in verdict.evidence["chips"])
    assert execution["beside_programs"]["moved"] - 2 <= beside <= execution["beside_programs"]["moved"]
    assert not any(
        "slack" not in each["lie"] and each["probability"] == 1.0 for each in verdict.evidence["chances"][:2]
    )


def test_evaluations_do_not_move_a_schedule(loop, judge):
    rates = Schedule.of("step", every=2, factor=0.5)

    def between(recorder, model):
        evaluate(recorder, model)
        for group in recorder._run.loop.optimizer.param_groups:
            group["lr"] = rates.rate(1e-3, recorder.steps + 1)

    assert judge(loop(between, schedule=rates)).outcome is Outcome.ACCEPT


@pytest.mark.parametrize(
    "work", [norms, lambda recorder, model: model(BATCH), lambda recorder, model: model[0].weight.grad.square()]
)
def test_a_recorder_refuses_more_than_is_allowed_and_goes_on_from_the_last_step(tmp_path, work):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run", beside=0)
    with recorder.step(BATCH):
        body(model, optimizer, BATCH)
    with pytest.raises(
        CallerError, match=r"exceeds the work allowed on the state between two training steps: 1 calls.*evaluation"
    ):
        work(recorder, model)
    with pytest.raises(CallerError, match=r"continue .* with Recorder\.resume"), recorder.step(BATCH):
        pass
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder.resume(model, optimizer, out=tmp_path / "run")
    with recorder.step(BATCH):
        body(model, optimizer, BATCH)
    recorder.finish()
    assert recorder.steps == 2


def test_numbers_views_and_what_lies_elsewhere_are_no_work(tmp_path):
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run", beside=0)
    for _ in range(2):
        with recorder.step(BATCH):
            body(model, optimizer, BATCH)
            kept = model[0].weight.sum()
        assert kept.item() != 0
        assert model[0].weight.detach().t().shape == (8, 16)
        assert torch.ones(3).sum().item() == 3
    recorder.finish()


def test_a_write_that_is_taken_back_is_refused(tmp_path):
    """What rounding has swallowed does not come back."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run")
    with recorder.step(BATCH):
        body(model, optimizer, BATCH)
    with torch.no_grad():
        model[0].bias.add_(1e30)
        model[0].bias.sub_(1e30)
    with pytest.raises(CallerError, match=r"a write between steps cannot be recorded: .* 'weight/0\.bias'"):
        recorder.finish()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda model: model(BATCH).sum().backward(), "gradient/0"),
        (lambda model: model[0].weight.detach().mul_(2), "weight/0.weight"),
    ],
)
def test_an_evaluation_that_writes_is_refused(tmp_path, change, what):
    model = model_of()
    recorder = Recorder(model, torch.optim.SGD(model.parameters(), lr=0.1), out=tmp_path / "run")
    with pytest.raises(CallerError, match=f"an evaluation wrote {what}"), recorder.evaluation(BATCH):
        change(model)


def test_an_evaluation_by_stored_statistics_writes_nothing(tmp_path):
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    recorder = Recorder(model, None, out=tmp_path / "run")
    model.eval()
    with recorder.evaluation(BATCH), torch.no_grad():
        model(BATCH)
    model.train()
    with pytest.raises(CallerError, match=r"wrote buffer/1\.running_mean; put"), recorder.evaluation(BATCH):
        model(BATCH)


LIES = {
    "untold-work": ({"meter", "snapshot"}, "", ("metered work", "snapshots inside steps")),
    "more-work": ({"meter"}, "outside its program, but only ", ("work beside programs", "limited slack")),
    "step-as-evaluation": (
        {"evidence"},
        "is declared as an evaluation, but writes 'gradient/",
        ("evaluations write nothing",),
    ),
    "dropping-evaluation": (
        {"evidence"},
        "is declared as an evaluation, but drops 'optimizer/",
        ("evaluations write nothing",),
    ),
    "moving-evaluation": (
        {"evidence"},
        "is declared as an evaluation, but writes 'optimizer/",
        ("evaluations write nothing", "numbers bound"),
    ),
}


def test_every_lie_beside_programs_is_here():
    told = {name for name, lie in LAB_LIES.items() if lie.conduct.__module__ == side_state_lies.__name__}
    assert set(LIES) == told


@pytest.mark.parametrize("lie", LIES)
def test_lies_beside_programs_are_rejected_and_pass_with_their_guards_off(loop, judge, lie):
    guards, text, without = LIES[lie]
    recorded = loop(evaluate, lie=lie, lie_step=3)
    verdict = judge(recorded)
    assert verdict.outcome is Outcome.REJECT
    assert {reason.guard for reason in verdict.reasons} <= guards
    assert text in verdict.reasons[0].text
    with off(*without):
        verdict = judge(recorded)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


def test_what_is_done_behind_the_last_step_is_allowed_to_a_bound_and_told_in_the_verdict(loop, judge):
    """No step can tell of it any more."""
    verdict = judge(loop(evaluate, lie="untold-work", lie_step=9))
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert "operators after the last step, which no step declares" in verdict.reasons[0].text
    calls = sum(chip["ledger"]["kinds"]["behind"]["calls"] for chip in verdict.evidence["chips"])
    assert 3 <= calls <= 4  # four, in shares of whole calls
    assert "after the last step" not in judge(loop(evaluate, name="honest")).reasons[0].text
    recorded = loop(evaluate, name="more", lie="more-work", lie_step=9)
    verdict = judge(recorded)
    assert verdict.outcome is Outcome.REJECT
    assert {reason.guard for reason in verdict.reasons} == {"meter"}
    with off("metered work"):
        assert judge(recorded).outcome is Outcome.ACCEPT


@pytest.mark.parametrize("lie", [name for name, lie in LAB_LIES.items() if lie.scenery is Scenery.EVALUATIONS])
def test_a_lie_in_an_evaluation_takes_one(loop, make_run, lie):
    with pytest.raises(CallerError, match="from step 1 on, no evaluation found optimizer state"):
        loop(norms, lie=lie)
    with pytest.raises(CallerError, match="this lie needs evaluations, and presets have none"):
        make_run(lie=lie)


def test_work_of_which_no_step_can_tell_takes_a_step_that_follows(make_run):
    with pytest.raises(CallerError, match="choose a lie step before the last one"):
        make_run(lie="untold-work", lie_step=6)


def drop_optimizer_state(recorder, model):
    recorder._run.loop.optimizer.state.clear()
    evaluate(recorder, model)


def test_an_evaluation_that_drops_optimizer_state_is_refused(loop):
    with pytest.raises(CallerError, match=r"optimizer/.* was dropped before or in an evaluation; drop it in a step"):
        loop(drop_optimizer_state)


def test_gradients_may_be_cleared_before_an_evaluation(loop, judge):
    def between(recorder, model):
        recorder._run.loop.optimizer.zero_grad()
        evaluate(recorder, model)

    assert judge(loop(between)).outcome is Outcome.ACCEPT


def test_an_operator_of_operators_on_the_state_is_refused_and_elsewhere_it_runs(tmp_path):
    model = model_of()
    recorder = Recorder(model, torch.optim.SGD(model.parameters(), lr=0.1), out=tmp_path / "run")
    wrap, between = torch.ops.higher_order.wrap, cast(Any, recorder._between)
    assert wrap(lambda x: x + 1, torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(CallerError, match="is not metered by chips; write it as plain operators"):
        between.__torch_dispatch__(wrap, (), (lambda x: x + 1, model[0].weight.detach()))
    assert not recorder.steps


def test_two_labs_that_log_otherwise_claim_the_same():
    execution = Execution(program="0" * 64, slots={}, hyper=(), reads="")
    state: Any = SimpleNamespace(root="0" * 64)
    leaf = Leaf(step=1, batch="", state=state, log="", loss="", flop=0, execution=execution)
    other = replace(leaf, execution=replace(execution, outside=Work(1, 0, 4)))
    assert result_of(leaf) == result_of(other)
    assert leaf != other


def test_a_process_that_ends_while_its_loop_only_reads_leaves_nothing_open(tmp_path, devices):
    """Snapshots among operators of which no step could tell show the state that the last step committed to."""
    run = tmp_path / "run"

    def build():
        torch.manual_seed(0)
        model = nn.Linear(8, 400)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = build()
    options: dict[str, Any]
    options = {"snapshot_rate": Fraction(1, 2), "chips": 2, "lab": "lab", "started": STARTED, "hours": 1.0}
    recorder = Recorder(model, optimizer, out=run, **options)
    step(recorder, model, optimizer)
    with pytest.raises(CallerError, match="exceeds the work allowed on the state between two training steps"):
        look_on(model)
    model, optimizer = build()
    recorder = Recorder.resume(model, optimizer, out=run)
    for _ in range(4):
        step(recorder, model, optimizer)
    recorder.finish()
    trust = Trust.load([tmp_path / "run.trust.json"], [run])
    verdict = inspect([run], trust, replace(SETTINGS, samples=2), now=NOW, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert all(chip["power_gaps"] for chip in verdict.evidence["chips"])


def look_on(model):
    for _ in range(60):
        model.weight.detach().abs()


def step(recorder, model, optimizer):
    with recorder.step(BATCH):
        optimizer.zero_grad()
        model(BATCH).square().mean().backward()
        optimizer.step()
