"""Repeats recorded steps from their programs: for the recorder's own checks and for any inspector."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from firmware_sim import NEVER, Work
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import digest_bytes
from monitor import numerics
from monitor.declaration.statement import Declaration
from monitor.environment import accelerator
from monitor.programs.capture import digest_reads
from monitor.programs.interpreter import Prepared, Watch
from monitor.programs.keys import RepeatedKeys
from monitor.programs.program import Program, parse_hex
from monitor.sharding import LeftOut, ShardedMemory, StateDigest
from monitor.transcript.leaf import Execution, Leaf

__all__ = ["Control", "ProgramTraining", "check_absent", "scalars_of"]

Control = Callable[..., numerics.Session]
"""Makes the session of a step, given ``keys`` of its random operators; such as ``partial(recording, "exact")``."""

_BOUND = numerics.Bound()


class ProgramTraining:
    """A run's state, and the function that takes it one recorded step further.

    Attributes:
        step: number of the last step taken.
        memory: the state in the layout that the run declares.
        absent: what the checkpoint says of tensors that it leaves out, until a step has overwritten them.
        left: names, ``kind/name``, of tensors that the last step left absent; none where that is not known.
    """

    def __init__(
        self, task: Declaration, *, device: torch.device | None = None, memory: ShardedMemory | None = None
    ) -> None:
        """Takes over ``memory``, or makes empty one on ``device``, by default where this process trains."""
        self.task = task
        self.step = 0
        self.memory = task.empty_memory(accelerator() if device is None else device) if memory is None else memory
        self.absent: LeftOut = {}
        self.left: frozenset[str] = frozenset()
        self._ready: dict[str, Prepared] = {}

    def restore(self, checkpoint: Mapping[str, Tensor], step: int) -> StateDigest:
        """Go on from the checkpoint of a step; returns the digest of the whole state, left-out tensors included."""
        self.absent, digest = self.memory.restore(checkpoint)
        self.step, self.left = step, frozenset()
        return digest

    def take_step(
        self,
        program: Program,
        execution: Execution,
        batch: Mapping[str, Tensor],
        batch_root: bytes,
        log: bytes,
        *,
        bound: numerics.Bound = _BOUND,
        observer: numerics.Observer | None = None,
        watch: Watch | None = None,
    ) -> tuple[Leaf, numerics.Session]:
        """Execute the next step and return the leaf that it leads to.

        Raises:
            EvidenceError: the program cannot be executed, or the log contradicts the arithmetic.
        """
        step = self.step + 1
        if execution.program != program.digest:
            raise EvidenceError(f"step {step} names a different program from the one given")
        control = partial(numerics.replaying, self.task.numerics, log, bound=bound, observer=observer)
        session, reads, loss = self.run(program, scalars_of(program, execution), batch, control, watch)
        leaf = Leaf(
            step=step,
            batch=batch_root.hex(),
            state=self.memory.digest(),
            log=str(digest_bytes("rounding-log", log)),
            loss=loss,
            flop=program.flop,
            execution=replace(execution, reads=digest_reads(reads), values=tuple(reads) if execution.values else ()),
        )
        return leaf, session

    def run(
        self,
        program: Program,
        scalars: Sequence[float],
        batch: Mapping[str, Tensor],
        control: Control,
        watch: Watch | None = None,
    ) -> tuple[numerics.Session, list[str], str]:
        """Execute the next step under any numerics; returns also what it read and the bits of its loss.

        Raises:
            EvidenceError: the program cannot be executed, or reads what the checkpoint leaves out.
        """
        check_absent(self.absent, self.step + 1, program)
        keys = RepeatedKeys(self.task.seed, self.step + 1)
        session = control(keys=keys)
        reads, loss = self._prepared(program).run(batch, scalars, session, keys, watch, self.left)
        self.step, self.absent, self.left = self.step + 1, {}, program.absent
        return session, reads, loss

    def stop_after(self, operators: int, program: Program, found: Callable[[StateDigest], None]) -> None:
        """Have ``found`` called with the digest of the state inside of the next step, which runs ``program``.

        Args:
            operators: how many that the meter counts the step has then run: at least one, and no more than it has.
        """
        if not 0 < operators <= len(program.counted):
            raise CallerError(f"a step of {len(program.counted)} operators cannot be stopped after {operators}")
        first = program.first_held(self.left)
        absent = {name: held for name, held in self.absent.items() if first.get(name, operators + 1) > operators}
        meter = self.memory.meter
        meter.wake(Work(meter.total.calls + operators, NEVER, NEVER), lambda *_: found(self.memory.digest(absent)))

    def _prepared(self, program: Program) -> Prepared:
        """The program ready to run on this memory, made at its first step."""
        if program.digest not in self._ready:
            self._ready[program.digest] = Prepared(program, self.memory)
        return self._ready[program.digest]


def check_absent(absent: Collection[str], step: int, program: Program) -> None:
    """EvidenceError if a step reads what the checkpoint before it leaves out."""
    if absent and (read := sorted(set(absent) - program.unread)):
        raise EvidenceError(f"step {step} reads {read[0]!a}, which the checkpoint of step {step - 1} leaves out")


def scalars_of(program: Program, execution: Execution) -> list[float]:
    """A step's scalars: the program's, with those that the step changes; EvidenceError on a number out of range."""
    scalars = list(program.numbers)
    for text, numbers in execution.slots.items():
        value = parse_hex(text)
        for number in numbers:
            if number >= len(scalars):
                raise EvidenceError(f"a step changes scalar {number} of a program that has only {len(scalars)} scalars")
            if program.scalars[number] == text:
                raise EvidenceError(
                    f"a step lists scalar {number} as changed, but gives it the same value as the program"
                )
            scalars[number] = value
    return scalars
