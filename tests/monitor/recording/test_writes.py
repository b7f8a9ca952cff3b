"""What a loop writes between two steps is recorded as a program of its own, repeated on resume, and accepted."""

from __future__ import annotations

import copy
import io
import warnings
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import update_bn

from firmware_sim.errors import CallerError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect, verify
from inspector.inspection.verdict import Outcome
from monitor import Recorder

SETTINGS = Settings(samples=2, seed="x", devices=("sse41",))
BATCHES = [torch.linspace(-1, 1, 48).view(6, 8) * (1 + number) for number in range(4)]


def twins():
    torch.manual_seed(0)
    online = nn.Linear(8, 8)
    return nn.ModuleDict({"online": online, "target": copy.deepcopy(online).requires_grad_(False)})


def body(model, optimizer, batch):
    optimizer.zero_grad()
    with torch.no_grad():
        wanted = model["target"](batch)
    functional.mse_loss(model["online"](batch), wanted + batch).backward()
    optimizer.step()


def hard(model):
    model["target"].load_state_dict(model["online"].state_dict())


@torch.no_grad()
def soft(model):
    for mine, theirs in zip(model["target"].parameters(), model["online"].parameters(), strict=True):
        mine.data.mul_(0.9).add_(theirs.data, alpha=1 - 0.9)


@torch.no_grad()
def rebound(model):
    for mine, theirs in zip(model["target"].parameters(), model["online"].parameters(), strict=True):
        mine.data = mine.data * 0.9 + theirs.data * 0.1


@torch.no_grad()
def merged(model):
    """A formula of the state, an operator that no program holds, and the way back."""
    model["target"].weight += model["online"].weight @ model["online"].weight * 0.5
    assert torch.linalg.det(model["target"].weight[:2, :2]).shape == ()
    model["target"].weight -= model["online"].weight @ model["online"].weight * 0.5


@torch.no_grad()
def clamped(model):
    for weight in model["online"].parameters():
        weight.clamp_(-0.3, 0.3)


@pytest.mark.parametrize("write", [hard, soft, rebound, merged, clamped])
def test_a_write_between_steps_is_accepted_and_listed(record_loop, devices, write):
    """Snapshots fall into the writes, too; the numbers of the updates stay bound."""
    model = twins()
    optimizer = torch.optim.SGD(model["online"].parameters(), lr=0.1, momentum=0.9)
    options = {"snapshot_rate": Fraction(9, 10), "chips": 2}
    recorded = record_loop(model, optimizer, BATCHES, body, before=lambda _, step: step > 1 and write(model), **options)
    verdict = inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    execution = verdict.evidence["runs"][0]["execution"]
    assert execution["writes"] >= 3
    assert not execution["not_bound"]
    changed = "weight/online.weight" if write is clamped else "weight/target.weight"
    assert changed in execution["declared_writes"]
    assert "lie between steps" in verdict.reasons[0].text
    assert "written outside the updates, from the state alone" in verdict.reasons[0].text


def test_best_weights_come_back_from_a_copy_that_is_kept_as_state(record_loop, devices):
    """The remedy that the refusal of values from elsewhere names."""
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    best = copy.deepcopy(model)

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        functional.mse_loss(model(batch), batch).backward()
        optimizer.step()

    def keep(_, step):
        if step == 2:
            best.load_state_dict(model.state_dict())
        if step == 4:
            model.load_state_dict(best.state_dict())

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    recorded = record_loop(model, optimizer, BATCHES, step, before=keep, state={"best": best})
    verdict = inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


def _copied(model):
    return copy.deepcopy(model.state_dict())


def _filed(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(("aside", "taken"), [(_copied, 2), (_filed, 1)])
def test_weights_put_aside_come_back_and_are_named_by_their_step(record_loop, devices, aside, taken):
    """Zeros of a bias and a normalisation's count of batches come with them; another tensor beside them is a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.register_buffer("shift", torch.zeros(8))
    nn.init.zeros_(model.get_parameter("0.bias"))
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), {}

    def learn(model, optimizer, batch):
        optimizer.zero_grad()
        functional.mse_loss(model(batch), batch).backward()
        optimizer.step()

    def before(_, step):
        if step == taken:
            kept.update(aside(model))
        if step == 4:
            model.load_state_dict(kept)

    options = {"before": before, "chips": 2, "maximum_slack": Fraction(1, 4)}
    recorded = record_loop(model, optimizer, BATCHES, learn, **options)
    verdict = inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=devices.run)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    execution = verdict.evidence["runs"][0]["execution"]
    assert (execution["writes"], execution["not_bound"]) == (1, {})


def test_values_from_elsewhere_are_refused_with_the_way_that_is_accepted(record_loop):
    model = twins()
    optimizer = torch.optim.SGD(model["online"].parameters(), lr=0.1)
    best = {name: 2 * each for name, each in copy.deepcopy(model.state_dict()).items()}
    with pytest.raises(CallerError, match=r"a write between steps cannot be recorded: .*; copy or average what"):
        record_loop(model, optimizer, BATCHES, body, before=lambda _, step: step > 2 and model.load_state_dict(best))


@pytest.mark.filterwarnings("ignore:Casting complex")
def test_a_write_may_take_the_real_part_of_one_complex_number(record_loop):
    model = twins()
    model.register_buffer("codes", torch.zeros(4))
    optimizer = torch.optim.SGD(model["online"].parameters(), lr=0.1)

    def write(*_):
        model.codes.copy_(torch.full((4,), 2.0 + 1.0j))

    recorded = record_loop(model, optimizer, BATCHES, body, before=write)
    verdict = verify(recorded.run, recorded.trust, now=recorded.now)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons
    assert model.codes.tolist() == [2.0] * 4


def test_a_buffer_that_a_write_fills_from_elsewhere_is_warned_of_as_in_a_step(record_loop):
    def recorded(**options):
        model = twins()
        model.register_buffer("codes", torch.zeros(64))
        optimizer = torch.optim.SGD(model["online"].parameters(), lr=0.1)

        def write(_, step):
            if step == 2:
                model.codes.copy_(torch.linspace(0, 1, 64))

        return record_loop(model, optimizer, BATCHES, body, before=write, **options)

    said = r"test_writes\.py:\d+: batch:0 reaches buffer/codes by .*direct_paths=\['buffer/codes'\]"
    with pytest.warns(UserWarning, match=said):
        recorded()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        agreed = recorded(direct_paths=["buffer/codes"], name="agreed")
    assert verify(agreed.run, agreed.trust, now=agreed.now).outcome is Outcome.ACCEPT


def test_update_bn_reads_its_batches_as_a_write_does(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run")
    with recorder.step(BATCHES[0]):
        model(BATCHES[0]).square().mean().backward()
        optimizer.step()
    update_bn(BATCHES, model)
    twin = copy.deepcopy(model)
    recorder.finish()
    run = recorder._run.writer
    assert recorder.steps == 1
    assert run.steps == 2
    update_bn(BATCHES, twin)
    for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5)


def test_a_write_without_operators_beside_one_with_them_is_named(record_loop):
    model = twins()
    optimizer = torch.optim.SGD(model["online"].parameters(), lr=0.1)

    def write(_, step):
        if step == 3:
            hard(model)
            model["online"].bias.detach().numpy()[0] = 7

    with pytest.raises(
        CallerError, match=r"weight/online\.bias was written in step 3 by something that is no recorded"
    ):
        record_loop(model, optimizer, BATCHES, body, before=write)


class Killed(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("at", [2, 3])
def test_a_resumed_run_has_the_writes_of_one_that_went_on(tmp_path, at):
    def train(recorder, model, optimizer, stop=None):
        for number in range(recorder.steps, len(BATCHES)):
            if number:
                soft(model)
            with recorder.step(BATCHES[number]):
                body(model, optimizer, BATCHES[number])
                if number == stop:
                    raise Killed
        return recorder.finish()

    def start():
        model = twins()
        return model, torch.optim.SGD(model["online"].parameters(), lr=0.1, momentum=0.9)

    options: dict[str, Any] = {"seed": 1, "chips": 2, "checkpoint_every": 2}
    model, optimizer = start()
    whole = train(Recorder(model, optimizer, out=tmp_path / "whole", **options), model, optimizer)
    model, optimizer = start()
    with pytest.raises(Killed):
        train(Recorder(model, optimizer, out=tmp_path / "broken", **options), model, optimizer, at)
    model, optimizer = start()
    recorder = Recorder.resume(model, optimizer, out=tmp_path / "broken")
    assert recorder.steps == at
    leaf = recorder._run.writer.steps
    assert leaf == 2 * at  # the write before the step that was broken off is there
    with recorder.step(BATCHES[at]):
        body(model, optimizer, BATCHES[at])
    assert train(recorder, model, optimizer) == whole


def test_a_dry_run_sees_writes_as_a_recorder_does(tmp_path):
    model = twins()
    optimizer = torch.optim.SGD(model["online"].parameters(), lr=0.1)
    recorder = Recorder(model, optimizer, out=tmp_path / "run", dry_run=True)
    for batch in BATCHES[:2]:
        with recorder.step(batch):
            body(model, optimizer, batch)
        hard(model)
    with recorder.step(BATCHES[2]):
        body(model, optimizer, BATCHES[2])
    assert not recorder.refusals
    with torch.no_grad():
        model["online"].weight.mul_(3.0)  # here
    with pytest.raises(CallerError, match="a write between steps cannot be recorded"):
        recorder.finish()
    line = recorder.refusals[0].line
    assert line is not None
    assert line.code.endswith("# here")
    assert not (tmp_path / "run").exists()
