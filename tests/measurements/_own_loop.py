"""A preset's training as a loop of one's own: it drops gradients before each step, and may evaluate in between."""

from __future__ import annotations

from datetime import datetime, timedelta
from fractions import Fraction
from pathlib import Path

import torch

from monitor import Recorder
from monitor.presets import preset
from monitor.presets.task import Task
from monitor.presets.training import build
from monitor.transcript.data import declared_data

__all__ = ["record_own_loop"]

_GATHERED = 3
"""Gradients, so that such a step has more operators than one with an update."""


def record_own_loop(
    task: Task,
    out: Path,
    *,
    rate: Fraction,
    started: datetime,
    duration: timedelta,
    evaluates: bool = False,
    restarts: bool = False,
    lie: str | None = None,
    lie_step: int = 1,
) -> None:
    """Record it by the lab ``lab``.

    Args:
        rate: snapshots per chip and tick.
        evaluates: after each second step comes an evaluation on its batch.
        restarts: each second step makes the optimizer's state anew; the one before adds up gradients.
        lie, lie_step: what the lab lies about, and from which step on.
    """
    model, optimizer = build(task, torch.device("cpu"))
    if restarts:
        optimizer.state.clear()
    data = declared_data(task, None).with_salt(bytes(32))
    recorder = Recorder(
        model,
        optimizer,
        out=out,
        numerics=task.numerics,
        seed=task.seed,
        chips=task.shards,
        checkpoint_every=task.checkpoint_every,
        lab="lab",
        snapshot_rate=rate,
        direct_paths=[f"buffer/{name}" for name, _ in model.named_buffers()],
        started=started,
        hours=duration / timedelta(hours=1),
        lie=lie,
        lie_step=lie_step,
    )
    loss = preset(task.preset).loss
    for number in range(1, task.steps + 1):
        batch = data.batch(number)
        with recorder.step(batch):
            optimizer.zero_grad()
            for _ in range(_GATHERED if restarts and number % 2 else 1):
                loss(model, batch).backward()  # type: ignore[no-untyped-call]
            if restarts and number % 2:
                optimizer.state.clear()
            else:
                optimizer.step()
        if evaluates and number % 2 == 0:
            model.eval()
            with recorder.evaluation(batch) as evaluation, torch.no_grad():
                evaluation.commit(loss(model, batch))
            model.train()
    recorder.finish()
