"""A step whose operators other processes ran."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from monitor import numerics
from monitor.declaration.statement import Declaration
from monitor.programs.capture import Capture
from monitor.programs.interpreter import Prepared
from monitor.programs.keys import RepeatedKeys
from monitor.programs.program import Program
from monitor.recording.updates import OptimizerUpdates
from monitor.replay.replaying import scalars_of
from monitor.sharding import ShardedMemory
from monitor.transcript import Execution

__all__ = ["TakenElsewhere", "count_step"]


@dataclass(frozen=True, slots=True)
class TakenElsewhere:
    """A step whose operators were found here, and computed by others.

    Attributes:
        state: what each tensor of the state is after the operators, None where it is absent.
        loss: the tensor whose value the step's loss is.
        settle: called once the step is explained.
    """

    observed: Capture
    updates: OptimizerUpdates
    state: Mapping[str, Tensor | None]
    loss: Tensor | None
    settle: Callable[[], None]


def count_step(
    declared: Declaration,
    memory: ShardedMemory,
    step: int,
    program: Program,
    execution: Execution,
    batch: Mapping[str, Tensor],
    left: Collection[str],
) -> None:
    """Have the chips' meter count a step that others took.

    Where a chip waits for one of its operators, the memory goes through them one by one, as one process would; ``left``
    is what the step before left absent.
    """
    if memory.meter.is_awaited(program.work):
        keys = RepeatedKeys(declared.seed, step)
        session = numerics.recording(declared.numerics, keys=keys)
        Prepared(program, memory).run(batch, scalars_of(program, execution), session, keys, left=left)
        return
    for work in program.works:
        memory.meter.charge(work)
