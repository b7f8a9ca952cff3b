"""A step whose operators other processes ran."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from firmware_sim import NO_WORK
from firmware_sim.errors import CallerError, EvidenceError
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
        state: what each tensor of the state is after the operators, but for those that are absent.
        loss: the tensor whose value the step's loss is.
        settle: called once the step is explained.
    """

    observed: Capture
    updates: OptimizerUpdates
    state: Mapping[str, Tensor]
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

    Until an operator of it writes where the chips hold the state, they see what the step began with, and operators are
    counted alone. Where a chip waits for a later one, the memory goes through them, as one process would; ``left`` is
    what the step before left absent.

    Raises:
        CallerError: the program cannot be executed.
    """
    meter, works = memory.meter, program.works
    ends = list(accumulate(work.calls for work in works))
    counted = bisect_left(ends, min(program.first_held(left).values(), default=program.work.calls + 1))
    for work in works[:counted]:
        meter.charge(work)
    rest = sum(works[counted:], NO_WORK)
    if not meter.is_awaited(rest):
        meter.charge(rest)
        return
    keys = RepeatedKeys(declared.seed, step)
    session = numerics.recording(declared.numerics, keys=keys)
    scalars = scalars_of(program, execution)
    try:
        Prepared(program, memory).run(batch, scalars, session, keys, left=left, counted=counted)
    except EvidenceError as error:
        raise CallerError(f"step {step} cannot be recorded: {error}") from None
