"""Checkpoint files of a run that is being recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from monitor.declaration.statement import Declaration
from monitor.programs.program import Program
from monitor.sharding import ShardedMemory
from monitor.transcript import encode_state
from monitor.transcript.layout import checkpoint_path, step_of

__all__ = ["Checkpoints"]


class Checkpoints:
    """Each checkpoint comes with the step after it, when it is known what is read of it; first and last are whole.

    Args:
        before: the state after the last committed step under ``kind/name``, which its owner keeps up to date; empty
            where none is held, since all steps run one program.
    """

    def __init__(
        self, folder: Path, declared: Declaration, memory: ShardedMemory, before: Mapping[str, Tensor]
    ) -> None:
        self._folder, self._declared, self._memory, self._before = folder, declared, memory, before
        self._ahead: dict[str, bytes] = {}

    def whole(self, step: int) -> dict[str, bytes]:
        """The state that lies in memory now, as the checkpoint of a step by its path."""
        return {checkpoint_path(step): encode_state(self._memory.export())}

    def of_past(self, step: int, program: Program) -> dict[str, bytes]:
        """The checkpoint that comes with a step which runs a program, if there is one."""
        return self._trimmed(step - 1, self._before, program) if self._before else self._ahead

    def reached(self, step: int, program: Program) -> None:
        """Memory holds the state after a step that ran a program; if no copy of it is held, make its checkpoint now."""
        if not self._before:
            self._ahead = self._trimmed(step, self._memory.export(), program)

    def release(self, committed: int) -> None:
        """Delete what need not stay once so many steps are committed, and what a process that died left of it."""
        declared = self._declared
        if declared.keep is None or (committed - 1) % declared.checkpoint_every:
            return  # no checkpoint came with the last step
        for path in (self._folder / checkpoint_path(0)).parent.iterdir():
            step = step_of(f"{path.parent.name}/{path.name}")
            if step is not None and not declared.retains(step, committed):
                path.unlink()

    def _trimmed(self, step: int, state: Mapping[str, Tensor], following: Program) -> dict[str, bytes]:
        """A step's checkpoint without what the next step overwrites before it reads it."""
        if step % self._declared.checkpoint_every or step in (0, self._declared.length):
            return {}
        return {checkpoint_path(step): encode_state(self._memory.trimmed(state, following.unread))}
