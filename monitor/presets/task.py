"""The task of a run: everything that decides the bits of training, declared before it starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from monitor.numerics import DECLARABLE
from monitor.presets import preset

__all__ = ["OPTIMIZERS", "Task", "draw_order"]

OPTIMIZERS = ("adamw", "sgd")
_KINDS: Mapping[str, tuple[type, str]] = {
    "str": (str, "text"),
    "float": (float, "a number"),
    "int": (int, "a whole number"),
}
_MOST = {"steps": 99_999_999, "batch_size": 1 << 16, "checkpoint_every": 99_999_999, "shards": 4096, "keep": 99_999_999}
_LARGEST = 3.0e38
_RANGES: Mapping[str, tuple[float, float, str]] = {
    **{name: (1, most + 1, f"be at least 1 and at most {most}") for name, most in _MOST.items()},
    **dict.fromkeys(
        ("learning_rate", "weight_decay", "epsilon"), (0, _LARGEST, "be a number of at least 0 in FP32's range")
    ),
    **dict.fromkeys(("momentum", "beta_1", "beta_2"), (0, 1, "be at least 0 and less than 1")),
    "seed": (0, 1 << 63, "lie in 0 … 2^63-1"),
    "warmup": (0, math.inf, "be at least 0"),
}
"""The least value, the one that it does not reach, and both in words."""


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
            kind, words = _KINDS[str(field.type).removesuffix(" | None")]
            if type(value) is not kind and (value is not None or field.name != "keep"):
                raise CallerError(f"{field.name} must be {words}, not {value!r}")
        preset(self.preset)
        for name, (least, below, words) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value < below:
                raise CallerError(f"{name} must {words}, not {value}")
        for name, known in (("optimizer", OPTIMIZERS), ("numerics", DECLARABLE)):
            if getattr(self, name) not in known:
                raise CallerError(f"unknown {name} {getattr(self, name)!r}; known: {', '.join(known)}")

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

    def to_json(self) -> dict[str, object]:
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
        raise CallerError(f"the run takes {needed} samples, but it can commit to at most {limits.PLACES.most}")
    epochs = [generator.permutation(available) for _ in range(-(-needed // available))]
    return np.concatenate(epochs)[:needed].astype(np.int64).reshape(task.steps, task.batch_size)
