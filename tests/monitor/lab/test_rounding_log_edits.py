"""Every single-entry edit of one step's log, one operator at a time: each element of ``digits-cnn``, each direction.

What a replay decides about an entry depends on that operator's values alone, so each operator is executed by itself, as
a referee does, with the honest inputs and each edit of its entries in turn. Same device as the recording: predictions
from |v − m|/β are exact. The step is so small that few or none of its 7,983 elements are ambiguous; nearly all edits
are additions. (tests/inspector/inspection/test_rounding_edits.py flips and removes entries of a run that has them.)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from monitor.lab.rounding_log_edits import EditKind, LogEdit, Rounding, Survey, apply_edit
from monitor.numerics import Bound, Formats, LogContradiction, execute
from monitor.numerics.rounding import codec
from monitor.presets import preset
from monitor.presets.task import Task
from monitor.replay.derivation import DerivedSteps
from monitor.transcript import to_batch

FORMATS, BOUND = Formats(), Bound()


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return type(value)(_copied(each) for each in value) if isinstance(value, list | tuple) else value


class Inputs:
    """An observer that keeps the arguments of every call."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[str, Any, Any]] = {}

    def before(self, index, func, args, kwargs) -> None:
        self.calls[index] = (str(func), _copied(args), {key: _copied(value) for key, value in kwargs.items()})

    def after(self, index, func, args, kwargs, out) -> None:
        """Nothing to do."""


class Operator:
    """One call of the step: its inputs, its entries, and how each element that it rounds stands to its midpoint."""

    def __init__(self, inputs: tuple[str, Any, Any], roundings: list[Rounding], entries: bytes) -> None:
        self.name, self._args, self._kwargs = inputs
        self.roundings = [replace(each, call=0) for each in roundings]
        self.entries = entries
        groups = codec.decode(entries, FORMATS, BOUND)
        self.held = {group.part: set(group.positions.tolist()) for group in groups}

    def execute(self, entries: bytes, bound: Bound = BOUND) -> list[torch.Tensor]:
        out = execute("rounded", self.name, self._args, self._kwargs, entries=entries, bound=bound)
        return [each for each in (out if isinstance(out, list | tuple) else [out]) if each is not None]

    def edits(self) -> list[tuple[LogEdit, float]]:
        """All single-entry edits and the distance of each one's element."""
        found = []
        for each in self.roundings:
            held = self.held.get(each.part, set())
            for element, distance in enumerate(each.distance.tolist()):
                kinds = (EditKind.FLIP, EditKind.DROP) if element in held else (EditKind.ADD, EditKind.PAD)
                found += [(LogEdit(kind=kind, call=0, part=each.part, element=element), distance) for kind in kinds]
        return found


@pytest.fixture(scope="module")
def operators() -> list[Operator]:
    task = Task.for_preset("digits-cnn", seed=5, steps=1, batch_size=1, shards=1)
    batch = to_batch(preset(task.preset).samples(None), np.arange(1))
    inputs = Inputs()
    survey, session = Survey.recording(inputs)
    DerivedSteps(task).take_under(lambda keys: session, batch=batch)
    calls = sorted({each.call for each in survey.roundings})
    return [
        Operator(inputs.calls[call], [each for each in survey.roundings if each.call == call], session.entries_of(call))
        for call in calls
    ]


def _same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _prediction(kind: EditKind, distance: float) -> tuple[str, bool]:
    """The rule that is broken (empty if none), and whether the result stays as it was."""
    if kind is EditKind.DROP:
        return ("no entry", True) if distance <= 2 else ("", True)
    if kind is EditKind.FLIP:
        return ("further than 2β", False) if distance > 2 else ("", False)
    if distance > 6:
        return "further than 6β", kind is EditKind.PAD
    return ("further than 2β", False) if kind is EditKind.ADD else ("", True)


def test_every_single_edit_of_every_element_is_judged_as_predicted(operators):
    counts: Counter[tuple[str, str]] = Counter()
    for operator in operators:
        honest = operator.execute(operator.entries)
        for edit, distance in operator.edits():
            rule, same = _prediction(edit.kind, distance)
            counts[edit.kind.value, "REJECT" if rule else "ACCEPT"] += 1
            entries = apply_edit(operator.entries, edit, operator.roundings)
            if not rule:
                assert _same(operator.execute(entries), honest) == same, (operator.name, edit)
                continue
            with pytest.raises(LogContradiction) as caught:
                operator.execute(entries)
            assert (caught.value.operator, caught.value.element) == (operator.name, edit.element)
            assert rule in caught.value.rule, (operator.name, edit, distance)
    elements = sum(len(each.distance) for operator in operators for each in operator.roundings)
    assert sum(counts.values()) == 2 * elements
    assert counts["flip", "ACCEPT"] + counts["flip", "REJECT"] == sum(
        len(held) for operator in operators for held in operator.held.values()
    )
    assert counts["add", "ACCEPT"] == 0
    assert counts["add", "REJECT"] > 5000
    assert counts["pad", "REJECT"] > 5000


def test_without_the_check_edits_outside_the_window_are_obeyed(operators):
    """The test of the test: the same edits pass, and a steering one changes exactly its element by one grid step."""
    generator = np.random.Generator(np.random.Philox(3))
    steered = 0
    for operator in operators:
        honest = operator.execute(operator.entries)
        outside = [
            edit for edit, distance in operator.edits() if edit.kind is EditKind.ADD and 6 < distance < float("inf")
        ]
        for index in generator.permutation(len(outside))[:5]:
            entries = apply_edit(operator.entries, outside[index], operator.roundings)
            reached = operator.execute(entries, Bound(check=False))
            changed = sum(int((a != b).sum()) for a, b in zip(reached, honest, strict=True))
            assert changed >= 1 or operator.name not in ("aten.mm.default", "aten.convolution.default")
            steered += changed > 0
    assert steered >= 10
