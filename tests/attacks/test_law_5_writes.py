"""Law 5, writes beside the updates: a clamp or a copy leaves the declared numbers true, training in disguise does not.

Row C12's guard, attacked: each body here writes weights beside ``optimizer.step()`` so that the declared learning rate
says nothing about how they are trained. Each passes for a declared write where the guard is off.
"""

from __future__ import annotations

import copy
import gc
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional

from firmware_sim.errors import CallerError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.review import review
from inspector.inspection.verdict import Outcome
from monitor.programs.batches import flatten_batch
from monitor.recording.recording import Recording
from monitor.recording.state_watch import Earlier
from monitor.recording.step_programs import StepPrograms
from monitor.transcript import WRITE
from tests.guards import off

SETTINGS = Settings(samples=1, seed="x", devices=("sse41",))
BATCHES = [torch.linspace(-1, 1, 48).view(6, 8) * (1 + number) for number in range(3)]


def model_of():
    torch.manual_seed(0)
    online = nn.Linear(8, 8)
    model = nn.ModuleDict({"online": online, "target": copy.deepcopy(online).requires_grad_(False)})
    model.register_buffer("kept", torch.zeros(8, 8))
    return model


def update(model, optimizer, batch):
    optimizer.zero_grad()
    functional.mse_loss(model["online"](batch), batch).backward()
    optimizer.step()


def _extrapolated(model, optimizer, batch):
    """The update, made a hundred thousand times as large."""
    weight = model["online"].weight
    before = weight.detach().clone()
    update(model, optimizer, batch)
    weight.data.add_(weight.data - before, alpha=1e5)


def _by_way_of_the_target(model, optimizer, batch):
    """The same, made in a weight of which the declaration says nothing, and copied back."""
    weight, target = model["online"].weight, model["target"].weight
    before = weight.detach().clone()
    update(model, optimizer, batch)
    target.data.copy_(weight.data + (weight.data - before) * 1e5)
    weight.data.copy_(target.data)


def _from_the_gradient_of_the_step_before(model, optimizer, batch):
    """A buffer brings the gradient into the next step."""
    weight, kept = model["online"].weight, model.kept
    weight.data.copy_(weight.data * 0.5 + kept * 0.5)
    update(model, optimizer, batch)
    kept.copy_(weight.grad * -1.0)


def _from_the_momentum(model, optimizer, batch):
    update(model, optimizer, batch)
    weight = model["online"].weight
    weight.data.sub_(optimizer.state[weight]["momentum_buffer"], alpha=0.5)


def _target_from_the_gradient(model, optimizer, batch):
    update(model, optimizer, batch)
    model["target"].weight.data.sub_(model["online"].weight.grad, alpha=0.5)


def _decayed(model, optimizer, batch):
    update(model, optimizer, batch)
    model["online"].weight.data.mul_(0.5)


def _swallowed(model, optimizer, batch):
    """Beside so large a number all weights are lost."""
    update(model, optimizer, batch)
    model["online"].weight.data.add_(1e30).sub_(1e30)


def _shifted_against_itself(model, optimizer, batch):
    """Terms that would cancel, were they in the same places."""
    update(model, optimizer, batch)
    weight = model["online"].weight
    weight.data.add_(weight.data, alpha=1e5).sub_(weight.data.roll(1, 0), alpha=1e5)


def _clamped_in_part(model, optimizer, batch):
    """Number by number."""
    update(model, optimizer, batch)
    for row in model["online"].weight.data:
        row.clamp_(0.25, 0.5)


def _clamped_and_cut(model, optimizer, batch):
    """The same in a roundabout way."""
    update(model, optimizer, batch)
    weight = model["online"].weight.data
    for row, bound in zip(weight, (0.1, 0.2, 0.3, 0.4), strict=False):
        row.copy_(weight.clamp(bound, 0.5)[0])


LIES = [
    _extrapolated,
    _by_way_of_the_target,
    _from_the_gradient_of_the_step_before,
    _from_the_momentum,
    _target_from_the_gradient,
    _decayed,
    _swallowed,
    _shifted_against_itself,
    _clamped_in_part,
    _clamped_and_cut,
]


def judged(record_loop, devices, body, *, before=None):
    model = model_of()
    optimizer = torch.optim.SGD(model["online"].parameters(), lr=1e-6, momentum=0.9)
    options = {"chips": 1, "direct_paths": ["buffer/kept"], "before": before and before(model)}
    recorded = record_loop(model, optimizer, BATCHES, body, **options)
    return lambda: inspect([recorded.run], recorded.trust, SETTINGS, now=recorded.now, worker=devices.run)


@pytest.mark.parametrize("lie", LIES)
def test_training_in_disguise_leaves_the_numbers_unbound(record_loop, devices, lie):
    verdict = judged(record_loop, devices, lie)
    found = verdict()
    assert found.outcome is Outcome.INCONCLUSIVE
    assert any("not bound to the arithmetic: dampening, lr" in reason.text for reason in found.reasons)
    if lie in (_extrapolated, _by_way_of_the_target):
        with off("declared writes"):
            assert verdict().outcome is Outcome.ACCEPT


def test_a_lab_whose_recorder_lets_a_write_between_steps_pass_is_not_accepted(record_loop, devices):
    """The recorder refuses it; an altered one does not."""

    def before(model):
        def scale(_, step):
            if step == 3:
                model["online"].weight.data.mul_(1e3)

        return scale

    with mock.patch.object(StepPrograms, "_require_declared"):
        verdict = judged(record_loop, devices, update, before=before)
    found = verdict()
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "aten.mul_.Tensor writes 'weight/online.weight' outside the optimizer's updates" in found.reasons[0].text
    with off("declared writes"):
        assert verdict().outcome is Outcome.ACCEPT


def test_a_write_that_leads_elsewhere_than_its_program_is_found_by_the_replay(record_loop, devices):
    """The lab alters what a copy into the target has left, and commits to that."""
    commit = Recording.commit

    def altered(self, program, execution, *rest):
        if execution.kind == WRITE:
            with torch.no_grad():
                self.loop.state.memory.tensors["weight", "target.weight"].add_(1.0)
        commit(self, program, execution, *rest)

    def before(model):
        return lambda _, step: step == 2 and model["target"].load_state_dict(model["online"].state_dict())

    with (
        mock.patch.object(Recording, "commit", altered),
        mock.patch.object(Recording, "is_repeatable", False),
        mock.patch("monitor.programs.memory_watch.WriteWatch.close"),
    ):
        verdict = judged(record_loop, devices, update, before=before)
    found = verdict()
    assert found.outcome is Outcome.REJECT
    assert any(reason.guard is not None and "step 2" in reason.text for reason in found.reasons)


def restored(model, values):
    """Puts these into the weight before the third batch."""
    return lambda _, step: step == 3 and model["online"].weight.data.copy_(values)


def claims(monkeypatch, find=None, evidence=None):
    """A lab whose recorder says of tensors from elsewhere that an earlier state holds them."""
    if find is not None:
        monkeypatch.setattr(Earlier, "find", lambda self, given: find)
    if evidence is not None:
        told = Earlier.evidence
        monkeypatch.setattr(Earlier, "evidence", lambda *args: {**told(*args), **evidence})


MADE_UP = torch.linspace(-2, 2, 64).view(8, 8)
CLAIM = 1, {"0": "weight/online.weight"}


@pytest.mark.parametrize(
    ("find", "evidence", "says"),
    [
        (CLAIM, None, "recalls tensors that are not those of the state after step 1"),
        (CLAIM, {"recalled:step": torch.tensor([3])}, "recalls tensors, but not from a step before it"),
        (CLAIM, {"recalled:step": torch.tensor([-1])}, "recalls tensors, but not from a step before it"),
        (CLAIM, {"recalled:step": torch.tensor([0.0])}, "recalls tensors, but not from a step before it"),
        (CLAIM, {"recalled:proof": torch.zeros(1, 32, dtype=torch.uint8)}, "without the hashes that replace them"),
    ],
)
def test_weights_from_elsewhere_do_not_pass_for_earlier_ones(record_loop, devices, monkeypatch, find, evidence, says):
    """The recorder names what it finds; an altered one names what it likes."""
    claims(monkeypatch, find, evidence)
    verdict = judged(record_loop, devices, update, before=lambda model: restored(model, MADE_UP))
    found = verdict()
    assert found.outcome is Outcome.REJECT
    assert says in found.reasons[0].text
    with off("recalled tensors"):
        assert verdict().outcome is Outcome.ACCEPT


def test_a_tensor_that_never_was_in_the_state_is_recalled_by_no_name(record_loop, devices, monkeypatch):
    claims(monkeypatch, (1, {"0": "optimizer/online.weight/momentum_buffer"}))
    with pytest.raises(CallerError, match="a write between steps cannot be recorded"):
        judged(record_loop, devices, update, before=lambda model: restored(model, MADE_UP))
    gc.collect()  # the recorder that failed


def test_an_earlier_value_of_a_buffer_that_held_a_gradient_stays_what_it_was(record_loop, devices):
    """The buffer takes the gradient, and is cleaned before its earlier value is taken back into the weight."""
    aside: dict[Any, Any] = {}

    def keep(model, optimizer, batch):
        update(model, optimizer, batch)
        model.kept.copy_(model["online"].weight.grad if not aside else model["online"].weight)

    def before(model):
        def restore(_, step):
            if step == 2:
                aside["kept"] = model.kept.clone()
            if step == 3:
                model["online"].weight.data.copy_(aside["kept"])

        return restore

    with mock.patch.object(StepPrograms, "_require_declared"):
        verdict = judged(record_loop, devices, keep, before=before)
    found = verdict()
    assert found.outcome is Outcome.INCONCLUSIVE
    assert any("writes 'weight/online.weight' outside the optimizer's updates" in each.text for each in found.reasons)


def test_a_batch_cannot_be_named_like_an_earlier_state():
    assert list(flatten_batch({"recalled:weight/online.weight": MADE_UP})) == ["batch.recalled:weight/online.weight"]


def _supplied(write):
    """A weight takes from a tensor that began far away, as nobody's copy."""

    def body(model, optimizer, batch):
        update(model, optimizer, batch)
        with torch.no_grad():
            write(model["online"].weight, model.kept)

    return body


SUPPLIED = [
    lambda weight, kept: weight.lerp_(kept, 0.5),
    lambda weight, kept: weight.copy_(kept),
    lambda weight, kept: weight.copy_(kept.clamp(-1e9, 1e9)),
    lambda weight, kept: weight[:2].copy_(kept[:2]),
    lambda weight, kept: weight.copy_(torch.cat([kept[:2], weight[2:]])),
]


@pytest.mark.parametrize("write", SUPPLIED)
def test_what_began_as_no_weight_is_no_average_of_weights(record_loop, write):
    model = model_of()
    model.kept.fill_(100.0)
    optimizer = torch.optim.SGD(model["online"].parameters(), lr=1e-6)
    recorded = record_loop(model, optimizer, BATCHES, _supplied(write), chips=1)
    found = review(recorded.run, recorded.trust)
    assert found.outcome is Outcome.INCONCLUSIVE
    assert any("writes 'weight/online.weight' outside the optimizer's updates" in each.text for each in found.reasons)
    with off("started as copies"):
        assert review(recorded.run, recorded.trust).outcome is Outcome.ACCEPT


def test_a_number_that_chooses_between_tensors_that_began_as_no_weights_is_refused(record_loop):
    """Eight a step would train whatever lies between so many tensors, at no rate."""
    model, numbers = model_of(), itertools.cycle((0.1, 0.7, 0.3, 0.2))
    model.kept.fill_(100.0)
    model.register_buffer("other", torch.full((8, 8), -100.0))

    def body(model, optimizer, batch):
        update(model, optimizer, batch)
        with torch.no_grad():
            model["target"].weight.lerp_(model.kept, next(numbers)).lerp_(model.other, next(numbers))

    optimizer = torch.optim.SGD(model["online"].parameters(), lr=1e-6)
    with pytest.raises(CallerError, match=r"a number that aten.lerp_.Scalar takes changes from step to step"):
        record_loop(model, optimizer, BATCHES, body, chips=1)
    gc.collect()  # the recorder that failed


def test_frozen_weights_may_have_an_average_whose_share_grows(record_loop):
    """Both began as the same values, between which there is nothing to choose."""
    model, numbers = model_of(), iter((1.0, 0.5, 0.25))
    model["frozen"] = nn.Linear(8, 8).requires_grad_(False)
    model["average"] = copy.deepcopy(nn.ModuleList([model["online"], model["frozen"]])).requires_grad_(False)

    def body(model, optimizer, batch):
        update(model, optimizer, batch)
        share, own = next(numbers), nn.ModuleList([model["online"], model["frozen"]])
        with torch.no_grad():
            for average, weight in zip(model["average"].parameters(), own.parameters(), strict=True):
                average.lerp_(weight, share)

    optimizer = torch.optim.SGD(model["online"].parameters(), lr=1e-6)
    recorded = record_loop(model, optimizer, BATCHES, body, chips=1)
    found = review(recorded.run, recorded.trust)
    assert found.outcome is Outcome.ACCEPT, found.reasons


def test_a_sum_of_other_places_of_one_weight_is_no_average(record_loop):
    """Broadcast, so that the factors of a number and of another one add up to 1."""
    model = model_of()

    def body(model, optimizer, batch):
        update(model, optimizer, batch)
        bias = model["online"].bias.data
        bias.copy_(torch.add(bias.view(8, 1) * 4.5, bias.view(1, 8), alpha=-3.5)[:, 0])

    optimizer = torch.optim.SGD(model["online"].parameters(), lr=1e-6)
    recorded = record_loop(model, optimizer, BATCHES, body, chips=1)
    found = review(recorded.run, recorded.trust)
    assert found.outcome is Outcome.INCONCLUSIVE
    assert any("writes 'weight/online.bias' outside the optimizer's updates" in each.text for each in found.reasons)
