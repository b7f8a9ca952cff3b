"""The one-process program of a distributed step, found on shapes alone: no arithmetic, no memory for the model.

A twin of the model without values takes each step as one process would, under a capture. What it computes with besides
shapes (the optimizer's counters, its numbers) is the host's, and real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from firmware_sim.errors import CallerError
from firmware_sim.evidence import TensorKey
from monitor import numerics
from monitor.distributed.job import Job
from monitor.numerics.session import plain_kernels
from monitor.programs.batches import flatten_batch
from monitor.programs.capture import Capture
from monitor.programs.keys import RecordedKeys, step_seed
from monitor.programs.watching import WriteWatch
from monitor.recording.elsewhere import TakenElsewhere
from monitor.recording.micro_batches import micro_batches
from monitor.recording.state import LoopState
from monitor.recording.updates import OptimizerUpdates

__all__ = ["Shadow"]

_FACTORIES = frozenset(
    (
        *(torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros),
        *(torch.rand, torch.randint, torch.randn, torch.randperm, torch.tril_indices, torch.triu_indices),
    )
)
"""Functions whose results are given by shapes and numbers, on a device that may be left out."""


class _Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes the key of each random operator, as the one who computes it does."""

    def __init__(self, session: numerics.Session, keys: RecordedKeys) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._session, self._keys = session, keys

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            with self._session.aside():
                self._keys()
        return func(*args, **(kwargs or {}))


class _OnShapes(TorchFunctionMode):
    """What a model makes anew without naming a device lies where its parameters do."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTORIES and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": torch.device("meta")}
        return func(*args, **kwargs)


class Shadow:
    """A job's model and optimizer on the meta device."""

    def __init__(self, job: Job, seed: int) -> None:
        self._job, self._seed = replace(job, loss=_on_shapes(job.loss)), seed
        with torch.device("meta"):
            model = job.model()
        self._model, self._optimizer = model, job.optimizer(iter(dict(model.named_parameters()).values()))
        self._loop = LoopState(model, self._optimizer, (1,))
        self._updates = OptimizerUpdates(self._optimizer)

    def load(self, state: Mapping[TensorKey, Tensor]) -> None:
        """Go on from what a model and its optimizer hold; the numbers that the optimizer counts lie on the host."""
        with torch.no_grad():
            for key, tensor in self._loop.memory.tensors.items():
                if key in state and tensor.device.type != "meta":
                    tensor.copy_(state[key])
        self._loop.hold({f"{kind}/{name}" for kind, name in state})

    def take(self, step: int, batch: object) -> TakenElsewhere:
        """Take the next step on shapes.

        Raises:
            CallerError: the step reads values that only arithmetic gives, or a batch whose tensors share memory.
        """
        keys = RecordedKeys(self._seed, step)
        capture = Capture(keys, WriteWatch(step))
        shapes = _without_values(batch)
        present = {name: tensor for name, tensor in self._loop.current().items() if tensor is not None}
        capture.declare_inputs({name: each.detach() for name, each in present.items()}, _entries(batch, shapes))
        self._updates.begin(capture, self._updates.used)
        random = torch.get_rng_state()
        torch.default_generator.manual_seed(step_seed(self._seed, step))
        try:
            with plain_kernels, numerics.recording("native", observer=capture) as session, _Draws(session, keys):
                self._optimizer.zero_grad()
                parts = micro_batches(shapes, self._job.micro_batches, dict(self._model.named_parameters()), keys)
                loss = self._job.take_step(self._model, self._optimizer, parts)
        except (NotImplementedError, RuntimeError) as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CallerError(f"the step's program depends on values, so that shapes do not give it: {text}") from None
        finally:
            torch.set_rng_state(random)
            self._updates.end()
        state = self._loop.current()
        return TakenElsewhere(capture, self._updates, state, loss, self._loop.settle)


def _on_shapes(loss: Callable[[nn.Module, Any], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    def taken(model: nn.Module, part: Any) -> Tensor:
        with _OnShapes():
            return loss(model, part)

    return taken


def _without_values(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return torch.empty_strided(batch.shape, batch.stride(), dtype=batch.dtype, device="meta")
    if isinstance(batch, Mapping):
        return {name: _without_values(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)([_without_values(value) for value in batch])
    return batch


def _entries(batch: object, shapes: object) -> dict[str, Tensor]:
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

    walk("", shapes)
    if set(named) != set(flatten_batch(batch)):
        raise CallerError("tensors of a distributed job's batch share memory; clone one of them")
    return dict(sorted(named.items()))
