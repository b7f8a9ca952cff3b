"""A loop goes on after a crash exactly as it would have: loader, schedules, random generators, hyper-parameters."""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter, OrderedDict
from datetime import UTC, datetime

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

from firmware_sim.errors import CallerError
from firmware_sim.evidence import canonical
from inspector.inspection.inspection import verify
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from monitor import Recorder
from monitor.lab.simulated_lab import SimulatedLab
from monitor.recording.loop_state import HostState, decode, encode

STEPS, BATCH = 10, 4
STARTED = datetime(2026, 1, 1, tzinfo=UTC)


class Killed(BaseException):
    """Stands for the end of the process: no handler of the product catches it."""


class ShuffledLoader:
    """Three batches an epoch in an order of its own generator, with noise from every global one."""

    def __init__(self) -> None:
        self._samples = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
        self._random = random.Random(2)
        self._order: list[int] = []

    def __iter__(self):
        while True:
            if not self._order:
                self._order = self._random.sample(range(12), 12)
            places, self._order = self._order[:BATCH], self._order[BATCH:]
            yield self._samples[places] + torch.randn(1) * random.random() + np.random.rand()

    def state_dict(self):
        return {"random": self._random.getstate(), "order": tuple(self._order)}

    def load_state_dict(self, state):
        self._random.setstate(state["random"])
        self._order = list(state["order"])


class Forgetful(ShuffledLoader):
    """The twin: it is given its state, and does not take it."""

    def load_state_dict(self, state):
        pass


class Loop:
    def __init__(self, loader=ShuffledLoader) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5, 8], 0.5)
        self.loader = loader()
        self.stateful = {"loader": self.loader, "schedule": self.schedule}

    def start(self, out, **options):
        shape = {"seed": 5, "chips": 2, "checkpoint_every": 4, "lab": "lab", "hours": 1.0, "started": STARTED}
        return Recorder(self.model, self.optimizer, out=out, **{"stateful": self.stateful, **shape, **options})

    def train(self, recorder, until=STEPS):
        batches = iter(self.loader)
        while recorder.steps < until:
            batch = next(batches)
            with recorder.step(batch):
                self.optimizer.zero_grad()
                functional.mse_loss(self.model(batch), batch[:, :2]).backward()
                self.optimizer.step()
                self.schedule.step()


def go_on(out, loader=ShuffledLoader):
    """A new process: other random generators, new objects, the same lines."""
    random.seed("another process")
    np.random.seed(99)
    loop = Loop(loader)
    recorder = Recorder.resume(loop.model, loop.optimizer, out=out, stateful=loop.stateful)
    loop.train(recorder)
    return recorder.finish()


@pytest.fixture
def whole(tmp_path, seeded):
    loop = Loop()
    recorder = loop.start(tmp_path / "whole")
    loop.train(recorder)
    return recorder.finish()


@pytest.fixture
def seeded():
    def seed():
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed()
    yield seed
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture
def killed(tmp_path, seeded, monkeypatch):
    """Makes a run whose process dies at the n-th replacement of a file; the first six make chips and run folder."""
    replace, left, labs, create = os.replace, -1, [], SimulatedLab.__init__

    def counting(*args):
        nonlocal left
        left -= 1
        if left == 0:
            raise Killed
        return replace(*args)

    def remember(self, *args):
        create(self, *args)
        labs.append(self)

    monkeypatch.setattr("monitor.files.os.replace", counting)
    monkeypatch.setattr(SimulatedLab, "__init__", remember)

    def kill(number):
        nonlocal left
        seeded()
        loop, out, left = Loop(), tmp_path / f"killed-{number}", number
        with pytest.raises(Killed):
            loop.train(loop.start(out))
        left = -1
        labs[-1].cut_power()
        return out

    return kill


@pytest.mark.parametrize("number", [8, 13, 18, 25, 34])
def test_a_crash_in_the_middle_of_an_epoch_costs_nothing(killed, whole, number):
    out = killed(number)
    assert go_on(out) == whole
    trust = Trust.load([out.with_name(f"{out.name}.trust.json")])
    verdict = verify(out, trust, now=STARTED)
    assert verdict.outcome is Outcome.ACCEPT, verdict.reasons


def test_without_the_loaders_state_the_run_ends_elsewhere(killed, whole):
    """The twin of exact resume; honest evidence, but of another training."""
    assert go_on(killed(16), Forgetful) != whole


def test_states_that_are_kept_are_not_passed_over(killed):
    out, loop = killed(16), Loop()
    with pytest.raises(CallerError, match=r"resume with stateful=\{'loader': …, 'schedule': …\}"):
        Recorder.resume(loop.model, loop.optimizer, out=out)
    with pytest.raises(CallerError, match=r"has saved states of \['loader', 'schedule'\], but stateful= lists"):
        Recorder.resume(loop.model, loop.optimizer, out=out, stateful={"loader": loop.loader})


def test_a_run_that_keeps_nothing_gives_nothing_back(tmp_path):
    loop = Loop()
    recorder = loop.start(tmp_path / "run", stateful=None)
    loop.train(recorder, until=2)
    recorder._run.lab.cut_power()
    again = Loop()
    with pytest.raises(CallerError, match="kept with step 2"):
        Recorder.resume(again.model, again.optimizer, out=tmp_path / "run", stateful=again.stateful)


def test_torn_states_are_not_read(killed):
    """The step's own file is torn, the other one is of the step before: neither is given back."""
    out, loop = killed(16), Loop()
    for path in (out.with_name(f"{out.name}.lab")).glob("host-state-*.json"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CallerError, match="no state outside the chips' memory was kept"):
        Recorder.resume(loop.model, loop.optimizer, out=out, stateful=loop.stateful)


def test_a_schedule_that_goes_on_between_steps_is_refused(tmp_path):
    """A crash between the two would lose its step."""
    loop = Loop()
    recorder = loop.start(tmp_path / "run")
    loop.train(recorder, until=1)
    loop.schedule.step()  # to its first milestone
    with pytest.raises(CallerError, match=r"call schedule\.step\(\) inside"):
        loop.train(recorder, until=2)


def test_what_has_no_state_or_none_that_json_has_is_refused_by_name(tmp_path):
    loop = Loop()
    with pytest.raises(CallerError, match=r"batches is a list, without state_dict"):
        loop.start(tmp_path / "a", stateful={"batches": []})
    loop.loader.state_dict = lambda: {"workers": [{"file": object()}]}
    with pytest.raises(CallerError, match=r"loader\['workers'\]\[0\]\['file'\] is a object, which JSON cannot hold"):
        loop.start(tmp_path / "b")


SCHEDULES = {
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 3, 6], 0.5),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
    "CyclicLR": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.01, 0.1),
    "ReduceLROnPlateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)], [3]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in")
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_schedules_of_pytorch_go_on(name, tmp_path):
    """Their states hold counters, infinities and schedules of their own."""

    def rates(optimizer, schedule, steps):
        for _ in range(steps):
            optimizer.step()
            schedule.step(*(1.0,) * (name == "ReduceLROnPlateau"))
            yield optimizer.param_groups[0]["lr"]

    def make():
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
        schedule = SCHEDULES[name](optimizer)
        return optimizer, schedule, HostState({"schedule": schedule}, optimizer, tmp_path)

    optimizer, schedule, state = make()
    list(rates(optimizer, schedule, 4))
    state.keep(4)
    expected = list(rates(optimizer, schedule, 8))
    assert len(set(expected)) > 1
    optimizer, schedule, state = make()
    state.give_back(4)
    assert list(rates(optimizer, schedule, 8)) == expected


PLAIN = st.none() | st.booleans() | st.integers(-(2**127), 2**127) | st.floats() | st.binary() | st.text("aé☃")
KEYS = st.integers(-(2**127), 2**127) | st.text("ab", max_size=3)
STATES = st.recursive(
    PLAIN,
    lambda parts: (
        st.lists(parts, max_size=3)
        | st.lists(parts, max_size=3).map(tuple)
        | st.dictionaries(KEYS, parts, max_size=3)
        | st.dictionaries(KEYS, parts, max_size=3).map(OrderedDict)
    ),
    max_leaves=8,
)


def same(one, other):
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@settings(max_examples=150, deadline=None, derandomize=True)
@given(STATES)
def test_a_state_comes_back_with_values_and_types(state):
    text = canonical.encode(encode(state, "state"))
    assert same(decode(json.loads(text)), state)


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor([1.5, math.nan]).bfloat16(), torch.zeros(0, 3), torch.tensor(7), torch.tensor([True, False])],
)
def test_tensors_and_arrays_come_back(tensor):
    again = decode(encode(tensor, "tensor"))
    assert again.dtype == tensor.dtype
    assert again.shape == tensor.shape
    assert torch.equal(again.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    array = np.arange(6, dtype=">i2").reshape(2, 3)
    assert np.array_equal(decode(encode(array, "array")), array)
    assert decode(encode(np.float32(0.1), "number")) == np.float32(0.1)
    assert decode(encode(Counter([2, 2, 5]), "milestones")) == Counter([2, 2, 5])
