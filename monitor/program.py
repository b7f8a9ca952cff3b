"""The operators of one training step, found on the meta device: shapes and wiring, no arithmetic."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from monitor.presets import preset
from monitor.task import Task
from monitor.training import Training

__all__ = ["meta_batch", "step_flop"]


def meta_batch(task: Task) -> dict[str, torch.Tensor]:
    """A batch of the task's shapes and types without values."""
    samples = preset(task.preset).samples(None)
    return {
        name: torch.empty(
            (task.batch_size, *values.shape[1:]), dtype=torch.from_numpy(np.empty(0, values.dtype)).dtype, device="meta"
        )
        for name, values in samples.items()
    }


@lru_cache(maxsize=32)
def step_flop(task: Task) -> int:
    """FLOP of one step: matrix products and convolutions of forward and backward pass, two for a multiply-add."""
    training = Training(task, device="meta")
    with FlopCounterMode(display=False) as counter:
        training.take_step(meta_batch(task))
    return int(counter.get_total_flops())
