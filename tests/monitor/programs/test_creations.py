"""Which calls make a tensor of an optimizer's new state, so that it may lie in its region from there on."""

from __future__ import annotations

import pytest
import torch

from monitor import numerics
from monitor.programs.batches import batch_layout
from monitor.programs.capture import Capture
from monitor.programs.keys import RecordedKeys
from monitor.programs.memory_watch import WriteWatch

NAME = "optimizer/w/m"
BEFORE = torch.ones(2, 3)
"""Made by no call."""


def made_by(body, *, updates=True):
    """What ``body`` makes of the state ``w``, ``m`` and ``b``, with the operators at which it does."""
    state = {"weight/w": torch.ones(2, 3), NAME: torch.zeros(2, 3), "buffer/b": torch.ones(2, 3)}
    batch = {"x": torch.ones(2, 3)}
    keys = RecordedKeys(1, 1)
    capture = Capture(keys, WriteWatch(1))
    capture.declare_inputs(state, batch)
    with numerics.recording("native", observer=capture, keys=keys), torch.no_grad():
        found = body(state["weight/w"], state[NAME], batch["x"])
    made = {"m": found} if isinstance(found, torch.Tensor) else found
    now = {**state, NAME: made["m"], "buffer/b": made.get("b", state["buffer/b"])}
    program = capture.program(now, batch_layout(batch), [(0, capture.taken if updates else 0)])
    operators = {program.calls[number]["operator"].split(".")[1]: name for number, name in program.births.items()}
    return operators


def zeros(w, m, x):
    return torch.zeros_like(w).add_(x)


def read_before(w, m, x):
    return w.add_(m) * 2


def literal(w, m, x):
    return torch.tensor([[1.0, 2.0, 3.0]] * 2).add_(x)


def made_before(w, m, x):
    return BEFORE.add_(x)


def seen_through_a_view(w, m, x):
    return (x * 2).detach()


@pytest.mark.parametrize(
    ("body", "operator"),
    [
        (zeros, "zeros_like"),
        (read_before, "mul"),
        (literal, "lift_fresh"),
        (made_before, "add_"),
        (seen_through_a_view, "mul"),
    ],
)
def test_a_call_that_makes_all_of_it(body, operator):
    assert made_by(body) == {operator: NAME}
    assert made_by(body, updates=False) == {}, "outside of the optimizer's updates"


def in_place(w, m, x):
    return m.add_(x)


def literal_that_nothing_writes(w, m, x):
    return torch.tensor([[1.0, 2.0, 3.0]] * 2)


def one_that_another_call_takes_first(w, m, x):
    w.mul_(BEFORE)
    return BEFORE.add_(x)


def part_of_more(w, m, x):
    return torch.ones((2, 2, 3))[0]


def turned(w, m, x):
    return (x.reshape(3, 2) * 2).t()


def read_afterwards(w, m, x):
    made = x * 2
    w.add_(m)
    return made


def old_one_is_kept(w, m, x):
    return {"m": x * 2, "b": m}


def held_twice(w, m, x):
    made = x * 2
    return {"m": made, "b": made}


def one_of_several(w, m, x):
    return torch.aminmax(x.expand(3, 2, 3), dim=0)[0]


@pytest.mark.parametrize(
    "body",
    [
        in_place,
        literal_that_nothing_writes,
        one_that_another_call_takes_first,
        part_of_more,
        turned,
        read_afterwards,
        old_one_is_kept,
        held_twice,
        one_of_several,
    ],
)
def test_what_comes_into_its_region_as_the_step_ends(body):
    assert made_by(body) == {}
