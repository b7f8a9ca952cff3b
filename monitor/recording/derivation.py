"""What a preset's task declares, and the program of its steps, derived from one's own copy of the preset.

Everything is found on the meta device: shapes and wiring, no arithmetic. Lab, inspector and referee derive the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from monitor import numerics
from monitor.declaration.statement import Declaration
from monitor.presets import preset
from monitor.presets.task import Task
from monitor.presets.training import build, take_step
from monitor.programs.batches import batch_layout
from monitor.programs.capture import Capture
from monitor.programs.keys import RecordedKeys
from monitor.programs.program import Program
from monitor.programs.watching import WriteWatch
from monitor.recording.state import LoopState
from monitor.recording.training import Training
from monitor.sharding import StateDigest

__all__ = ["Derived", "derive", "initial_state", "meta_batch"]


@dataclass(frozen=True, slots=True)
class Derived:
    """A task's declaration, and the one program that all its steps run."""

    declaration: Declaration
    program: Program


def meta_batch(task: Task) -> dict[str, Tensor]:
    """A batch of the task's shapes and types without values, sorted by name."""
    samples = preset(task.preset).samples(None)
    return {
        name: torch.empty(
            (task.batch_size, *values.shape[1:]), dtype=torch.from_numpy(np.empty(0, values.dtype)).dtype, device="meta"
        )
        for name, values in sorted(samples.items())
    }


@lru_cache(maxsize=16)
def derive(task: Task) -> Derived:
    """Derive declaration and program."""
    model, optimizer = build(task, torch.device("meta"))
    state = LoopState(model, optimizer, (1,) * task.shards, complete=True)
    declaration = Declaration.of_recipe(task, model, optimizer, state.entries)
    batch = meta_batch(task)
    capture = Capture(RecordedKeys(task.seed, 1), WriteWatch(1))
    updates: list[int] = []
    hooks = [
        optimizer.register_step_pre_hook(lambda *_: updates.append(len(capture.nodes))),
        optimizer.register_step_post_hook(lambda *_: updates.append(len(capture.nodes))),
    ]
    capture.declare_inputs(_present(state.current()), batch)
    with numerics.recording("native", observer=capture):
        loss = take_step(task, model, optimizer, batch, task.learning_rate_at(1))
    for hook in hooks:
        hook.remove()
    program = capture.program(state.current(), batch_layout(batch), [(updates[0], updates[1])], loss)
    return Derived(declaration, program)


@lru_cache(maxsize=64)
def initial_state(task: Task) -> StateDigest:
    """The digests of the initial state that the declared seed gives."""
    return Training(task).memory.digest()


def _present(state: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in state.items() if tensor is not None}
