"""What a loop is told, and the loop changed by what it is told; with the parts of which loops are made."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from firmware_sim.errors import CallerError
from inspector.inspection.verdict import Outcome
from tests.monitor.recording.whole_loops import Loop, record

NUMBERS = ("dampening", "lr", "maximize", "momentum", "nesterov", "weight_decay")
"""Those of SGD that decide its arithmetic."""


@dataclass(frozen=True)
class Row:
    """One remedy.

    Attributes:
        says: words of the remedy as they stand in the source; what a message puts in is {}.
        told: the loop that is told so.
        ways: the loop changed by what it is told, one for each way.
    """

    says: str
    told: Loop
    ways: tuple[Loop, ...]


def row(says: str, told: Loop, *ways: Loop) -> Row:
    return Row(says, told, ways)


def pairs(steps=3):
    return [(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(steps)]


def linear():
    return nn.Linear(6, 3)


def sgd(model, **hyper):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **hyper})


def learn(optimizer, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def loss_of(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def plain(model, optimizer, batch, step):
    learn(optimizer, loss_of(model, batch))


def loop(
    body: Callable[..., object] = plain,
    *,
    model: Callable[[], Any] = linear,
    optimizer: Callable[..., Any] = sgd,
    batches: Callable[[], Any] = pairs,
    prepare: Callable[..., object] = lambda model, optimizer: None,
    between: Callable[..., object] = lambda recorder, model, optimizer, batch: None,
    options: Callable[..., dict[str, Any]] = lambda model: {},
    **keywords: Any,
) -> Loop:
    """A loop of its parts; ``between`` runs before each step but the first."""

    def train(make):
        net = model()
        chosen = optimizer(net)
        prepare(net, chosen)
        recorder = make(net, chosen, **keywords, **options(net))
        for number, batch in enumerate(batches()):
            if number:
                between(recorder, net, chosen, batch)
            with recorder.step(batch) as step:
                body(net, chosen, batch, step)
        return net

    return train


def also(more, **parts):
    """A loop that does ``more(model, batch)`` after each update, within the step."""

    def body(model, optimizer, batch, step):
        plain(model, optimizer, batch, step)
        with torch.no_grad():
            more(model, batch)

    return loop(body, **parts)


def with_loss(change, **parts):
    """A loop whose loss is ``change(model, *batch)``."""
    return loop(lambda model, optimizer, batch, step: learn(optimizer, change(model, *batch)), **parts)


def scaled(change, **parts):
    """A loop whose loss is multiplied by the mean of ``change(x)``."""
    return with_loss(lambda m, x, y: functional.cross_entropy(m(x), y) * change(x).float().mean(), **parts)


def through(change, **parts):
    """A loop whose scores go through ``change``."""
    return with_loss(lambda m, x, y: functional.cross_entropy(change(m(x)), y), **parts)


class Own(torch.optim.SGD):
    """A class that nobody knows."""

    def __init__(self, params, **options):
        super().__init__(params, lr=0.1, momentum=0.9, **options)


def embedding(**options):
    return lambda: nn.Sequential(nn.Embedding(7, 3, **options), nn.Flatten())


def ids():
    return [(torch.randint(0, 7, (4, 2)), torch.randint(0, 3, (4,))) for _ in range(3)]


class Coded(nn.Linear):
    """With a buffer that its steps may write."""

    def __init__(self):
        super().__init__(6, 3)
        self.register_buffer("codes", torch.zeros(4, 6))


def told(loop, folder, devices):
    """What is said of a loop: its refusal, or the warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        try:
            record(loop, folder, devices)
        except CallerError as error:
            return [str(error)]
    return [str(each.message) for each in found]


def in_message(says):
    """The words of a remedy between what its message puts in."""
    return [part for part in says.split("{}") if part]


def follow(each, folder, devices):
    """The loop is told so; each way that it is told ends accepted, without a word."""
    said = told(each.told, folder / "told", devices)
    assert [text for text in said if all(part in text for part in in_message(each.says))], said
    assert not any("\n" in text for text in said if each.says in text)
    for number, way in enumerate(each.ways):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*leaves an inspection in doubt")
            _, verdict = record(way, folder / f"way-{number}", devices)
        assert verdict.outcome is Outcome.ACCEPT, (number, verdict.reasons)
