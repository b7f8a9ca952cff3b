"""The one-process program of a distributed step, found without values: no arithmetic, no memory for the model.

A twin of the model that is blank takes each step as one process would, under a capture. What it computes with besides
(the optimizer's counters, its numbers) has values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from firmware_sim.errors import CallerError
from firmware_sim.evidence import TensorKey
from monitor.distributed.blanks import Blank, Blanks
from monitor.distributed.job import Job
from monitor.distributed.job_state import buffers_of, held
from monitor.loops.optimizers import groups_of, load_groups
from monitor.programs.batches import flatten_batch
from monitor.programs.capture import Capture
from monitor.programs.keys import RecordedKeys, step_seed
from monitor.programs.memory_watch import WriteWatch
from monitor.programs.program import Program
from monitor.recording.micro_batches import micro_batches
from monitor.recording.remote_steps import TakenElsewhere
from monitor.recording.updates import OptimizerUpdates
from monitor.transcript import STEP

__all__ = ["Shadow"]


class Shadow:
    """A job's model and optimizer without values; ``declared`` are the hyper-parameters of a step without an update."""

    def __init__(self, job: Job, seed: int, declared: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._job, self._seed, self._blanks = job, seed, Blanks()
        with _given_by_shapes(), self._blanks.session():
            self._model = job.model()
            _leave_blank(self._model)
            self._optimizer = job.make_optimizer(dict(self._model.named_parameters()))
            self._scaler = job.scaler()
            self._buffers = buffers_of(self._model, self._scaler)
        self._optimizer.register_step_pre_hook(self._blanks.begin_update)
        self._optimizer.register_step_post_hook(self._blanks.end_update)
        self._updates = OptimizerUpdates(self._optimizer)
        self._declared = self._updates.used if declared is None else declared
        self._settle()

    def load(self, state: Mapping[TensorKey, Tensor]) -> None:
        """Go on from what a model and its optimizer hold; an update tells which of that are numbers."""
        parameters = dict(self._model.named_parameters())
        numbers = groups_of(self._optimizer)
        with _given_by_shapes(), self._blanks.session(), torch.no_grad():
            for parameter in parameters.values():
                parameter.grad = Blank.like(parameter) if parameter.requires_grad else None
            self._optimizer.step()
            for key, tensor in self._held().items():
                if key in state and not isinstance(tensor, Blank):
                    tensor.copy_(state[key])
        load_groups(self._optimizer, numbers)
        made = dict(self._optimizer.state)
        self._optimizer.state.clear()
        for name, parameter in parameters.items():
            if ("gradient", name) not in state:
                parameter.grad = None
            for key, value in made.get(parameter, {}).items():
                if ("optimizer", f"{name}/{key}") in state:
                    self._optimizer.state[parameter][key] = value
        self._settle()

    def take(
        self,
        step: int,
        batch: object,
        known: Iterable[Program],
        *,
        kind: str = STEP,
        groups: Sequence[Mapping[str, Any]] = (),
        reads: Sequence[Any] = (),
    ) -> TakenElsewhere:
        """Take the next step without values.

        Args:
            known: programs that it may run again.
            kind: ``STEP`` or ``EVALUATION``.
            groups: hyper-parameters that the ranks' optimizers took the step with; none for those of before.
            reads: values that the ranks read after their backward passes.

        Raises:
            CallerError: the step reads values that only arithmetic gives, or a batch whose tensors share memory.
        """
        keys = RecordedKeys(self._seed, step)
        capture = Capture(keys, WriteWatch(step), known=known)
        blank = _without_values(batch)
        capture.declare_inputs(self._state(), _entries(batch, blank))
        if groups:
            load_groups(self._optimizer, groups)
        self._updates.begin(capture, self._declared)
        random = torch.get_rng_state()
        torch.default_generator.manual_seed(step_seed(self._seed, step))
        try:
            with _given_by_shapes(), self._blanks.session(capture, keys):
                learning = dict(self._model.named_parameters()) if kind == STEP else {}
                parts = self._then_read(micro_batches(blank, self._job.micro_batches, learning, keys), reads)
                if kind == STEP:
                    loss = self._job.take_step(self._model, self._optimizer, self._scaler, parts)
                else:
                    loss = self._job.evaluate(self._model, parts)
        finally:
            self._blanks.reads = None
            torch.set_rng_state(random)
            self._updates.end()
        return TakenElsewhere(capture, self._updates, self._state(), loss, self._settle, kind)

    def _then_read(self, parts: Iterator[Any], values: Sequence[Any]) -> Iterator[Any]:
        """Micro-batches, after which a step may read values that ranks have read there."""
        yield from parts
        self._blanks.reads = list(values)

    def _held(self) -> dict[TensorKey, Tensor]:
        return held(dict(self._model.named_parameters()), self._buffers, self._optimizer)

    def _state(self) -> dict[str, Tensor]:
        return {f"{kind}/{name}": tensor for (kind, name), tensor in self._held().items()}

    def _settle(self) -> None:
        """Have each tensor of the state lie by itself, row by row, as it does in the memory of chips."""
        for parameter in self._model.parameters():
            parameter.data = _apart(parameter)
            if parameter.grad is not None:
                parameter.grad = _apart(parameter.grad)
        for buffer in self._buffers.values():
            buffer.data = _apart(buffer)
        for slots in self._optimizer.state.values():
            for key, value in slots.items():
                slots[key] = _apart(value) if isinstance(value, Tensor) else value


@contextmanager
def _given_by_shapes() -> Iterator[None]:
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CallerError(
            f"the step's program depends on the values of tensors, not only on their shapes: {text}"
        ) from None


def _leave_blank(model: nn.Module) -> None:
    """Take their values from parameters that were made of numbers."""
    blank: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not isinstance(parameter, Blank):
                found = blank.setdefault(parameter, nn.Parameter(Blank.like(parameter), parameter.requires_grad))
                setattr(module, name, found)


def _apart(tensor: Tensor) -> Tensor:
    return Blank.like(tensor) if isinstance(tensor, Blank) else tensor.detach()


def _without_values(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return Blank(torch.empty_strided(batch.shape, batch.stride(), dtype=batch.dtype, device="meta"))
    if isinstance(batch, Mapping):
        return {name: _without_values(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)([_without_values(value) for value in batch])
    return batch


def _entries(batch: object, blank: object) -> dict[str, Tensor]:
    """The tensors without values by the names that the batch's tensors have."""
    named: dict[str, Tensor] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Tensor):
            named[prefix or "batch"] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), item)
        elif isinstance(value, list | tuple):
            for number, item in enumerate(value):
                walk(f"{prefix}.{number}" if prefix else str(number), item)

    walk("", blank)
    if set(named) != set(flatten_batch(batch)):
        raise CallerError("tensors of a distributed job's batch share memory; clone one of them")
    return dict(sorted(named.items()))
