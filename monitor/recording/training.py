"""A preset's task trained in this process, without a recorder."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from monitor.environment import accelerator
from monitor.presets.task import Task
from monitor.presets.training import build, take_step
from monitor.recording.state import LoopState

__all__ = ["Training"]


class Training:
    """A task that this process trains without recording it: the state after some step, and what takes it further.

    Attributes:
        step: number of optimizer steps taken so far.
        memory: all weights, buffers, gradients and optimizer state, in the layout of a recorded run.
    """

    def __init__(self, task: Task, *, device: str | torch.device | None = None) -> None:
        """Builds and initialises model and optimizer on ``device``, by default where this process trains."""
        self.task = task
        self.step = 0
        self.model, self._optimizer = build(task, accelerator() if device is None else torch.device(device))
        self.memory = LoopState(self.model, self._optimizer, (1,) * task.shards, complete=True).memory

    def take_step(self, batch: Mapping[str, Tensor], *, learning_rate: float | None = None) -> Tensor:
        """Advance by one optimizer step and return the scalar FP32 loss (a tensor, still inside the numerics)."""
        number = self.step + 1
        rate = self.task.learning_rate_at(number) if learning_rate is None else learning_rate
        loss = take_step(self.task, self.model, self._optimizer, batch, rate)
        self.step = number
        return loss.detach()
