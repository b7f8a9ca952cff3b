"""How far a step moves weights, of every type that a group may hold."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inspector.replay.changes import Changes, joined_changes

VALUES = {
    "real": torch.tensor([1.0, 2.0]),
    "half": torch.tensor([1.0], dtype=torch.bfloat16),
    "complex": torch.tensor([1.0 + 1.0j]),
    "mask": torch.tensor([True]),
    "small": torch.zeros(2).to(torch.float8_e5m2),
    "none": torch.zeros(0),
}


def moved(changes, rate=0.5, trains=True) -> list[float | None]:
    """What is told of a step that changes tensors by these values."""
    held = {("weight", name): value.clone() for name, value in VALUES.items()}
    task = SimpleNamespace(parameters=(tuple(VALUES), ()), groups=({"lr": 0.25}, {"lr": 0.1}))
    training: Any = SimpleNamespace(task=task, memory=SimpleNamespace(tensors=held))
    watched = Changes(training)
    watched.begin()
    for name, change in changes.items():
        held["weight", name].add_(change)
    leaf: Any = SimpleNamespace(step=1, trains=trains, execution=SimpleNamespace(hyper=({"lr": rate}, {})))
    watched.end(leaf)
    return watched.to_json()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, 0.0),
        ({"real": torch.tensor([0.5, -1.0])}, 2.0),
        ({"half": 0.25, "real": 0.125}, 0.5),
        ({"complex": torch.tensor([0.0 - 2.0j])}, 4.0),
        ({"real": torch.tensor([0.5, float("nan")])}, None),
        ({"real": float("inf"), "complex": 1.0}, None),
    ],
)
def test_the_largest_change_is_told_in_rates_of_the_step(changes, told):
    assert moved(changes) == [told, 0.0]
    assert moved(changes, trains=False) == [0.0, 0.0]


def test_a_rate_of_0_moves_nothing_or_nobody_knows_how_far():
    assert moved({}, rate=0.0) == [0.0, 0.0]
    assert moved({"real": 1.0}, rate=0.0) == [None, 0.0]


def test_segments_are_joined_by_group():
    assert joined_changes([[1.0, None], [2.0, 0.5]], 2) == [2.0, None]
    assert joined_changes([], 1) == []
    others: list[Any] = [[["1"]], [[-1.0]], [[1.0], []], [[float("nan")]], [[1]], [None], [[1.0, 1.0]]]
    for other in others:
        with pytest.raises((TypeError, ValueError)):
            joined_changes(other, 1)
