"""The task of a run: everything that decides the bits of training, declared before it starts."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from monitor.numerics import DECLARABLE
from monitor.presets import preset

__all__ = ["OPTIMIZERS", "Task", "draw_order"]

OPTIMIZERS = ("adamw", "sgd")
_MOST = {"steps": 99_999_999, "batch_size": 1 << 16, "checkpoint_every": 99_999_999, "shards": 4096, "keep": 99_999_999}
_LARGEST = 3.0e38


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Hyper-parameters of one run (part of M in Shavit 2023, section 4.1).

    Attributes:
        preset: name of the model, data set and loss.
        seed: of the initial weights and of the data order.
        steps: optimizer steps of the whole run.
        warmup: steps over which the learning rate rises linearly to ``learning_rate``; 0 for none.
        checkpoint_every: steps from one full state W_i to the next (k in the papers).
        shards: number of chips that the device memory is spread over.
        keep: how many of the newest checkpoints stay on disk, plus sparser ones before; None for all.
    """

    preset: str
    seed: int
    steps: int
    batch_size: int
    optimizer: str
    learning_rate: float
    weight_decay: float
    momentum: float = 0.9
    beta_1: float = 0.9
    beta_2: float = 0.95
    epsilon: float = 1e-8
    warmup: int = 0
    numerics: str = "rounded"
    checkpoint_every: int = 4
    shards: int = 4
    keep: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "str" and type(value) is not str:
                raise CallerError(f"{field.name} must be text, not {value!r}")
            if field.type == "float" and type(value) is not float:
                raise CallerError(f"{field.name} must be a number, not {value!r}")
            if field.type == "int | None" and value is None:
                continue
            if str(field.type).startswith("int") and type(value) is not int:
                raise CallerError(f"{field.name} must be a whole number, not {value!r}")
        preset(self.preset)
        for name, most in _MOST.items():
            if getattr(self, name) is not None and not 1 <= getattr(self, name) <= most:
                raise CallerError(f"{name} must be at least 1 and at most {most}, not {getattr(self, name)}")
        for name in ("learning_rate", "weight_decay", "momentum", "beta_1", "beta_2", "epsilon"):
            if not 0 <= getattr(self, name) < _LARGEST:
                raise CallerError(f"{name} must be a number of at least 0 in FP32's range, not {getattr(self, name)}")
        for name in ("momentum", "beta_1", "beta_2"):
            if getattr(self, name) >= 1:
                raise CallerError(f"{name} must be less than 1, not {getattr(self, name)}")
        if not 0 <= self.seed < 1 << 63:
            raise CallerError(f"seed must lie in 0 … 2^63-1, not {self.seed}")
        if self.warmup < 0:
            raise CallerError(f"warmup must be at least 0, not {self.warmup}")
        if self.optimizer not in OPTIMIZERS:
            raise CallerError(f"unknown optimizer {self.optimizer!r}; known: {', '.join(OPTIMIZERS)}")
        if self.numerics not in DECLARABLE:
            raise CallerError(f"unknown numerics {self.numerics!r}; known: {', '.join(DECLARABLE)}")

    @classmethod
    def for_preset(cls, name: str, *, seed: int, steps: int, **changes: Any) -> Task:
        """Return the preset's default task with the changes that are not None."""
        entry = preset(name)
        values: dict[str, Any] = {
            "optimizer": entry.optimizer,
            "learning_rate": entry.learning_rate,
            "weight_decay": entry.weight_decay,
            "batch_size": entry.batch_size,
        }
        values.update({key: value for key, value in changes.items() if value is not None})
        return cls(preset=name, seed=seed, steps=steps, **values)

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of step 1, 2, … after linear warm-up, in IEEE double."""
        if self.warmup and step < self.warmup:
            return self.learning_rate * (step / self.warmup)
        return self.learning_rate

    def to_json(self) -> dict[str, Any]:
        """Return the task as JSON-able values."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Task:
        """Parse what ``to_json`` returned; EvidenceError on anything missing, extra or out of range."""
        if not isinstance(data, dict) or set(data) != {field.name for field in fields(cls)}:
            raise EvidenceError("the task in the metadata has missing or extra keys")
        try:
            return cls(**data)
        except CallerError as error:
            raise EvidenceError(f"the task in the metadata is invalid: {error}") from None


def draw_order(task: Task, available: int) -> np.ndarray:
    """Sample numbers of each step's batch, int64 [steps, batch_size]: a fresh permutation for each epoch."""
    if available < task.batch_size:
        raise CallerError(f"the data hold {available} samples, fewer than one batch of {task.batch_size}")
    generator = np.random.Generator(np.random.Philox(key=task.seed))
    needed = task.steps * task.batch_size
    if needed > limits.PLACES.most:
        raise CallerError(f"the run takes {needed} samples; at most {limits.PLACES.most} can be committed to")
    epochs = [generator.permutation(available) for _ in range(-(-needed // available))]
    return np.concatenate(epochs)[:needed].astype(np.int64).reshape(task.steps, task.batch_size)
