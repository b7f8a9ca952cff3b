"""The operators of one training step, found on the meta device: shapes and wiring, no arithmetic."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from monitor import numerics
from monitor.presets import preset
from monitor.task import Task
from monitor.trace import Tracer
from monitor.training import Training

__all__ = ["meta_batch", "step_flop", "step_specification"]


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


def step_specification(task: Task, step: int) -> list[dict[str, Any]]:
    """What every honest prover's operators of a step must be, found on the meta device without any arithmetic."""
    training = Training(task, device="meta")
    batch = meta_batch(task)
    tracer = Tracer()
    for name, tensor in training.memory.export().items():
        if name.endswith("/step"):  # Adam's own step counter, the one value that the program's control reads
            tensor.fill_(float(step - 1))
    tracer.declare_inputs(training.memory.export(), batch)
    with numerics.recording("native", observer=tracer):
        training.take_step(batch, learning_rate=task.learning_rate_at(step))
    tracer.commit_state(training.memory.export(), "")
    return [node.specification() for node in tracer.nodes]
