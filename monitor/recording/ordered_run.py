"""A provider's run of what a client has ordered: programs are executed, and no Python of anyone."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from torch import Tensor

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import SigningKey
from monitor.declaration.countersignature import TIME
from monitor.environment import check_subnormals, device_name, fingerprint, settings, versions
from monitor.programs.batches import batch_root, step_salt
from monitor.programs.program import Program
from monitor.recording.checkpoints import Checkpoints
from monitor.replay.moment import Moment
from monitor.replay.reexecution import HONEST, Behaviour
from monitor.replay.repetition import ProgramTraining
from monitor.replay.steps import zeros
from monitor.transcript import Execution, Leaf, Metadata, TranscriptWriter
from monitor.transcript.batches import salt_commitment
from monitor.transcript.data import encode_batch
from monitor.transcript.layout import SALT, batch_path, constants_path, log_path, program_path
from monitor.transcript.listing import batch_bytes
from monitor.transcript.orders import OrderFolder

__all__ = ["run_order"]

_DURATION = timedelta(days=365)
"""Until the declared end, which means nothing for a task."""


def run_order(
    order: OrderFolder,
    out: Path,
    key: SigningKey,
    name: str,
    *,
    behaviour: Behaviour = HONEST,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Execute a task, and leave a finished run folder behind. No chips witness it: it has no evidence of chips.

    Args:
        name: of the provider.
        behaviour: how the provider takes steps, where it simulates a lie.
        progress: called with the number of each step that is committed.

    Raises:
        EvidenceError: the task's files are not what was ordered, cannot be executed, or hold what no step reads.
        OSError: the disk is full, or cannot be written.
    """
    check_subnormals()
    training = ProgramTraining(order.order.declaration)
    state = order.state()
    digest = training.restore(state, 0)
    if str(digest.root) != order.order.declaration.origin.state:
        raise EvidenceError("the initial state is not the one that the task declares")
    training.left = zeros(state)
    staging = out.with_name(f"{out.name}.staging")
    staging.mkdir(parents=True, exist_ok=True)
    run = _OrderedRun(order, training, _writer(order, out, staging, key, name, training), behaviour)
    run.start()
    for step in range(1, len(order.order.steps) + 1):
        run.take(step)
        if progress is not None:
            progress(step)
    run.finish()
    shutil.rmtree(staging, ignore_errors=True)


def _writer(
    order: OrderFolder, out: Path, staging: Path, key: SigningKey, name: str, training: ProgramTraining
) -> TranscriptWriter:
    salt, now, place = secrets.token_bytes(32), datetime.now(UTC), training.memory.place
    metadata = Metadata(
        lab=name,
        task=order.order.declaration,
        data=salt_commitment(salt),
        chips=(f"{name}-memory",),
        device={"name": device_name(place), "fingerprint": str(fingerprint(place))},
        versions=versions(),
        settings=settings(place),
        started=now.strftime(TIME),
        declared_end=(now + _DURATION).strftime(TIME),
    )
    run_id, data = metadata.run_id.hex(), {SALT: salt}
    return TranscriptWriter.create(out, staging, key, run=run_id, metadata=metadata.to_json(), data=data)


@dataclass(slots=True)
class _OrderedRun:
    """The run while it goes on."""

    order: OrderFolder
    training: ProgramTraining
    writer: TranscriptWriter
    behaviour: Behaviour
    salt: bytes = b""
    known: dict[str, Program] = field(default_factory=dict)
    checkpoints: Checkpoints = field(init=False)

    def __post_init__(self) -> None:
        self.salt = (self.writer.folder / SALT).read_bytes()
        declared, memory = self.order.order.declaration, self.training.memory
        self.checkpoints = Checkpoints(self.writer.folder, declared, memory, {}, self.writer)

    @property
    def length(self) -> int:
        """Number of steps whose batches are there."""
        return len(self.order.order.steps)

    def batch(self, step: int) -> dict[str, Tensor]:
        """The batch of a step."""
        return self.order.batch(step)

    def start(self) -> None:
        """Commit the initial state."""
        leaf = Leaf(step=0, batch="", state=self.training.memory.digest(), log="", loss="", flop=0)
        self.writer.append(leaf, self.checkpoints.whole(0))

    def take(self, step: int) -> None:
        """Take a step and commit it."""
        execution = self.order.order.steps[step - 1].execution
        files: dict[str, bytes] = {}
        if execution.program not in self.known:
            program = self.known[execution.program] = self.order.program(execution.program)
            files[program_path(program.digest)] = program.encoded
            if program.apart_bytes:
                files[constants_path(program.digest)] = program.apart
        program, declared = self.known[execution.program], self.order.batch(step)
        content = encode_batch(declared, step_salt(self.salt, step))
        if len(content) > batch_bytes(program.batch):  # a referee would ask for no more than the program reads
            raise EvidenceError(f"the batch of step {step} is longer than its program reads")
        leaf = self._taken(step, program, execution, declared, batch_root(self.salt, step, content))
        files |= {log_path(step): b"", batch_path(step): content}
        past = self.checkpoints.of_past(step, program)
        self.checkpoints.reached(step, program)
        self.writer.append(leaf, {**files, **past})

    def _taken(
        self, step: int, program: Program, execution: Execution, declared: dict[str, Tensor], root: bytes
    ) -> Leaf:
        training, behaviour = self.training, self.behaviour
        before = {name: x.clone() for name, x in training.memory.export().items()} if behaviour.needs_before else None
        batch = behaviour.batch(step, declared, self)  # type: ignore[arg-type]
        leaf, _ = training.take_step(program, execution, batch, root, b"", observer=behaviour.observer(step))
        moment = Moment(
            step=step,
            declared=training.task,
            program=program,
            execution=execution,
            batch=batch,
            memory=training.memory,
            before=before,
            log=b"",
            loss=leaf.loss,
        )
        behaviour.before_commit(moment)
        return behaviour.declare(replace(leaf, state=training.memory.digest()))

    def finish(self) -> None:
        """Write the last state, and close the run."""
        self.checkpoints.stop()
        self.writer.finish(self.checkpoints.whole(self.length))
