"""A model, optimizer, state or batch that is refused has a way that is accepted: the one that its message gives."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from monitor import initialised, padded
from tests.monitor.recording.remedies import (
    NUMBERS,
    Coded,
    Own,
    follow,
    learn,
    linear,
    loop,
    loss_of,
    pairs,
    plain,
    row,
    with_loss,
)


class Moody(torch.optim.Optimizer):
    """Makes its state in another order from its third step on, trials included."""

    asked = 0

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        Moody.asked = 0

    @torch.no_grad()
    def step(self, closure=None):
        Moody.asked += 1
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if not state:
                if Moody.asked > 2:
                    weight * 2
                state["mean"] = weight.grad * 2
            weight.sub_(state["mean"], alpha=0.1)


class Fastidious(Own):
    """Takes no gradient of zeros, or does."""

    def __init__(self, params, bears):
        super().__init__(params)
        self.bears = bears

    def step(self, closure=None):
        if not self.bears and not any(weight.grad.any() for weight in self.param_groups[0]["params"]):
            raise ValueError("nothing to learn")
        return super().step(closure)


def warmed(model, optimizer):
    learn(optimizer, model(torch.ones(2, 6)).square().mean())


def start(change):
    """A loop whose model is initialised by a program, ``change`` of its buffer included."""

    def build():
        model = Coded()
        model.codes = change()
        return model

    return loop(model=lambda: initialised(build, seed=1))


class Metric(nn.Module):
    """Counts in a plain number, or in a buffer."""

    def __init__(self, registers):
        super().__init__()
        if registers:
            self.register_buffer("seen", torch.zeros(()))
        else:
            self.seen = 0

    def forward(self, loss):
        self.seen += 1


def measured(registers, listed=True):
    metric = Metric(registers)

    def body(model, optimizer, batch, step):
        loss = loss_of(model, batch)
        learn(optimizer, loss)
        metric(loss)

    state: dict[str, Any] = {"state": {"metric": metric}} if listed else {}
    return loop(body, **state)


def turned(lazily):
    """A loop with a complex factor, as a view that stands for the conjugate of what memory holds or as memory."""

    def model():
        net = nn.ModuleDict({"out": linear()})
        factor = torch.ones(3, dtype=torch.cfloat).conj()
        net.register_parameter("factor", nn.Parameter(factor if lazily else factor.resolve_conj()))
        return net

    def change(m, x, y):
        return functional.cross_entropy((m["out"](x) * m.factor).abs(), y)

    return with_loss(change, model=model)


def held_by(how):
    """A loop with a temperature beside its model, which the optimizer updates too."""

    def train(make):
        net, heat = linear(), nn.Parameter(torch.ones(()))
        optimizer = torch.optim.SGD([*net.parameters(), heat], lr=0.1)
        whole = nn.ModuleList([net, nn.ParameterList([heat])]) if how == "one module" else net
        recorder = make(whole, optimizer)
        for x, y in pairs():
            with recorder.step((x, y)):
                learn(optimizer, functional.cross_entropy(net(x) * heat, y))
        return whole

    return train


def of_type(x):
    """A loop whose batch has an entry that nothing reads, of any type."""
    return loop(batches=lambda: [(*batch, x()) for batch in pairs()])


def shared(copies):
    """A batch with a tensor and its bits."""

    def batches():
        return [(x, y, (x.clone() if copies else x).view(torch.int32)) for x, y in pairs()]

    return loop(batches=batches)


def bounded(bounds):
    return lambda model: torch.optim.AdamW([{"params": model.parameters(), "bounds": bounds}])


SPARSE = torch.eye(3).to_sparse()


def called(model):
    model(torch.ones(2, 6))
    return model


def filled(model):
    model.reset_parameters()
    return model


OBJECTS = {
    "first state": row(
        "call optimizer.step() once before recording begins",
        loop(optimizer=lambda m: Moody(m.parameters()), free=("lr",)),
        loop(optimizer=lambda m: Moody(m.parameters()), free=("lr",), prepare=warmed),
    ),
    "a trial step": row(
        "step() has to work on a copy where all gradients are dense zeros",
        loop(optimizer=lambda m: Fastidious(m.parameters(), False), free=NUMBERS),
        loop(optimizer=lambda m: Fastidious(m.parameters(), True), free=NUMBERS),
    ),
    "numbers in a tensor": row(
        "the optimizer's {} is a tensor of {} numbers; give them as plain numbers",
        loop(optimizer=bounded(torch.ones(2)), free=("bounds",)),
        loop(optimizer=bounded((1.0, 1.0)), free=("bounds",)),
    ),
    "a sparse optimizer": row(
        "write torch.optim.Adam instead, and nn.Embedding(…, sparse=False)",
        loop(optimizer=lambda m: torch.optim.SparseAdam(m.parameters())),
        loop(optimizer=lambda m: torch.optim.Adam(m.parameters())),
    ),
    "a setting of another type": row(
        "the optimizer's {} is {}; give it as a plain number",
        loop(optimizer=lambda m: torch.optim.AdamW(m.parameters(), weight_decay=Fraction(0))),  # type: ignore[arg-type]
        loop(optimizer=lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0)),
    ),
    "an infinite setting": row(
        "give it as a finite number",
        loop(optimizer=lambda m: torch.optim.AdamW(m.parameters(), eps=float("inf"))),
        loop(optimizer=lambda m: torch.optim.AdamW(m.parameters(), eps=1e30)),
    ),
    "a parameter of no module": row(
        "give the recorder one module that holds all, such as nn.ModuleList([model, nn.ParameterList(others)])",
        held_by(""),
        held_by("one module"),
    ),
    "conjugated parameter": row("let the state hold its resolve_conj()", turned(True), turned(False)),
    "conjugated batch": row(
        "batch tensor {} is a lazy view of a conjugate; give its resolve_conj()",
        of_type(lambda: torch.ones(2, dtype=torch.complex64).conj()),
        of_type(lambda: torch.ones(2, dtype=torch.complex64).conj().resolve_conj()),
    ),
    "direct paths that name nothing": row(
        "list tensors of the state such as {}, or patterns such as 'buffer/*.running_mean'",
        loop(model=Coded, direct_paths=["codes"]),
        loop(model=Coded, direct_paths=["buffer/codes"]),
        loop(model=Coded, direct_paths=["buffer/*"]),
    ),
    "a table in an initialisation": row(
        "compute it with PyTorch's operators",
        start(lambda: torch.tensor([[0.0, 1, 2, 3, 4, 5]] * 4)),
        start(lambda: torch.arange(6).float().expand(4, 6).clone()),
    ),
    "state that is none": row(
        "give a list of objects, or a dict of them by name",
        loop(state=torch.zeros(2)),
        loop(state=[torch.zeros(2)]),
        loop(state={"each": torch.zeros(2)}),
    ),
    "state without tensors": row(
        "take it off the list state=[…], or register what a module keeps in plain attributes as its buffers",
        measured(False),
        measured(False, listed=False),
        measured(True),
    ),
    "no shapes": row(
        "call the model on a batch before the recorder is made",
        loop(model=lambda: nn.LazyLinear(3)),
        loop(model=lambda: called(nn.LazyLinear(3))),
    ),
    "model without values": row(
        "a recorded model has tensors with values",
        loop(model=lambda: nn.Linear(6, 3, device="meta")),
        loop(model=lambda: filled(nn.Linear(6, 3, device="meta").to_empty(device="cpu"))),
    ),
    "script module": row(
        "record the model without torch.jit", loop(model=lambda: torch.jit.trace(linear(), torch.ones(1, 6))), loop()
    ),
    "share as a number": row(
        "maximum_slack must be a Fraction in 0 … 1, such as Fraction(1, 20), not {}",
        loop(maximum_slack=0.05),
        loop(maximum_slack=Fraction(1, 20)),
    ),
    "nested batch": row(
        "pad its parts to one length (monitor.padded)",
        of_type(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)),
        of_type(lambda: torch.stack([padded(torch.ones(size), (3,)) for size in (2, 3)])),
    ),
    "sparse batch": row(
        "give its to_dense(), or its indices and values",
        of_type(lambda: SPARSE),
        of_type(lambda: SPARSE.to_dense()),
        of_type(lambda: (SPARSE.indices(), SPARSE.values())),
    ),
    "batch without values": row(
        "give one that has", of_type(lambda: torch.ones(2, device="meta")), of_type(lambda: torch.ones(2))
    ),
    "type of a batch": row(
        "batch tensor {} is {}, which is not recorded; give it in another type",
        of_type(lambda: torch.ones(2, dtype=torch.complex128)),
        of_type(lambda: torch.ones(2, dtype=torch.complex64)),
    ),
    "two names alike": row(
        "give one of them another name",
        loop(batches=lambda: [{0: x, 1: y, "a": {"b": x}, "a.b": y} for x, y in pairs()]),
        loop(batches=lambda: [{0: x, 1: y, "a": {"b": x}, "c": y} for x, y in pairs()]),
    ),
    "a batch of text": row(
        "give a tensor, tuple or dict",
        loop(lambda m, o, b, s: plain(m, o, pairs(1)[0], s), batches=lambda: ["text"] * 2),
        loop(),
    ),
    "two types in one memory": row("copy one of them", shared(False), shared(True)),
    "a column of a table": row(
        "make it contiguous",
        of_type(lambda: torch.ones(40, 800)[:, 0]),
        of_type(lambda: torch.ones(40, 800)[:, 0].contiguous()),
    ),
    "an array backwards": row(
        "give a copy of it", of_type(lambda: np.ones(4)[::-1]), of_type(lambda: np.ones(4)[::-1].copy())
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Complex modules", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("name", OBJECTS)
def test_what_a_recorder_refuses_to_take_has_a_way_that_is_accepted(tmp_path, devices, name):
    follow(OBJECTS[name], tmp_path, devices)
