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

from firmware_sim import Roofline
from firmware_sim.errors import CallerError
from monitor import numerics
from monitor.declaration.numbers import declared_numbers
from monitor.declaration.statement import Declaration
from monitor.environment import accelerator
from monitor.loops.state import LoopState
from monitor.numerics import Session
from monitor.presets import preset
from monitor.presets.task import Task, draw_order
from monitor.presets.training import build, take_step
from monitor.programs.batches import batch_layout
from monitor.programs.capture import Capture
from monitor.programs.keys import RecordedKeys
from monitor.programs.memory_watch import WriteWatch
from monitor.programs.program import Program
from monitor.replay.repetition import Control, ProgramTraining
from monitor.sharding import Layout, ShardedMemory, StateDigest
from monitor.transcript import to_batch

__all__ = ["Derived", "DerivedSteps", "clocks_of", "derive", "initial_memory", "initial_state", "meta_batch"]


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
        optimizer.register_step_pre_hook(lambda *_: updates.append(capture.taken)),
        optimizer.register_step_post_hook(lambda *_: updates.append(capture.taken)),
    ]
    capture.declare_inputs(_present(state.current()), batch)
    with numerics.recording("native", observer=capture):
        loss = take_step(task, model, optimizer, batch, task.learning_rate_at(1))
    for hook in hooks:
        hook.remove()
    program = capture.program(state.current(), batch_layout(batch), [(updates[0], updates[1])], loss)
    return Derived(declaration, program)


def clocks_of(task: Task, layout: Layout) -> list[Roofline]:
    """What each simulated chip does in a tick at most: its share of a step."""
    work = derive(task).program.work
    parts = [work.share(*layout.share(shard)) for shard in range(task.shards)]
    return [Roofline(flop=max(part.flop, 1), moved=max(part.moved, 1)) for part in parts]


@lru_cache(maxsize=64)
def initial_state(task: Task) -> StateDigest:
    """The digests of the initial state that the declared seed gives."""
    return initial_memory(task).digest()


def initial_memory(task: Task) -> ShardedMemory:
    """The initial state that the declared seed gives, in memory of this process's device."""
    model, optimizer = build(task, accelerator())
    return LoopState(model, optimizer, (1,) * task.shards, complete=True).memory


class DerivedSteps:
    """A task's training by its derived program: the steps that a recorder would record, and no model's Python.

    Attributes:
        training: the state and how far it came.
    """

    def __init__(self, task: Task) -> None:
        """Begins with the initial state."""
        derived, memory = derive(task), initial_memory(task)
        self.training = ProgramTraining(derived.declaration, memory=memory)
        self._program = derived.program
        self._numbers = declared_numbers(derived.declaration, derived.program, memory.export())
        self._samples = preset(task.preset).samples(None)
        self._order = draw_order(task, len(next(iter(self._samples.values()))))

    def take_under(self, control: Control, *, batch: Mapping[str, Tensor] | None = None) -> tuple[Session, str]:
        """Take the next step, on the preset's batch or another one; returns also the bits of its loss."""
        if self.training.step >= len(self._order):
            raise CallerError(f"the task has {len(self._order)} steps, and all of them are taken")
        if batch is None:
            batch = to_batch(self._samples, self._order[self.training.step])
        session, _, loss = self.training.run(self._program, next(self._numbers), batch, control)
        return session, loss


def _present(state: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in state.items() if tensor is not None}
