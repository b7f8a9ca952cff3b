"""A loop whose run can get a second history: ``python -m … RUN BACKUP SEED`` trains it, and is killed in mid-run.

Batches come as the loop goes, so that no declaration says which they are.
"""

from __future__ import annotations

import os
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from monitor import Recorder
from monitor.lab.simulated_lab import lab_path

__all__ = ["train_anew"]

_STARTED = datetime(2026, 1, 1, tzinfo=UTC)
_KEPT, _SHOWN, _LAST = 2, 4, 5
"""After which step there is a backup, what an inspection is shown, and where the second history ends."""


def _parts(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Recorder, steps: range, data: int) -> None:
    for number in steps:
        generator = torch.Generator().manual_seed(data + number)
        x, y = torch.randn(5, 8, generator=generator), torch.randint(0, 4, (5,), generator=generator)
        with recorder.step({"x": x, "y": y}) as step:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            step.commit(loss=loss)


def train_anew(run: Path, seed: int) -> None:
    """Go on from the last step of a backup that was put back, with batches that were not shown before, to the end."""
    model, optimizer = _parts(seed)
    recorder = Recorder.resume(model, optimizer, out=run)
    _train(model, optimizer, recorder, range(_KEPT + 1, _LAST + 1), data=1_000)
    recorder.finish()


def _begin(run: Path, backup: Path, seed: int) -> None:
    model, optimizer = _parts(seed)
    options: dict[str, Any] = {"chips": 2, "checkpoint_every": 2, "lab": "lab", "started": _STARTED, "hours": 1.0}
    recorder = Recorder(model, optimizer, out=run, seed=seed, **options)
    _train(model, optimizer, recorder, range(1, _KEPT + 1), data=0)
    shutil.copytree(run, backup / "run")
    shutil.copytree(lab_path(run), backup / "lab")
    _train(model, optimizer, recorder, range(_KEPT + 1, _SHOWN + 1), data=0)
    os._exit(0)  # as a machine that goes down: neither chips nor run are closed


if __name__ == "__main__":
    _begin(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
