"""Makes a client's order: of a preset's training, of the steps of a recorded run, or of answers to prompts."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import SigningKey
from monitor.declaration.countersignature import TIME, Admitted
from monitor.declaration.numbers import declared_numbers
from monitor.declaration.origin import Origin
from monitor.declaration.statement import Declaration
from monitor.files import write_whole
from monitor.presets.task import Task
from monitor.programs.program import Program
from monitor.replay.derivation import derive, initial_memory
from monitor.replay.inference import Inference
from monitor.replay.steps import execution_of
from monitor.transcript import Execution, RunFolder, encode_state
from monitor.transcript.data import declared_data
from monitor.transcript.orders import TASK, UNKNOWN_READS, Order, OrderedStep

__all__ = ["order_inference", "order_preset", "order_run"]

Progress: TypeAlias = Callable[[int, int, str], None]
_Step: TypeAlias = tuple[Program, Execution, Mapping[str, Tensor]]


def order_preset(task: Task, source: Path | None, out: Path, key: SigningKey, progress: Progress | None = None) -> str:
    """Order a preset's training; writes the folder ``out``, and returns the task's digest.

    Args:
        source: the client's own data, of presets that read some.

    Raises:
        CallerError: the folder exists, or no provider could run the task.
    """
    derived, state = derive(task), initial_memory(task).export()
    data = declared_data(task, source).with_salt(bytes(32))
    declared, program = derived.declaration, derived.program
    unchanged: tuple[Mapping[str, Any], ...] = ({},) * len(declared.groups)

    def steps() -> Iterator[_Step]:
        numbers = declared_numbers(declared, program, state)
        for step, scalars in zip(range(1, task.steps + 1), numbers, strict=False):
            slots = _slots(program, scalars)
            execution = Execution(program=program.digest, slots=slots, hyper=unchanged, reads=UNKNOWN_READS)
            yield program, execution, data.batch(step)

    return _write(out, declared, state, steps(), task.steps, key, progress)


def order_run(run: RunFolder, out: Path, key: SigningKey, progress: Progress | None = None) -> str:
    """Order the steps of a recorded run again, from its initial state; as ``order_preset``.

    Raises:
        CallerError: besides, a step is no training, as an evaluation is none.
    """
    last, batches = run.committed, run.batches()
    if last < 1:
        raise CallerError(f"{run.name} has not committed to any step")

    def steps() -> Iterator[_Step]:
        for leaf in map(run.leaf, range(1, last + 1)):
            ran = execution_of(leaf)
            if not leaf.trains:
                raise CallerError(
                    f"step {leaf.step} of {run.name} is of kind {leaf.kind}: only training steps can be ordered again. "
                    "Order inference with `chipwitness task infer`"
                )
            execution = Execution(program=ran.program, slots=ran.slots, hyper=ran.hyper, reads=UNKNOWN_READS)
            yield run.program(ran.program), execution, batches.batch(leaf.step)

    return _write(out, run.declared, run.checkpoint(0), steps(), last, key, progress)


def order_inference(
    asked: Inference, weights: Mapping[str, Tensor], out: Path, key: SigningKey, progress: Progress | None = None
) -> str:
    """Order answers to prompts by a model of these weights, one a step; as ``order_preset``."""
    inferred = asked.derive(weights)
    declared, program = inferred.declaration, inferred.program
    execution = Execution(program=program.digest, slots={}, hyper=({},), reads=UNKNOWN_READS)
    steps = ((program, execution, batch) for batch in asked.batches())
    return _write(out, declared, inferred.state, steps, len(asked.prompts), key, progress)


@dataclass(slots=True)
class _Files:
    """A task's files as they are written."""

    folder: Path
    lengths: dict[str, int] = field(default_factory=dict)

    def add(self, content: bytes) -> str:
        """Write a file, and return its SHA-256."""
        name = hashlib.sha256(content).hexdigest()
        if name not in self.lengths:
            write_whole(self.folder / "files" / name, content)
            self.lengths[name] = len(content)
        return name


def _write(
    out: Path,
    base: Declaration,
    state: Mapping[str, Tensor],
    steps: Iterable[_Step],
    count: int,
    key: SigningKey,
    progress: Progress | None,
) -> str:
    """Write the task's folder: whole, or not at all."""
    if out.exists():
        raise CallerError(f"{out} exists already; choose another --out")
    draft = out.with_name(f".{out.name}.new")
    shutil.rmtree(draft, ignore_errors=True)
    (draft / "files").mkdir(parents=True)
    try:
        envelope = _ordered(_Files(draft), base, state, steps, count, progress).sign(key)
        write_whole(draft / TASK, envelope)
        draft.rename(out)
    except EvidenceError as error:
        raise CallerError(str(error)) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return hashlib.sha256(envelope).hexdigest()


def _ordered(
    files: _Files,
    base: Declaration,
    state: Mapping[str, Tensor],
    steps: Iterable[_Step],
    count: int,
    progress: Progress | None,
) -> Order:
    _, root = base.empty_memory(torch.device("cpu")).restore(state)
    declared = replace(
        base, recipe=None, shares=(1,), origin=Origin(state=str(root.root)), length=count, keep=None, steps=count
    )
    programs: dict[str, Admitted] = {}
    constants: dict[str, str] = {}
    ordered = []
    for number, (program, execution, batch) in enumerate(steps, 1):
        if program.digest not in programs:
            programs[program.digest] = Admitted.of(program)
            files.add(program.encoded)
            if program.apart_bytes:
                constants[program.digest] = files.add(program.apart)
        ordered.append(OrderedStep(execution=execution, batch=files.add(encode_state(batch))))
        if progress is not None:
            progress(number, count, "")
    return Order(
        declaration=declared,
        programs=programs,
        constants=constants,
        start=files.add(encode_state(state)),
        steps=tuple(ordered),
        files=files.lengths,
        signed=datetime.now(UTC).strftime(TIME),
    )


def _slots(program: Program, scalars: Iterable[float]) -> dict[str, tuple[int, ...]]:
    """Each value that differs from the program's own, with the numbers of its scalars."""
    slots: dict[str, list[int]] = {}
    for number, (value, own) in enumerate(zip(scalars, program.scalars, strict=True)):
        if value.hex() != own:
            slots.setdefault(value.hex(), []).append(number)
    return {text: tuple(numbers) for text, numbers in slots.items()}
