"""What a preset is: how to build a model, its samples and its loss."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from monitor.presets._dropout import MaskStream

__all__ = ["Preset", "Samples", "initialise"]

Samples = Mapping[str, np.ndarray]
"""Named arrays whose first axis is the sample: {"tokens": uint8 [n, length], ...}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A training task by name.

    Attributes:
        build: makes the model on the current default device, with any weights.
        samples: reads the data set, from the user's own file where the preset allows one.
        loss: scalar FP32 loss of the model on a batch of samples.
        optimizer: default optimizer, ``adamw`` or ``sgd``.
        context: most tokens that the model reads, where its tokens are the bytes of a text; None of other models.
    """

    name: str
    summary: str
    build: Callable[[], nn.Module]
    samples: Callable[[Path | None], Samples]
    loss: Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
    optimizer: str
    learning_rate: float
    weight_decay: float
    batch_size: int
    context: int | None = None


def initialise(model: nn.Module, seed: int) -> None:
    """Set every parameter and dropout key from the seed with integers and single IEEE operations, so all devices agree.

    Matrices are uniform on ±1/√fan_in, embeddings on ±0.035 (standard deviation 0.02), gains 1, biases 0. The bits
    come from Philox keyed by the seed and the parameter's name. A known generator and a short seed are what stops a
    lab from splitting one long run into a chain of short ones (Shavit 2023, section 4).
    """
    with torch.no_grad():
        for prefix, module in model.named_modules():
            if isinstance(module, MaskStream):
                module.seed_from(seed)
            for name, parameter in module.named_parameters(recurse=False):
                full = f"{prefix}.{name}" if prefix else name
                if name == "bias":
                    parameter.zero_()
                elif parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    fan_in = parameter[0].numel()
                    bound = 0.035 if isinstance(module, nn.Embedding) else 1.0 / math.sqrt(fan_in)
                    values = _uniform(seed, full, parameter.numel()) * np.float32(bound)
                    parameter.copy_(torch.from_numpy(values.reshape(parameter.shape)))


def _uniform(seed: int, name: str, count: int) -> np.ndarray:
    """FP32 values on the grid 2^-23 in [-1, 1), exact in every arithmetic."""
    key = hashlib.sha256(f"chipwitness/init/{seed}/{name}".encode()).digest()
    raw = np.random.Philox(key=np.frombuffer(key[:16], dtype="<u8")).random_raw(count)
    return ((raw >> np.uint64(40)).astype(np.int64) - (1 << 23)).astype(np.float32) * np.float32(2.0**-23)
