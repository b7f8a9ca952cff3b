"""Exact resume: a process dies in the middle of an epoch, and the run ends in the bits that it would have had.

Shows: the recorder gives back weights, optimizer, data cursor, schedule and random generators. A loader takes part when
it has ``state_dict`` and ``load_state_dict``, like the one below or ``torchdata``'s StatefulDataLoader.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from chipwitness import Recorder

STEPS, CRASH = 8, 5


class Loader:
    """Batches of a data set, shuffled anew in each epoch by its own generator."""

    def __init__(self) -> None:
        self._samples = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
        self._shuffle = random.Random(2)
        self._left: list[int] = []

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            if not self._left:
                self._left = self._shuffle.sample(range(12), 12)
            taken, self._left = self._left[:4], self._left[4:]
            yield self._samples[taken]

    def state_dict(self) -> dict[str, object]:
        """Where the loader is in its epoch, and how it will shuffle the next."""
        return {"left": self._left, "shuffle": self._shuffle.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._left = state["left"]
        self._shuffle.setstate(state["shuffle"])


def train(run: Path, *, crash: int | None = None) -> str:
    """Start a run, or go on with one whose folder is there; returns the digest of the last state."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader, schedule = Loader(), torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)
    stateful = {"loader": loader, "schedule": schedule}
    if run.exists():
        recorder = Recorder.resume(model, optimizer, out=run, stateful=stateful)
    else:
        recorder = Recorder(model, optimizer, out=run, seed=1, stateful=stateful)
    batches = iter(loader)
    while recorder.steps < STEPS:
        if recorder.steps == crash:
            sys.exit("the process dies")
        batch = next(batches)
        with recorder.step(batch):
            optimizer.zero_grad()
            functional.mse_loss(model(batch), batch[:, :2]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    return recorder.finish()


def main(folder: Path) -> tuple[str, str]:
    """Train once without and once with a crash; returns both digests."""
    whole = train(folder / "whole")
    command = [sys.executable, "-m", __spec__.name, str(folder / "crashed"), str(CRASH)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 1
    resumed = train(folder / "crashed")
    print(f"without a crash    {whole}\nafter a crash      {resumed}")
    return whole, resumed


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(Path(sys.argv[1]), crash=int(sys.argv[2]))
    else:
        main(Path(sys.argv[1]))
