"""Lightning's trainer under a recorder: a callback that makes each optimizer step one recorded step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch.optim import Optimizer

from firmware_sim.errors import CallerError
from monitor.adapters.host import on_host
from monitor.adapters.rates import schedule_of
from monitor.loops.objects import named_objects
from monitor.recording.recorder import Recorder

__all__ = ["RecordedFit"]

_PRECISIONS = ("32-true", "32", "bf16-mixed", "16-mixed", "bf16-true", "16-true")


class RecordedFit(pl.Callback):
    """Records what ``Trainer.fit`` trains.

        trainer = Trainer(max_epochs=1, callbacks=[RecordedFit(out="RUN")])
        trainer.fit(module, loader)

    Forward, backward, clipping and the optimizer's step of a batch are one step, and ``validation_step`` of a batch is
    an evaluation. What they log is logged when the step has ended; what is passed over after a kill logs nothing. The
    rates of one scheduler that is stepped with every batch are declared as a schedule, but for FP16 with a gradient
    scaler, which passes over updates that the scheduler counts.

    Args:
        out: run folder, as for ``Recorder``.
        resume: go on with a run that was killed. The trainer starts from its beginning, with the same arguments, and
            computes nothing until it comes to the first step that is not recorded.
        options: of ``Recorder``, or of ``Recorder.resume``.

    Attributes:
        recorder: from the beginning of training on.

    Raises:
        CallerError: when training begins, on settings that cannot be recorded.
    """

    recorder: Recorder

    def __init__(self, *, out: str | Path, resume: bool = False, **options: Any) -> None:
        self._out, self._resume, self._options = Path(out), resume, options
        self._batch: Any = None
        self._recorded = self._evaluated = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Adopt module and optimizers as the trainer has prepared them."""
        refused = {
            "several processes": trainer.world_size > 1,
            f"precision {trainer.precision}": str(trainer.precision) not in _PRECISIONS,
            "accumulate_grad_batches": trainer.accumulate_grad_batches != 1,
            "manual optimization": not pl_module.automatic_optimization,
            "a custom optimizer_step": type(pl_module).optimizer_step is not pl.LightningModule.optimizer_step,
            "several optimizers": len(trainer.optimizers) != 1,
        }
        for name, given in refused.items():
            if given:
                raise CallerError(f"a fit with {name} cannot be recorded; train without it, or use Recorder itself")
        optimizer: Any = trainer.optimizers[0]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        objects = named_objects(self._options.pop("state", ()))
        self._options["state"] = objects if scaler is None else {"scaler": scaler, **objects}
        if self._resume:
            self.recorder = Recorder.resume(pl_module, optimizer, out=self._out, **self._options)
            self._recorded, self._evaluated = self.recorder.steps, len(self.recorder.evaluations)
            optimizer._opt_called = True  # or its scheduler would warn while nothing is computed
        else:
            configs = [each for each in trainer.lr_scheduler_configs if each.interval == "step" and each.frequency == 1]
            found = configs[0].scheduler if len(configs) == 1 and scaler is None else None
            options = {"schedule": schedule_of(found, int(trainer.estimated_stepping_batches)), **self._options}
            self.recorder = Recorder(pl_module, optimizer, out=self._out, **options)
        pl_module.optimizer_step = self._recorded_step(pl_module, trainer.precision_plugin, optimizer)
        pl_module.validation_step = self._recorded_evaluation(pl_module, pl_module.validation_step)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, index: int) -> None:
        """Note the batch, which the optimizer's step does not receive."""
        self._batch = batch

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Close the run, and give the module back."""
        del pl_module.optimizer_step, pl_module.validation_step
        self.recorder.finish()

    def _recorded_step(self, module: Any, plugin: Any, optimizer: Optimizer) -> Callable[..., None]:
        """What a module's optimizer step does, within a recorded one; the gradients come before the update begins."""
        scaler = getattr(plugin, "scaler", None)

        def step(epoch: int, index: int, wrapped: object, closure: Any) -> None:
            if self._recorded:
                self._recorded -= 1
                closure._result = ClosureResult(closure_loss=None)
                return
            with _logging_later(module, "training_step"), self.recorder.step(self._batch) as recorded:
                recorded.commit(closure())
                if scaler is not None:
                    scaler.unscale_(optimizer)
                plugin._after_closure(module, optimizer)
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()

        return step

    def _recorded_evaluation(self, module: Any, validate: Callable[..., Any]) -> Callable[..., Any]:
        """What a module's validation step does, within a recorded evaluation."""

        def step(batch: Any, *numbers: Any) -> Any:
            if self._evaluated:
                self._evaluated -= 1
                return None
            with _logging_later(module, "validation_step"), self.recorder.evaluation(batch):
                found = validate(batch, *numbers)
            return on_host(found)

        return step


@contextmanager
def _logging_later(module: Any, hook: str) -> Iterator[None]:
    """What a module logs while it is open, it logs at the end: the numbers alone, which lie in no chip's memory."""
    logged: list[tuple[Any, ...]] = []
    module.log = lambda name, value, *values, **options: logged.append((name, value, values, options))
    try:
        yield
    finally:
        del module.log
    before, module._current_fx_name = module._current_fx_name, hook
    for name, value, values, options in logged:
        module.log(name, on_host(value), *values, **options)
    module._current_fx_name = before
