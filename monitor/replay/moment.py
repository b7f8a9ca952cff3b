"""A step that was just taken, as the lab that takes it sees it before it commits to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from monitor import numerics
from monitor.declaration.statement import Declaration
from monitor.programs.interpreter import Prepared
from monitor.programs.keys import RepeatedKeys
from monitor.programs.program import Program
from monitor.replay.repetition import scalars_of
from monitor.sharding import ShardedMemory
from monitor.transcript.leaf import Execution

__all__ = ["Moment"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One taken step.

    Attributes:
        batch: what was really trained on.
        memory: the state after the step; what is written here is what the lab commits to.
        before: the state before the step, where the lab's conduct asks for it.
        log, loss: the rounding log, and the bits of the loss.
    """

    step: int
    declared: Declaration
    program: Program
    execution: Execution
    batch: Mapping[str, Tensor]
    memory: ShardedMemory
    before: Mapping[str, Tensor] | None
    log: bytes
    loss: str

    def take(
        self, memory: ShardedMemory, batch: Mapping[str, Tensor], session: numerics.Session, keys: RepeatedKeys
    ) -> str:
        """Run the step's program once more on other memory, and return the bits of its loss."""
        scalars = scalars_of(self.program, self.execution)
        return Prepared(self.program, memory).run(batch, scalars, session, keys)[1]

    def keys(self) -> RepeatedKeys:
        """Fresh keys for the step's random operators."""
        return RepeatedKeys(self.declared.seed, self.step)

    def train(self, memory: ShardedMemory, batch: Mapping[str, Tensor]) -> None:
        """Take a step on other memory or another batch, unreported."""
        keys = self.keys()
        self.take(memory, batch, numerics.recording(self.declared.numerics, keys=keys), keys)
