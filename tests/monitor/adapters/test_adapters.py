"""Released libraries train as ever; what they train is recorded, inspected, and goes on after a kill."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from firmware_sim.errors import CallerError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor.adapters.rates import schedule_of
from monitor.transcript import EVALUATION

if not all(map(find_spec, ("accelerate", "lightning"))):  # an import takes seconds, which each process would spend
    pytest.skip("an optional package is not installed", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = ("trainer", "lightning", "accelerate")
NARROW = ("trainer-bf16", "lightning-fp16", "accelerate-fp16")
DIES_AFTER = 4
ROOT = Path(__file__).parents[3]


def judged(out, devices):
    trust = Trust.load([out.with_name(f"{out.name}.trust.json")], [out])
    settings = Settings(samples=2, seed="x", devices=("sse41", "mkl-compatible"))
    return inspect([out], trust, settings, now=datetime.now(UTC), worker=devices.run)


def leaves(out):
    trust = Trust.load([out.with_name(f"{out.name}.trust.json")], [out])
    return open_run(out, trust).load_steps()[0]


def is_evaluation(leaf):
    return leaf.execution is not None and leaf.execution.kind == EVALUATION


def states(out):
    """Digest of the state after each step that trains."""
    return [str(leaf.state.root) for leaf in leaves(out) if not is_evaluation(leaf)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def killed(folder):
    """Runs whose processes were killed."""
    lives = [*((kind, DIES_AFTER) for kind in KINDS), *((kind, 2) for kind in NARROW)]
    words = [str(word) for kind, last in lives for word in (kind, folder / f"{kind}-killed", last)]
    assert subprocess.run([sys.executable, "-m", "tests.monitor.adapters.loops", *words], cwd=ROOT).returncode == 0


@pytest.fixture(scope="module")
def whole(folder):
    """What each loop returns that runs to its end."""
    from tests.monitor.adapters.loops import LOOPS

    return {kind: LOOPS[kind](folder / kind, lambda step: None) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_a_recorded_loop_is_accepted_on_devices_that_differ(folder, whole, devices, kind):
    verdict = judged(folder / kind, devices)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


@pytest.mark.parametrize("kind", KINDS)
def test_after_kill_9_a_loop_ends_where_it_would_have(folder, whole, killed, devices, kind):
    from tests.monitor.adapters.loops import LOOPS

    LOOPS[kind](folder / f"{kind}-killed", lambda step: None, resume=True)
    assert states(folder / f"{kind}-killed") == states(folder / kind)
    verdict = judged(folder / f"{kind}-killed", devices)
    cut = verdict.outcome is Outcome.INCONCLUSIVE and "in the middle of a snapshot" in str(verdict.reasons)
    assert verdict.outcome is Outcome.ACCEPT or cut, verdict.reasons


@pytest.mark.parametrize("kind", NARROW)
def test_mixed_precision_by_a_librarys_flag_is_accepted_and_goes_on_after_kill_9(folder, killed, devices, kind):
    from tests.monitor.adapters.loops import LOOPS

    LOOPS[kind](folder / kind, lambda step: None)
    LOOPS[kind](folder / f"{kind}-killed", lambda step: None, resume=True)
    assert states(folder / f"{kind}-killed") == states(folder / kind)
    verdict = judged(folder / kind, devices)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


def test_the_trainer_counts_and_logs_what_it_would_without_a_recorder(folder, whole):
    from tests.monitor.adapters.loops import trainer

    plain = trainer(folder / "plain", lambda step: None, recorded=False)
    recorded = whole["trainer"]
    mine, theirs = recorded.state.log_history[-1], plain.state.log_history[-1]
    assert mine["step"] == theirs["step"] == recorded.state.global_step == 9
    assert mine["train_loss"] == pytest.approx(theirs["train_loss"], rel=0.05)  # dropout's masks are others
    assert recorded.get_batch_samples.__func__ is type(recorded).get_batch_samples
    assert [group["lr"] for group in recorded.optimizer.param_groups] == [0.0, 0.0]


@pytest.mark.parametrize(("kind", "count"), [("trainer", 3 * 2), ("lightning", 2 * 6), ("accelerate", 0)])
def test_what_a_library_evaluates_is_recorded(folder, whole, kind, count):
    recorded = leaves(folder / kind)
    assert sum(map(is_evaluation, recorded)) == count
    assert all(leaf.loss for leaf in recorded[1:] if kind == "trainer")


def test_batches_that_the_trainer_accumulates_are_one_step(folder, devices):
    from tests.monitor.adapters.loops import trainer

    out = folder / "accumulated"
    made = trainer(out, lambda step: None, gradient_accumulation_steps=2, num_train_epochs=1, logging_steps=1)
    assert len(states(out)) == made.state.global_step + 1 == 3
    assert all("grad_norm" in entry for entry in made.state.log_history[:2])
    assert judged(out, devices).outcome is Outcome.ACCEPT


def test_lightning_logs_what_the_step_logged(whole):
    metrics = whole["lightning"].callback_metrics
    assert {"loss", "loss_step", "loss_epoch", "validation"} <= set(metrics)
    assert all(torch.isfinite(value) for value in metrics.values())


def test_what_cannot_be_recorded_is_refused_by_name(folder):
    from tests.monitor.adapters.loops import fit, trainer

    with pytest.raises(CallerError, match="a trainer with neftune_noise_alpha cannot be recorded"):
        trainer(folder / "noise", lambda step: None, neftune_noise_alpha=5.0)
    with pytest.raises(CallerError, match="accumulate_grad_batches cannot be recorded"):
        fit(folder / "many", lambda step: None, accumulate_grad_batches=2)
    assert not (folder / "many").exists()


def fading(last):
    return lambda step: last / (1 + step)


def known(scheduler, steps):
    found = schedule_of(scheduler, steps)
    assert found is not None
    return found


def test_only_one_list_of_factors_is_a_schedule():
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [weight]} for weight in weights], lr=0.1)
    same, other = (
        torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, fading(last)]) for last in (1.0, 2.0)
    )
    assert known(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step), 3).factor(3) == 0.25
    assert schedule_of(same, 3) is None
    assert known(same, 1).factor(1) == 1.0
    assert known(other, 1).kind == "constant"
    assert known(torch.optim.lr_scheduler.StepLR(optimizer, 1), 3).kind == "step"
    assert schedule_of(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), 3) is None
