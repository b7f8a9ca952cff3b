"""What an optimizer makes of its state lies in chip memory from the call on that makes it, as in a replay."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from firmware_sim import Meter
from firmware_sim.errors import CallerError
from monitor.recording import first_state
from monitor.recording.first_state import FirstState
from monitor.replay.steps import ProgramSteps, execution_of, zeros
from monitor.transcript import RunFolder

FIRST, STEPS = 3, 4
"""The step with the first update, and all of them."""


class Late(torch.optim.Optimizer):
    """Writes what it made before it keeps it, and keeps a view of another tensor."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    mean = torch.zeros_like(parameter)
                    mean.add_(parameter.grad)
                    both = torch.ones((2, *parameter.shape))
                    state["one"] = both[0]
                    state["mean"] = mean.mul_(0.5)
                state["one"].mul_(0.9)
                parameter.sub_(state["mean"] * state["one"], alpha=group["lr"])


class Replacing(Late):
    """Holds other tensors after each step, one of which nothing reads."""

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["last"] = parameter.grad.clone()
                state["mean"] = state["mean"] * 0.9 + parameter.grad if "mean" in state else parameter.grad * 0.1
                parameter.sub_(state["mean"], alpha=group["lr"])


class Moody(Late):
    """Makes its state in another order when it is asked for the second time."""

    tried = 0

    @torch.no_grad()
    def step(self, closure=None):
        Moody.tried += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    if Moody.tried > 2:
                        parameter * 2
                    state["mean"] = parameter.grad * 2
                parameter.sub_(state["mean"], alpha=group["lr"])


OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, foreach=False),
    "adam of lists": partial(torch.optim.Adam, foreach=True, amsgrad=True),
    "momentum": partial(torch.optim.SGD, momentum=0.9, foreach=False),
    "momentum of lists": partial(torch.optim.SGD, momentum=0.9, foreach=True),
    "nadam": partial(torch.optim.NAdam, foreach=False),
    "asgd": partial(torch.optim.ASGD, foreach=False),
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.5, centered=True),
    "adadelta": torch.optim.Adadelta,
    "late": Late,
    "replacing": Replacing,
}
BORN = {"adam": 3, "momentum": 1, "rmsprop": 4, "late": 1, "replacing": 2}
"""How many tensors of each parameter are made by calls of their own."""


@pytest.fixture
def record(record_loop, monkeypatch):
    """Record a loop whose first update comes in step ``FIRST``.

    Returns the run and, for each step, the digests of the memory behind each operator that the meter counts.
    """
    memories: dict[Any, Any]
    memories, found, charge = {}, [], Meter.charge

    def watched(meter, work):
        charge(meter, work)
        if meter in memories and work.calls:
            found.append(str(memories[meter].digest().root))

    def taken():
        each = list(found)
        found.clear()
        return each

    def watch(memory):
        memories[memory.meter] = memory
        return taken

    def make(kind, *, closure=False, first=FIRST):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        recorders: list[Any]
        optimizer, seen, recorders = kind(model.parameters(), lr=0.01), [], []

        def body(model, optimizer, batch):
            def backward():
                optimizer.zero_grad()
                loss = model(batch).square().sum()
                loss.backward()
                return loss

            if recorders[0].steps + 1 >= first and closure:
                optimizer.step(backward)
                return
            backward()
            if recorders[0].steps + 1 >= first:
                optimizer.step()

        def prepare(recorder):
            recorders.append(recorder)
            watch(recorder._run.loop.state.memory)

        batches = [torch.randn(2, 4) for _ in range(STEPS)]
        options = {"prepare": prepare, "before": lambda *_: seen.append(taken()), "numerics": "exact"}
        recorded = record_loop(
            model, optimizer, batches, body, free=tuple(optimizer.defaults), free_slots=True, chips=1, **options
        )
        return RunFolder(recorded.run, recorded.trust.labs["lab"]), [*seen[1:], taken()]

    monkeypatch.setattr(Meter, "charge", watched)
    vars(make)["watch"] = watch
    return make


def replayed(run, watch):
    """The same of a replay."""
    steps, found = ProgramSteps(run, 0, device=torch.device("cpu")), []
    taken = watch(steps.training.memory)
    taken()
    for _ in range(STEPS):
        steps.take()
        found.append(taken())
    return found


@pytest.mark.sampled("kind")
@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_replay_passes_through_what_memory_held_behind_each_operator(record, kind, closure):
    run, seen = record(OPTIMIZERS[kind], closure=closure)
    program = run.program(execution_of(run.leaf(FIRST)).program)
    assert len(program.births) == 4 * BORN.get(kind, len(program.births) // 4) > 0
    assert seen == replayed(run, record.watch)
    left = run.program(execution_of(run.leaf(FIRST - 1)).program).absent
    assert set(program.births.values()) <= left
    assert set(program.first_held(left)) - set(program.first_writes) == set(program.births.values())
    assert program.first_held(()) == program.first_writes


def test_a_recorder_that_waits_for_the_end_of_the_step_differs(record, monkeypatch):
    """Twin: state comes into memory as the step ends, and nobody looks whether that is what its program says."""
    monkeypatch.setattr(FirstState, "foresee", lambda *_: None)
    monkeypatch.setattr(FirstState, "require", lambda *_: None)
    run, seen = record(OPTIMIZERS["adam"])
    again = replayed(run, record.watch)
    assert [one == other for one, other in zip(seen, again, strict=True)] == [True, True, False, True]
    assert seen[FIRST - 1][-1] != again[FIRST - 1][-1]


def test_state_that_is_made_elsewhere_than_in_the_trial_is_refused(record):
    Moody.tried = 0
    with pytest.raises(CallerError, match="in a different call when its update was tried out"):
        record(Moody)


def test_in_a_first_step_it_comes_into_memory_just_so(record):
    """The state that a run begins with is zeros where there is none."""
    run, seen = record(OPTIMIZERS["adam"], first=1)
    assert set(run.program(execution_of(run.leaf(1)).program).births.values()) <= zeros(run.checkpoint(0))
    assert seen == replayed(run, record.watch)


@pytest.mark.parametrize(("thaws", "tried"), [(None, 1), (2, 2)])
def test_a_frozen_part_of_an_optimizer_is_tried_when_it_first_learns_and_not_before(
    record_loop, monkeypatch, thaws, tried
):
    """Its state is absent all the time, and a trial in each step would cost a copy of the optimizer each."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    done: list[Any]
    trials, done = [], []

    def trial(*given, true=first_state._trial):
        trials.append(given)
        return true(*given)

    def body(model, optimizer, batch):
        model[0].requires_grad_(len(done) == thaws or model[0].weight.requires_grad)
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
        done.append(batch)

    monkeypatch.setattr(first_state, "_trial", trial)
    record_loop(model, optimizer, [torch.randn(2, 4) for _ in range(STEPS)], body, numerics="exact", chips=1)
    assert len(done) == STEPS
    assert len(trials) == tried
