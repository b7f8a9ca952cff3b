"""A step whose operators other processes ran."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from firmware_sim.errors import CallerError, EvidenceError
from monitor import numerics
from monitor.declaration.statement import Declaration
from monitor.programs.capture import Capture
from monitor.programs.interpreter import Prepared
from monitor.programs.keys import RepeatedKeys
from monitor.programs.program import Program
from monitor.recording.updates import OptimizerUpdates
from monitor.replay.repetition import scalars_of
from monitor.sharding import ShardedMemory
from monitor.transcript import STEP, Execution

__all__ = ["TakenElsewhere", "count_step"]


@dataclass(frozen=True, slots=True)
class TakenElsewhere:
    """A step whose operators were found here, and computed by others.

    Attributes:
        state: what each tensor of the state is after the operators, but for those that are absent.
        loss: the tensor whose value the step's loss is.
        kind: ``STEP`` or ``EVALUATION``.
        settle: called once the step is explained.
    """

    observed: Capture
    updates: OptimizerUpdates
    state: Mapping[str, Tensor]
    loss: Tensor | None
    settle: Callable[[], None]
    kind: str = STEP


def count_step(
    declared: Declaration,
    memory: ShardedMemory,
    step: int,
    program: Program,
    execution: Execution,
    batch: Mapping[str, Tensor],
    left: Collection[str],
) -> None:
    """Take a step that others took in the chips' memory too: it goes through all operators, as one process would.

    Only a chip knows after which of them it looks. ``left`` is what the step before left absent.

    Raises:
        CallerError: the program cannot be executed.
    """
    keys = RepeatedKeys(declared.seed, step)
    session = numerics.recording(declared.numerics, keys=keys)
    scalars = scalars_of(program, execution)
    try:
        Prepared(program, memory).run(batch, scalars, session, keys, left=left)
    except EvidenceError as error:
        raise CallerError(f"step {step} cannot be recorded: {error}") from None
