"""Whole loops with a recorder and without, and the verdict on what was recorded.

A loop takes ``make``, which it calls as ``make(model, optimizer, **keywords)`` where it would make a ``Recorder``, and
returns its model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Verdict
from inspector.replay.pool import DevicePool
from monitor import Recorder

__all__ = ["Loop", "plain", "record", "values"]

Loop = Callable[[Callable[..., Any]], nn.Module]
STARTED = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = Settings(samples=1, seed="x", devices=("sse41",))


class _Plain:
    """Stands for a recorder, and records nothing."""

    steps = 0

    @contextmanager
    def step(self, batch: object) -> Iterator[Any]:
        """The body runs as it is."""
        yield SimpleNamespace(commit=lambda loss: None)

    evaluation = step


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of what a model holds."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def plain(loop: Loop) -> dict[str, Tensor]:
    """What the model of a loop without a recorder ends with."""
    torch.manual_seed(0)
    return values(loop(lambda *given, **keywords: _Plain()))


def record(loop: Loop, run: Path, devices: DevicePool, **changes: Any) -> tuple[nn.Module, Verdict]:
    """The model of a recorded loop, and the verdict of an inspection on another device."""
    made = []

    def make(model: nn.Module, optimizer: Any, **keywords: Any) -> Recorder:
        options = {"seed": 5, "chips": 2, "lab": "lab", **keywords, **changes}
        made.append(Recorder(model, optimizer, out=run, started=STARTED, hours=1.0, **options))
        return made[0]

    torch.manual_seed(0)
    model = loop(make)
    made[0].finish()
    trust = Trust.load([run.with_name(f"{run.name}.trust.json")], [run])
    return model, inspect([run], trust, SETTINGS, now=STARTED, worker=devices.run)
