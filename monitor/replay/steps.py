"""Takes committed steps of a run again, from a checkpoint on: for the lab, its recorder and any inspector."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import Tensor

from firmware_sim.errors import EvidenceError, Unreadable
from firmware_sim.evidence import canonical
from monitor import numerics
from monitor.environment import ARITHMETIC
from monitor.programs.interpreter import Watch
from monitor.programs.program import Program
from monitor.replay.repetition import Control, ProgramTraining, scalars_of
from monitor.replay.returned_results import Returns
from monitor.replay.witness import Difference, differences
from monitor.sharding import ShardedMemory, StateDigest
from monitor.transcript import Execution, Leaf, RunFolder
from monitor.transcript.layout import checkpoint_path

__all__ = ["ProgramSteps", "check_arithmetic", "check_size", "execution_of", "zeros"]

_BOUND = numerics.Bound()


def execution_of(leaf: Leaf) -> Execution:
    """A step's execution record; EvidenceError if there is none."""
    if leaf.execution is None:
        raise EvidenceError(f"step {leaf.step} names no program")
    return leaf.execution


def check_size(run: RunFolder) -> None:
    """The declared state is no larger than its first checkpoint's file, before memory is made for it."""
    entry = run.files.get(checkpoint_path(0))
    size = run.declared.byte_count
    if entry is None or size > entry.length:
        raise EvidenceError(f"the declared state has {size} bytes, which is more than the first checkpoint holds")


def check_arithmetic(run: RunFolder, program: Program) -> None:
    """Unreadable if BF16 numbers of a run under ``exact`` were computed by an arithmetic that this version has not."""
    recorded = run.metadata.versions.get("arithmetic", "1")
    if recorded == ARITHMETIC or run.declared.numerics != "exact":
        return
    if b"bfloat16" in program.encoded or b"bfloat16" in canonical.encode(run.declared.to_json()):
        raise Unreadable(
            f"the run was recorded with arithmetic {recorded[:20]!r}, and this version computes BF16 products to "
            f"different bits, with arithmetic {ARITHMETIC!r}: replay it with the version of chipwitness that recorded "
            "it"
        )


def zeros(state: Mapping[str, Tensor]) -> frozenset[str]:
    """Names of tensors that are zeros all over: in the state that a run begins with, an absent one is such."""
    return frozenset(name for name, tensor in state.items() if not tensor.any())


class ProgramSteps:
    """A run's state after one of its checkpoints, and its next steps by interpreting their programs.

    Attributes:
        training: the state and how far it came.
        start: digest of the state that it began with.
    """

    def __init__(
        self,
        run: RunFolder,
        start: int,
        *,
        bound: numerics.Bound = _BOUND,
        device: torch.device | None = None,
        memory: ShardedMemory | None = None,
    ) -> None:
        """Load the checkpoint of step ``start`` to ``memory`` or ``device``, by default where this process trains."""
        check_size(run)
        self._run = run
        self._batches = run.batches()
        self._programs: dict[str, Program] = {}
        self._bound = bound
        self.training = ProgramTraining(run.declared, device=device, memory=memory)
        state = run.checkpoint(start)
        self.start = self.training.restore(state, start)
        self.training.left = self.program(start).absent if start else zeros(state)

    def program(self, step: int) -> Program:
        """The program that a step runs."""
        digest = execution_of(self._run.leaf(step)).program
        if digest not in self._programs:
            self._programs[digest] = self._run.program(digest)
            check_arithmetic(self._run, self._programs[digest])
        return self._programs[digest]

    def only_computes(self, step: int) -> bool:
        """Whether a step updates nothing and writes nothing of the state, as an evaluation."""
        program = self.program(step)
        return not program.updates and not program.written

    def returns(self, last: int) -> Returns:
        """What looks for results in the batches of later steps, up to ``last``."""
        return Returns(self._batches.batch, self.program, min(last, self._run.committed))

    def stop_after(self, operators: int, found: Callable[[StateDigest], None]) -> None:
        """Have ``found`` called with the digest of the state inside of the next step (``ProgramTraining``)."""
        self.training.stop_after(operators, self.program(self.training.step + 1), found)

    def take(
        self,
        *,
        batch: Mapping[str, Tensor] | None = None,
        observer: numerics.Observer | None = None,
        watch: Watch | None = None,
    ) -> tuple[Leaf, numerics.Session]:
        """Take the next step, on the committed batch or another one, and return the leaf that it leads to."""
        step = self.training.step + 1
        return self.training.take_step(
            self.program(step),
            execution_of(self._run.leaf(step)),
            self._batches.batch(step) if batch is None else batch,
            self._batches.batch_root(step),
            self._run.rounding_log(step),
            bound=self._bound,
            observer=observer,
            watch=watch,
        )

    def differences(self, seed: bytes, skipped: Collection[str]) -> list[Difference]:
        """What the next step's batch changes past every loss (``monitor.replay.witness``); no step is taken."""
        step, training = self.training.step + 1, self.training
        program, control = self.program(step), partial(numerics.recording, training.task.numerics)
        scalars = scalars_of(program, execution_of(self._run.leaf(step)))
        before = training.step, training.absent, training.left

        def run(batch: Mapping[str, Tensor], watch: Watch) -> None:
            training.step, training.absent, training.left = before
            training.run(program, scalars, batch, control, watch)

        try:
            return differences(program, training.memory, run, self._batches.batch(step), seed, skipped=skipped)
        finally:
            training.step, training.absent, training.left = before

    def take_under(self, control: Control) -> tuple[numerics.Session, str]:
        """Take the next step under other numerics than the declared; returns also the bits of its loss."""
        step = self.training.step + 1
        program = self.program(step)
        scalars = scalars_of(program, execution_of(self._run.leaf(step)))
        session, _, loss = self.training.run(program, scalars, self._batches.batch(step), control)
        return session, loss
