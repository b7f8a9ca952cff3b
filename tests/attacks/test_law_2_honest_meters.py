"""Honest labs' meters add up: with self-checks, evaluations, logged norms, a crash in mid-step and resumption."""

from __future__ import annotations

from datetime import timedelta
from fractions import Fraction
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim import RecordKind, parse_log
from inspector.inspection.document import Evidence
from inspector.inspection.inspection import verify
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.inspection.wording import acceptance
from monitor import Recorder
from monitor.lab.simulated_lab import LabConfig
from monitor.presets import initialise, preset
from monitor.presets.task import Task
from monitor.recording.recipes import begin, resume
from tests.conftest import STARTED, Recorded
from tests.leaves import execution_of

pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
HOUR = timedelta(hours=1)
RARE = Fraction(1, 1 << 20)
"""Snapshots a tick: a crash in the middle of one would leave the verdict open."""


class Killed(BaseException):
    """Stands for the end of the process in the middle of a step."""


def chips_of(run):
    """The records of each chip of a finished run."""
    return [parse_log(path.read_bytes()) for path in sorted(run.glob("chips/*/log.bin"))]


def check(recorded, crashes):
    """All chips pass, and each shows what it counted of the step in which it lost its power."""
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    logs = chips_of(recorded.run)
    assert len(logs) == 3
    for records in logs:
        gaps = [record for record in records if record.kind is RecordKind.POWER_GAP]
        assert len(gaps) == crashes
        for gap in gaps:
            last = max(record.work.calls for record in records[: gap.counter])
            assert gap.work.calls > last, "the reserve of the power supply keeps what ran in the step that was lost"
    assert all(chip["metered"]["calls"] for chip in verdict.evidence["chips"])
    told = cast(Evidence, {"replays": [], "runs": [], "lineages": [], "chips_listed": "", **verdict.evidence})
    assert all(chip["ledger"]["kinds"]["cuts"]["calls"] for chip in verdict.evidence["chips"])
    text = acceptance(told, [])
    assert "the chips' meters count slack: on 3 drawn chips of lab together" in text
    assert "parts of steps at power cuts" in text
    assert "nothing else" not in text


@pytest.mark.parametrize("preset", ["digits-cnn", "tiny-gpt", "llama-small"])
def test_presets_that_crash_in_mid_step(tmp_path, preset):
    run = tmp_path / "run"
    task = Task.for_preset(preset, seed=3, steps=3, batch_size=2, numerics="rounded", checkpoint_every=2, shards=3)
    config = LabConfig(lab="lab", seed=3, chips=3, snapshot_rate=RARE, started=STARTED, duration=HOUR)
    begun = begin(task, run, config, device="native")
    step = _steps(begun, task)
    step(1)
    step(2)
    with pytest.raises(Killed):
        step(3, killed=True)
    resume(run)
    check(Recorded(run, Trust.load([run.with_name("run.trust.json")], [run])), crashes=1)


def _steps(begun, task):
    from monitor.presets.training import take_step

    def take(number, *, killed=False):
        batch = begun.data.batch(number)
        with begun.recorder.step(batch) as opened:
            loss = take_step(task, begun.model, begun.optimizer, batch, task.learning_rate_at(number))
            opened.commit(loss=loss)
            if killed:
                raise Killed

    return take


def gpt2():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    batch = torch.arange(16).view(2, 8) % 32
    return transformers.GPT2LMHeadModel(config), batch, lambda model, inputs: model(inputs, labels=inputs).loss


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1)
    batch = torch.linspace(-1, 1, 2 * 4 * 8).view(2, 4, 8)
    return model, batch, lambda model, inputs: functional.mse_loss(model(inputs), inputs)


def a_preset(name):
    """A preset's model in a loop of one's own, on its first samples."""
    known = preset(name)
    model = known.build()
    initialise(model, 3)
    samples = {key: torch.from_numpy(values[:2].copy()) for key, values in known.samples(None).items()}
    return model, samples, known.loss


MODELS = {
    "gpt2": gpt2,
    "encoder": encoder,
    **{name: partial(a_preset, name) for name in ("digits-cnn", "tiny-gpt", "llama-small")},
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_loops_that_check_themselves_log_evaluate_crash_and_go_on(tmp_path, make):
    """The step before the crash is repeated without its checkpoint, and so is what the loop logged before it."""
    run = tmp_path / "run"
    options: dict[str, Any] = {"seed": 3, "chips": 3, "checkpoint_every": 4, "lab": "lab", "snapshot_rate": RARE}
    options |= {"started": STARTED, "hours": 1.0}

    def build():
        torch.manual_seed(1)
        model, batch, loss = make()
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch, loss

    def train(recorder, model, optimizer, batch, loss, killed_at=None):
        for step in range(recorder.steps + 1, 4):
            with recorder.step(batch):
                optimizer.zero_grad()
                value = loss(model, batch)
                if step == killed_at:
                    raise Killed
                value.backward()
                optimizer.step()
            assert sum(float(weight.detach().norm()) for weight in model.parameters()) > 0
            model.eval()
            with recorder.evaluation(batch) as evaluation, torch.no_grad():
                evaluation.commit(loss(model, batch))
            model.train()

    model, optimizer, batch, loss = build()
    recorder = Recorder(model, optimizer, out=run, check_writes="every", **options)
    with pytest.raises(Killed):
        train(recorder, model, optimizer, batch, loss, killed_at=3)
    model, optimizer, batch, loss = build()
    recorder = Recorder.resume(model, optimizer, out=run, check_writes="every")
    assert (recorder.steps, len(recorder.evaluations)) == (2, 2)
    train(recorder, model, optimizer, batch, loss)
    recorder.finish()
    trust = Trust.load([run.with_name("run.trust.json")], [run])
    check(Recorded(run, trust), crashes=1)
    leaves = open_run(run, trust).load_steps()[0]
    assert [execution_of(leaf).kind for leaf in leaves[1:]] == ["step", "write", "evaluation"] * 3
    assert not any(execution_of(leaf).outside.calls for leaf in leaves[1:])
