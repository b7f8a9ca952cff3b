"""Loops in mixed precision, plain and of libraries.

Small networks begin at random and learn real data: scikit-learn's handwritten digits, or the words of this project's
glossary. Each loop is written once. It takes a ``Recording``, which records it, goes on with it, or does nothing.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import signal
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from analysis.bench.origin import DATA
from monitor import Recorder
from monitor.presets._digits import digits

__all__ = ["LOOPS", "Loop", "Recording"]

_BATCH, _RATE, _WORDS = 32, 3e-3, 12
_FP16 = "with a scaler"


@dataclass(frozen=True)
class Recording:
    """How a loop is recorded.

    Attributes:
        out: run folder; None to train without a recorder.
        resume: go on with a run that died.
        dies_after: the process dies when this step has ended; 0 for never.
    """

    out: Path | None = None
    numerics: str = "exact"
    resume: bool = False
    dies_after: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Keywords of a recorder in the loop of another library."""
        begun = {} if self.resume else {"numerics": self.numerics, "chips": 1}
        return {"out": self.out, "resume": self.resume, **begun}

    def recorder(self, model: Any, optimizer: Any, *, state: Any = ()) -> Any:
        """A ``Recorder``, or what stands in its place."""
        if self.out is None:
            return _Plain()
        if self.resume:
            return Recorder.resume(model, optimizer, out=self.out, state=state)
        return Recorder(model, optimizer, out=self.out, numerics=self.numerics, chips=1, state=state)

    def ended(self, step: int) -> None:
        """A step has ended: the process may die."""
        if step == self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)


class _Plain:
    """A recorder that records nothing."""

    steps = 0

    @contextlib.contextmanager
    def step(self, batch: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(commit=lambda loss: None)

    def finish(self) -> None:
        """Nothing is to be finished."""


Train = Callable[[Recording, int, int], list[float]]
"""Trains with a recording, a seed and a number of steps; returns the losses, from the first step that was computed."""


@dataclass(frozen=True)
class Loop:
    """A loop, and the packages that it needs.

    Attributes:
        most: steps that it is trained for at most.
    """

    train: Train
    packages: tuple[str, ...] = field(default=())
    most: int = 1000


def _samples() -> tuple[Tensor, Tensor]:
    found = digits()
    pixels = torch.from_numpy(found["pixels"].reshape(-1, 64).astype(np.float32)) / 16
    return pixels, torch.from_numpy(found["label"].astype(np.int64))


def _batches(seed: int, steps: int, after: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    pixels, labels = _samples()
    order = np.random.default_rng(seed)
    for number in range(steps):
        chosen = torch.from_numpy(order.choice(len(labels), _BATCH, replace=False))
        if number >= after:
            yield pixels[chosen], labels[chosen]


def _loader(seed: int) -> DataLoader[tuple[Tensor, ...]]:
    order = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(*_samples()), batch_size=_BATCH, shuffle=True, generator=order, drop_last=True)


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 10))


def _autocast(dtype: torch.dtype) -> Train:
    def train(recording: Recording, seed: int, steps: int) -> list[float]:
        model, scaler = _network(), torch.amp.GradScaler("cpu", enabled=dtype is torch.float16, init_scale=1024.0)
        optimizer = torch.optim.AdamW(model.parameters(), _RATE)
        recorder, losses = recording.recorder(model, optimizer, state=[scaler]), []
        for pixels, labels in _batches(seed, steps, recorder.steps):
            with recorder.step((pixels, labels)) as step:
                with torch.autocast("cpu", dtype=dtype):
                    loss = functional.cross_entropy(model(pixels), labels)
                optimizer.zero_grad()
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                scaler.step(optimizer)
                scaler.update()
                step.commit(loss)
            losses.append(float(loss.detach()))
            recording.ended(len(losses))
        recorder.finish()
        return losses

    return train


def _masters(where: str) -> Train:
    """FP32 masters in the optimizer alone, in the model, or with BF16 working copies that are listed as state."""

    def train(recording: Recording, seed: int, steps: int) -> list[float]:
        model = _network()
        work = copy.deepcopy(model).to(torch.bfloat16)
        weights: list[nn.Parameter] = list(model.parameters())
        held, state = (model, {"work": work}) if where == "listed" else (work, {})
        if where == "model":
            held = nn.ModuleDict({"master": model, "work": work})
        elif where == "optimizer":
            weights = [nn.Parameter(each.detach().clone()) for each in weights]
        optimizer = torch.optim.AdamW(weights, _RATE)
        recorder, losses = recording.recorder(held, optimizer, state=state), []
        for pixels, labels in _batches(seed, steps, recorder.steps):
            with recorder.step((pixels, labels)) as step:
                loss = functional.cross_entropy(work(pixels.bfloat16()).float(), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                for master, each in zip(weights, work.parameters(), strict=True):
                    assert each.grad is not None
                    master.grad, each.grad = each.grad.float(), None
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for master, each in zip(weights, work.parameters(), strict=True):
                        each.copy_(master)
                step.commit(loss)
            losses.append(float(loss.detach()))
            recording.ended(len(losses))
        recorder.finish()
        return losses

    return train


def _accelerate(precision: str) -> Train:
    """What Accelerate prepares; in FP16 with the scaler that it has on a CUDA device alone."""

    def train(recording: Recording, seed: int, steps: int) -> list[float]:
        from accelerate import Accelerator

        _forget()
        accelerator = Accelerator(cpu=True, mixed_precision=precision)
        _give_scaler(accelerator, precision)
        model = _network()
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), _RATE), _loader(seed)
        )
        recorder, losses = recording.recorder(model, optimizer), []
        every = (batch for _ in range(1 + steps // len(loader)) for batch in loader)
        for number, (pixels, labels) in zip(range(steps), every, strict=False):
            if number < recorder.steps:
                continue
            with recorder.step((pixels, labels)) as step:
                loss = functional.cross_entropy(model(pixels), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step.commit(loss)
            losses.append(float(loss.detach()))
            recording.ended(number + 1)
        recorder.finish()
        return losses

    return train


def _lightning(precision: str) -> Train:
    """Lightning's flag; in FP16 by a plugin that has the scaler which Lightning has on a CUDA device alone."""

    def train(recording: Recording, seed: int, steps: int) -> list[float]:
        import lightning.pytorch as pl
        from lightning.pytorch.plugins import MixedPrecision

        from monitor.adapters.lightning import RecordedFit

        losses: list[float] = []

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = _network()

            def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
                loss = functional.cross_entropy(self.net(batch[0]), batch[1])
                self.log("loss", loss)
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), _RATE)

        class Watch(pl.Callback):
            def on_train_batch_end(self, trainer: Any, *objects: Any) -> None:
                losses.append(float(trainer.callback_metrics.get("loss", torch.nan)))
                recording.ended(trainer.global_step)

        quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary"), False)
        scaled = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))]
        flag: dict[str, Any] = {"precision": "bf16-mixed"} if precision == "bf16" else {"plugins": scaled}
        callbacks: list[pl.Callback] = (
            [Watch()] if recording.out is None else [RecordedFit(**recording.options), Watch()]
        )
        trainer = pl.Trainer(
            **quiet, **flag, accelerator="cpu", max_steps=steps, enable_progress_bar=False, callbacks=callbacks
        )
        trainer.fit(Module(), _loader(seed))
        return losses

    return train


def _trainer(precision: str) -> Train:
    """``transformers.Trainer`` by its flag; in FP16 with the scaler that Accelerate has on a CUDA device alone."""

    def train(recording: Recording, seed: int, steps: int) -> list[float]:
        from transformers import Trainer, TrainingArguments

        _forget()
        words, lines = _tokenizer(), _lines()
        rows = [words(line)["input_ids"] for line in lines]
        data = [{"input_ids": row, "labels": row} for row in rows]
        flag: dict[str, Any] = {precision: True, "learning_rate": _RATE}
        settings = TrainingArguments(**_settings(recording, seed, steps), **flag)
        return _run_trainer(Trainer(_language_model(len(words)), settings, train_dataset=data), recording, precision)

    return train


def _sft(precision: str) -> Train:
    """TRL's ``SFTTrainer`` with its defaults, BF16 and recomputed activations among them; or FP16 as ``_trainer``."""

    def train(recording: Recording, seed: int, steps: int) -> list[float]:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        _forget()
        words = _tokenizer()
        other = {} if precision == "bf16" else {"bf16": False, "fp16": True}
        settings = SFTConfig(**_settings(recording, seed, steps), **other)
        texts = Dataset.from_list([{"text": line} for line in _lines()])
        model = _language_model(len(words))
        made = SFTTrainer(model, settings, train_dataset=texts, processing_class=words)
        return _run_trainer(made, recording, precision)

    return train


def _settings(recording: Recording, seed: int, steps: int) -> dict[str, Any]:
    folder = tempfile.gettempdir() if recording.out is None else f"{recording.out}.library"
    quiet = {"disable_tqdm": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
    return {"output_dir": folder, "use_cpu": True, "max_steps": steps, "seed": seed, **quiet}


def _run_trainer(trainer: Any, recording: Recording, precision: str) -> list[float]:
    from transformers import TrainerCallback

    from monitor.adapters.trainer import record_trainer

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            recording.ended(state.global_step)

    _give_scaler(trainer.accelerator, precision)
    trainer.add_callback(Watch())
    if recording.out is not None:
        record_trainer(trainer, **recording.options)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _forget() -> None:
    """Let Accelerate, which keeps a process's precision, begin anew."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def _give_scaler(accelerator: Any, precision: str) -> None:
    if precision == "fp16":
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=1024.0), True


def _lines() -> list[str]:
    """The words of the glossary, a few a line, so that all batches have one shape and a run few programs."""
    words = re.findall(r"[a-z]+", (DATA / "glossary.md").read_text(encoding="utf-8").lower())
    return [" ".join(words[place : place + _WORDS]) for place in range(0, len(words) - _WORDS, _WORDS)]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<unk>", "<pad>", "<bos>", "<eos>"]
    teacher = trainers.WordLevelTrainer(vocab_size=256, special_tokens=special, show_progress=False)
    made.train_from_iterator(_lines(), teacher)
    names = dict(zip(("unk_token", "pad_token", "bos_token", "eos_token"), special, strict=True))
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=made, **names)


def _language_model(words: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": words, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    sizes |= {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    return LlamaForCausalLM(LlamaConfig(**sizes))


_TRAINER = ("transformers", "accelerate")
_LIBRARIES: Mapping[str, tuple[Callable[[str], Train], tuple[str, ...]]] = {
    "Accelerate": (_accelerate, ("accelerate",)),
    "Lightning": (_lightning, ("lightning",)),
    "Trainer": (_trainer, _TRAINER),
    "TRL's SFTTrainer": (_sft, ("trl", *_TRAINER)),
}
LOOPS: Mapping[str, Loop] = {
    "autocast BF16": Loop(_autocast(torch.bfloat16)),
    f"autocast FP16 {_FP16}": Loop(_autocast(torch.float16)),
    **{f"BF16 work, masters in the {where}": Loop(_masters(where)) for where in ("optimizer", "model")},
    "BF16 work listed as state, masters in the model": Loop(_masters("listed")),
    **{
        f"{name} {told}": Loop(make(precision), packages, 12)
        for name, (make, packages) in _LIBRARIES.items()
        for precision, told in (("bf16", "BF16"), ("fp16", f"FP16 {_FP16}"))
    },
}


def main(work: str, numerics: str, out: Path, seed: int, steps: int, last: int) -> None:
    """Train until a step has ended, and die."""
    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    LOOPS[work].train(Recording(out, numerics, dies_after=last), seed, steps)
