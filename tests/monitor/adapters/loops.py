"""Loops of other libraries under adapters; ``python -m tests.monitor.adapters.loops KIND RUN STEP …`` lets each die.

The libraries are loaded once, and each loop has a process that is forked then.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from monitor import Recorder
from monitor.adapters.lightning import RecordedFit
from monitor.adapters.trainer import record_trainer

SEED = 3
Ended = Callable[[int], None]


class _Watch(TrainerCallback):
    def __init__(self, ended: Ended) -> None:
        self.ended = ended

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        self.ended(state.global_step)


def trainer(out: Path, ended: Ended, *, resume: bool = False, recorded: bool = True, **arguments: Any) -> Trainer:
    """The library's defaults: AdamW, linear decay, clipping, three epochs; a GPT-2 with dropout."""
    torch.manual_seed(SEED)
    size: dict[str, Any] = {
        "vocab_size": 64,
        "n_positions": 16,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "loss_type": "ForCausalLM",
    }
    model = GPT2LMHeadModel(GPT2Config(**size))
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (24, 8))]
    often: dict[str, Any] = {"eval_strategy": "epoch", "per_device_eval_batch_size": 2}
    settings = TrainingArguments(str(out) + ".library", disable_tqdm=True, **often, **arguments)
    made = Trainer(model, settings, train_dataset=data, eval_dataset=data[:4], callbacks=[_Watch(ended)])
    if recorded:
        record_trainer(made, out=out, resume=resume, **({} if resume else {"seed": SEED, "chips": 2}))
    made.train()
    return made


class Module(pl.LightningModule):
    """A regression that logs its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, y = batch
        self.log("validation", nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}


def batches() -> DataLoader[tuple[Tensor, ...]]:
    x = torch.randn(24, 4)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)


class _End(pl.Callback):
    def __init__(self, ended: Ended) -> None:
        self.ended = ended

    def on_train_batch_end(self, trainer: pl.Trainer, *objects: Any) -> None:
        self.ended(trainer.global_step)


def fit(out: Path, ended: Ended, *, resume: bool = False, **arguments: Any) -> pl.Trainer:
    """Two epochs, with clipping."""
    torch.manual_seed(SEED)
    recorded = RecordedFit(out=out, resume=resume, **({} if resume else {"seed": SEED, "chips": 2}))
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
    made = pl.Trainer(
        **quiet, accelerator="cpu", max_epochs=2, gradient_clip_val=1.0, enable_progress_bar=False,
        callbacks=[recorded, _End(ended)], **arguments,
    )  # fmt: skip
    made.fit(Module(), batches(), batches())
    return made


def accelerate(out: Path, ended: Ended, *, resume: bool = False, precision: str = "no") -> None:
    """What Accelerate prepares is handed to the recorder as it is; in FP16 with the scaler of a CUDA device."""
    torch.manual_seed(SEED)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    if precision == "fp16":
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu"), True
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), batches())
    if resume:
        recorder = Recorder.resume(model, optimizer, out=out)
    else:
        recorder = Recorder(model, optimizer, out=out, seed=SEED, chips=2)
    for number, (x, y) in enumerate(loader, start=1):
        if number <= recorder.steps:
            continue
        with recorder.step((x, y)) as step:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step.commit(loss)
        ended(number)
    recorder.finish()


def fit_in_fp16(out: Path, ended: Ended, *, resume: bool = False) -> pl.Trainer:
    """With the scaler that Lightning has on a CUDA device."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    return fit(out, ended, resume=resume, plugins=[plugin])


LOOPS: dict[str, Callable[..., object]] = {
    "trainer": trainer,
    "lightning": fit,
    "accelerate": accelerate,
    "trainer-bf16": functools.partial(trainer, bf16=True, use_cpu=True, num_train_epochs=1),
    "lightning-fp16": fit_in_fp16,
    "accelerate-fp16": functools.partial(accelerate, precision="fp16"),
}


def die(kind: str, out: Path, last: int) -> None:
    """Train until a step has ended, and die."""

    def ended(step: int) -> None:
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        LOOPS[kind](out, ended)
    finally:
        os._exit(1)


def main(words: list[str]) -> int:
    """Fork a process for each loop; 0 if all were killed where they should be."""
    ends = []
    for kind, out, last in zip(words[::3], words[1::3], words[2::3], strict=True):
        child = os.fork()
        if child == 0:
            die(kind, Path(out), int(last))
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return int(ends != [-signal.SIGKILL] * len(ends))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
