"""Record somebody's own PyTorch loop in three lines, then inspect it on another processor's kernels.

Shows: the loop stays ordinary PyTorch; what the inspector repeats are recorded programs, not this file's Python. The
first of them initialises the weights, so that a cap on compute can be shown to hold. A second lab records the same loop
and trains one step on another batch than it declares: it is rejected, and only it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from chipwitness import Recorder, Settings, Trust, Verdict, initialised, inspect

STEPS = 6


def train(run: Path, *, lie: str | None = None) -> None:
    """A loop as in many scripts; the recorder adds three lines."""
    torch.manual_seed(0)
    model = initialised(lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)), seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(STEPS)]

    recorder = Recorder(model, optimizer, out=run, numerics="exact", seed=1, lie=lie, lie_step=3)
    for batch in batches:
        with recorder.step(batch):
            inputs, labels = batch
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    recorder.finish()


def judge(run: Path) -> Verdict:
    """An inspection of all chips; the trust file lies next to the run, on the inspector's side."""
    trust = replace(Trust.load([run.with_name(f"{run.name}.trust.json")], [run]), maximum_flop=10**9)
    settings = Settings(samples=4, seed=None, devices=("sse41",))
    return inspect([run], trust, settings, now=datetime.now(UTC))


def main(folder: Path) -> dict[str, Verdict]:
    """Record an honest lab and one that lies; returns the verdicts."""
    verdicts = {}
    for name, lie in (("honest", None), ("lying", "change-sample")):
        train(folder / name, lie=lie)
        verdicts[name] = judge(folder / name)
        print(f"{name}: {verdicts[name].outcome.value}; {verdicts[name].reasons[0].text}")
    return verdicts


if __name__ == "__main__":
    main(Path(sys.argv[1]))
