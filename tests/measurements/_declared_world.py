"""Where ``declarations`` records runs of one lab or several, and a small model for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from monitor import Recorder, initialised

__all__ = ["CLASSES", "STARTED", "Batch", "Body", "World", "batch_of", "loss_of", "net", "plain", "public"]

Batch = dict[str, Tensor]
Body = Callable[[nn.Module, Any, Batch], object]

STARTED = datetime(2026, 1, 1, tzinfo=UTC)
CLASSES: Sequence[Any] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
)


@dataclass
class World:
    """Where runs of some labs lie, and the rule that they are judged by."""

    folder: Path
    chance: random.Random
    rule: str = ""
    runs: list[Path] = field(default_factory=list)
    after: dict[str, Path] = field(default_factory=dict)

    def begin(self, model: nn.Module, optimizer: Any, **options: Any) -> Recorder:
        lab = options.setdefault("lab", "lab")
        out = self.folder / f"run-{len(self.runs)}"
        options = {"seed": 5, "chips": 1, "checkpoint_every": 2, "snapshot_rate": Fraction(1), **options}
        recorder = Recorder(model, optimizer, out=out, started=STARTED, hours=1.0, after=self.after.get(lab), **options)
        self.after[lab] = out
        self.runs.append(out)
        return recorder

    def train(
        self,
        model: nn.Module,
        optimizer: Any,
        body: Body,
        *,
        steps: int = 4,
        between: Callable[[Recorder, int], object] = lambda recorder, step: None,
        batch: Callable[[int], Batch] | None = None,
        **options: Any,
    ) -> None:
        recorder = self.begin(model, optimizer, **options)
        for step in range(1, steps + 1):
            made = (batch or batch_of)(step)
            with recorder.step(made):
                body(model, optimizer, made)
            between(recorder, step)
        recorder.finish()


def batch_of(step: int) -> Batch:
    made = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 6, generator=made), "y": torch.randint(0, 4, (8,), generator=made)}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def public(seed: int = 1) -> nn.Module:
    return initialised(net, seed=seed)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(loss_of(model, batch))
    optimizer.step()
