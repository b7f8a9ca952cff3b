"""``transformers.Trainer`` under a recorder: its own loop, with each optimizer step as one recorded step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from firmware_sim.errors import CallerError
from monitor.adapters.host import on_host
from monitor.adapters.rates import schedule_of
from monitor.recording.recorder import Recorder

__all__ = ["record_trainer"]


def record_trainer(trainer: Trainer, *, out: str | Path, resume: bool = False, **options: Any) -> RecordedLoop:
    """Record what a trainer trains from now on.

        trainer = Trainer(model, TrainingArguments("checkpoints"), train_dataset=data)
        record_trainer(trainer, out="RUN")
        trainer.train()

    Forward, backward, clipping and the optimizer's step, over all batches that are accumulated, are one step; each
    batch that the trainer evaluates is an evaluation. What it counts, logs and saves goes on between them. The learning
    rates of a scheduler that knows them beforehand are declared as a schedule. Modules that
    the trainer holds apart from its model, like the frozen reference of a preference loss, are part of the state unless
    ``state`` says what is.

    Args:
        trainer: not training yet, on one process.
        out: run folder, as for ``Recorder``.
        resume: go on with a run that was killed. The trainer starts from its beginning, with the same arguments, and
            computes nothing until it comes to the first step that is not recorded.
        options: of ``Recorder``, or of ``Recorder.resume``.

    Returns:
        The callback, whose ``recorder`` is there once training has begun.

    Raises:
        CallerError: here or when training begins, on arguments that cannot be recorded.
    """
    arguments = trainer.args
    refused = {
        "more than one process": arguments.world_size > 1 or arguments.n_gpu > 1,
        "neftune_noise_alpha": trainer.neftune_noise_alpha is not None,
        "FSDP or DeepSpeed": trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled,
    }
    for name, given in refused.items():
        if given:
            raise CallerError(f"a trainer with {name} cannot be recorded; train without it")
    loop = RecordedLoop(trainer, Path(out), resume, options)
    trainer.add_callback(loop)
    return loop


class RecordedLoop(TrainerCallback):
    """Takes each update of a trainer inside a recorded step, and hands its numbers to the trainer's own accounting.

    The trainer asks for batches, gradients, their norm and the update one after another. The last batch of an update is
    where all of it is computed; what the trainer asks for later is answered with what was found there.

    Attributes:
        recorder: from the beginning of training on.
    """

    recorder: Recorder

    def __init__(self, trainer: Any, out: Path, resume: bool, options: Mapping[str, Any]) -> None:
        self._trainer, self._out, self._resume, self._options = trainer, out, resume, options
        self._batches: list[Any] = []
        self._items: Any = None
        self._waiting = self._recorded = 0
        self._evaluated: list[float | None] = []
        self._norm: Tensor | None = None
        self._fetch, self._compute, self._clip, self._predict = (
            trainer.get_batch_samples,
            trainer.training_step,
            trainer._clip_grad_norm,
            trainer.prediction_step,
        )
        self._optimizer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Adopt model and optimizer as the trainer has prepared them, and come between it and its updates."""
        trainer = self._trainer
        self._optimizer = trainer.optimizer
        options = {"state": _other_modules(trainer), **self._options}
        if self._resume:
            self.recorder = Recorder.resume(trainer.model, self._optimizer, out=self._out, **options)
            self._recorded, self._evaluated = self.recorder.steps, list(self.recorder.evaluations)
            self._optimizer._opt_called = True  # or its scheduler would warn while nothing is computed
        else:
            options = {"schedule": schedule_of(trainer.lr_scheduler, state.max_steps), **options}
            self.recorder = Recorder(trainer.model, self._optimizer, out=self._out, **options)
        trainer.get_batch_samples, trainer.training_step = self._collect, self._take
        trainer.prediction_step = self._evaluate
        trainer._clip_grad_norm = lambda model: self._norm
        trainer.optimizer = _Stepped(self._optimizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Close the run, and give the trainer back."""
        trainer, trainer.optimizer = self._trainer, self._optimizer
        del trainer.get_batch_samples, trainer.training_step, trainer._clip_grad_norm, trainer.prediction_step
        trainer.remove_callback(self)
        self.recorder.finish()

    def _collect(self, *given: Any) -> tuple[list[Any], Any]:
        self._batches, self._items = self._fetch(*given)
        self._waiting = len(self._batches)
        return self._batches, self._items

    def _take(self, model: nn.Module, inputs: Any, items: Any = None) -> Tensor:
        """Compute nothing for a batch that others follow, and for the last one the whole update; returns the loss."""
        self._waiting -= 1
        nothing = torch.zeros((), device=self._trainer.args.device)
        if self._waiting:
            return nothing
        if self._recorded:
            self._recorded, self._norm = self._recorded - 1, nothing
            return nothing
        with self.recorder.step({"batches": self._batches, "items": self._items}) as step:
            losses = [self._compute(model, batch, self._items) for batch in self._batches]
            loss = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
            step.commit(loss)
            clips = self._trainer.args.max_grad_norm > 0
            norm = self._clip(model) if clips else None
            self._optimizer.step()
        self._norm = None if norm is None else on_host(norm)
        return on_host(loss)  # type: ignore[no-any-return]

    def _evaluate(self, model: nn.Module, inputs: Any, *options: Any, **named: Any) -> Any:
        """Loss, outputs and labels of a batch; of one that was evaluated before the process died, the loss alone."""
        if self._evaluated:
            loss = self._evaluated.pop(0)
            return (None if loss is None else torch.tensor(loss)), None, None
        with self.recorder.evaluation(inputs) as evaluation:
            predicted = self._predict(model, inputs, *options, **named)
            if predicted[0] is not None:
                evaluation.commit(predicted[0])
        return on_host(predicted)


def _other_modules(trainer: Any) -> dict[str, nn.Module]:
    """Modules among a trainer's attributes that hold tensors which neither its model nor one named before holds."""
    held = [*trainer.model.parameters(), *trainer.model.buffers()]
    known, found = set(map(id, held)), {}
    for name, thing in vars(trainer).items():
        if isinstance(thing, nn.Module):
            new = {id(tensor) for tensor in (*thing.parameters(), *thing.buffers())} - known
            if new:
                known, found[name] = known | new, thing
    return found


class _Stepped:
    """An optimizer whose step has been taken already."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: object = None) -> None:
        """Nothing."""
