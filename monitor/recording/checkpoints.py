"""Checkpoint files of a run that is being recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from monitor.declaration.statement import Declaration
from monitor.programs.program import Program
from monitor.sharding import ShardedMemory
from monitor.transcript import Ahead, Staged, TranscriptWriter, state_pieces
from monitor.transcript.layout import checkpoint_path, step_of

__all__ = ["Checkpoints"]


class Checkpoints:
    """Each checkpoint comes with the step after it, when it is known what is read of it; first and last are whole.

    Until then it is written during the training, as it has to be if that step runs the program of the step before.

    Args:
        before: the state after the last committed step under ``kind/name``, which its owner keeps up to date after
            ``of_past``; empty where none is held.
    """

    def __init__(
        self,
        folder: Path,
        declared: Declaration,
        memory: ShardedMemory,
        before: Mapping[str, Tensor],
        writer: TranscriptWriter,
    ) -> None:
        self._folder, self._declared, self._memory, self._before = folder, declared, memory, before
        self._writer = writer
        self._state = before
        self._ahead: tuple[Ahead, frozenset[str]] | None = None

    def whole(self, step: int) -> dict[str, Staged]:
        """The state that lies in memory now, written from there as the checkpoint of a step, by its path."""
        path = checkpoint_path(step)
        return {path: self._writer.ahead(path, lambda: state_pieces(self._memory.export())).staged()}

    def reached(self, step: int, program: Program) -> None:
        """``before``, or memory where there is none, holds the state after a step that ran a program."""
        if step % self._declared.checkpoint_every or step in (0, self._declared.length):
            return
        if not self._before:
            self._state = {name: tensor.clone() for name, tensor in self._memory.export().items()}
        self._begin(step, program.unread)

    def of_past(self, step: int, program: Program) -> dict[str, Staged]:
        """The checkpoint that comes with a step which runs a program, if there is one."""
        if self._ahead is None:
            return {}
        if self._ahead[1] != program.unread:
            self.stop()
            self._begin(step - 1, program.unread)
        (ahead, _), self._ahead, self._state = self._ahead, None, self._before
        return {checkpoint_path(step - 1): ahead.staged()}

    def stop(self) -> None:
        """Wait until nothing is written any more, and forget what no step has come for."""
        if self._ahead is not None:
            self._ahead[0].forget()
            self._ahead = None

    def release(self, committed: int) -> None:
        """Delete what need not stay once so many steps are committed, and what a process that died left of it."""
        declared = self._declared
        if declared.keep is None or (committed - 1) % declared.checkpoint_every:
            return  # no checkpoint came with the last step
        for path in (self._folder / checkpoint_path(0)).parent.iterdir():
            step = step_of(f"{path.parent.name}/{path.name}")
            if step is not None and not declared.retains(step, committed):
                path.unlink()

    def _begin(self, step: int, unread: frozenset[str]) -> None:
        """Write a step's checkpoint without what the next step overwrites before it reads it."""
        state, memory = self._state, self._memory
        ahead = self._writer.ahead(checkpoint_path(step), lambda: state_pieces(memory.trimmed(state, unread)))
        self._ahead = ahead, unread
