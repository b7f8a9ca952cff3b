"""A loop with evaluations between its steps, for lies that take one; presets have none."""

from __future__ import annotations

from datetime import datetime, timedelta
from fractions import Fraction
from pathlib import Path

import torch

from monitor import Recorder
from monitor.presets import preset
from monitor.presets.task import Task
from monitor.presets.training import build, take_step
from monitor.transcript.declared_data import declared_data

__all__ = ["record_evaluated"]


def record_evaluated(
    task: Task, out: Path, *, lie: str, lie_step: int, rate: Fraction, started: datetime, duration: timedelta
) -> None:
    """Record a preset's steps as a loop of one's own, by a lab that lies, with an evaluation after each second one.

    Args:
        rate: snapshots per chip and tick.
    """
    model, optimizer = build(task, torch.device("cpu"))
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
        started=started,
        hours=duration / timedelta(hours=1),
        lie=lie,
        lie_step=lie_step,
    )
    for number in range(1, task.steps + 1):
        batch = data.batch(number)
        with recorder.step(batch):
            take_step(task, model, optimizer, batch, task.learning_rate)
        if number % 2 == 0:
            model.eval()
            with recorder.evaluation(batch) as evaluation, torch.no_grad():
                evaluation.commit(preset(task.preset).loss(model, batch))
            model.train()
    recorder.finish()
