"""How far replayed steps move a weight, in learning rates: what a rate means for the training."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from monitor.declaration.slots import overlay
from monitor.replay.repetition import ProgramTraining
from monitor.replay.steps import execution_of
from monitor.transcript import Leaf

__all__ = ["Changes", "joined_changes"]


class Changes:
    """The largest change of a weight in a step that trains.

    Attributes:
        largest: of each parameter group, over its rate in that step; infinite where a weight without a rate moves, or
            becomes no number.
    """

    def __init__(self, training: ProgramTraining) -> None:
        task, held = training.task, training.memory.tensors
        members = ([held["weight", name] for name in names] for names in task.parameters)
        self._members = [[_real(each) for each in tensors if each.numel() and _moves(each)] for tensors in members]
        self._groups = task.groups
        self._before: list[list[Tensor]] = []
        self.largest = [0.0] * len(task.groups)

    def begin(self) -> None:
        """A step is about to be taken."""
        self._before = [[tensor.clone() for tensor in tensors] for tensors in self._members]

    def end(self, leaf: Leaf) -> None:
        """It was taken, and led to this leaf."""
        groups = overlay(self._groups, execution_of(leaf).hyper) if leaf.trains else []
        for number, (group, old) in enumerate(zip(groups, self._before, strict=False)):
            ends = [torch.aminmax(one.sub_(now)) for one, now in zip(old, self._members[number], strict=True)]
            sizes = [abs(float(end)) for pair in ends for end in pair]
            rate, most = (
                abs(group.get("lr", 0.0)),
                max(sizes, default=0.0) if all(map(math.isfinite, sizes)) else math.inf,
            )
            self.largest[number] = max(self.largest[number], most / rate if rate else math.inf if most else 0.0)

    def to_json(self) -> list[float | None]:
        """Return JSON-able values, None for what is infinite."""
        return [ratio if math.isfinite(ratio) else None for ratio in self.largest]


def _moves(tensor: Tensor) -> bool:
    """Whether a weight is of a type that optimizers update."""
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.itemsize > 1)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def joined_changes(parts: Sequence[Sequence[float | None]], count: int) -> list[float | None]:
    """The largest of each of so many groups over several segments; ValueError or TypeError on another form."""
    if any(len(part) != count for part in parts):
        raise ValueError("changes of weights are given for the wrong number of groups")
    groups = list(zip(*parts, strict=True))
    if not all(each is None or (type(each) is float and 0 <= each < math.inf) for group in groups for each in group):
        raise ValueError("changes of weights are malformed")
    return [None if None in group else max(each for each in group if each is not None) for group in groups]
