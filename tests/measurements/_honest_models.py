"""Four small models that are no presets, and batches for them: what ``honest`` records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["MODELS", "Model"]

Batch = dict[str, Tensor]

_CLASSES = 5
_LENGTH = 6
_WIDTH = 8


class _Attention(nn.Module):
    """One pre-norm block of causal attention over embedded tokens; logits for the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_CLASSES, _WIDTH)
        self.before, self.after = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.heads, self.join = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.feed = nn.Sequential(nn.Linear(_WIDTH, 16), nn.GELU(), nn.Linear(16, _WIDTH))
        self.logits = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        samples, length, width = x.shape
        query, key, value = self.heads(self.before(x)).view(samples, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(seen.transpose(1, 2).reshape(samples, length, width))
        logits: Tensor = self.logits(x + self.feed(self.after(x)))
        return logits


class _Recurrent(nn.Module):
    """A gated cell, unrolled in Python; logits from its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.kept = nn.Linear(3, 2 * _WIDTH), nn.Linear(_WIDTH, 2 * _WIDTH, bias=False)
        self.logits = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[0], _WIDTH)
        for moment in x.unbind(1):
            gate, new = (self.given(moment) + self.kept(state)).chunk(2, 1)
            gate = torch.sigmoid(gate)
            state = gate * state + (1 - gate) * torch.tanh(new)
        logits: Tensor = self.logits(state)
        return logits


def _convolutions() -> nn.Module:
    """One channel of 28 × 28 places."""
    layers = (nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(294, _CLASSES))
    return nn.Sequential(*layers)


def _norms() -> nn.Module:
    """Batch statistics over samples and places, and dropout."""
    first = (nn.Conv1d(3, _WIDTH, 3, padding=1), nn.BatchNorm1d(_WIDTH), nn.SiLU(), nn.Dropout(0.2))
    return nn.Sequential(*first, nn.Flatten(), nn.Linear(_WIDTH * _LENGTH, _CLASSES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """How to make a model, and the shape of a sample: None for tokens, each predicted from those before it."""

    make: Callable[[], nn.Module]
    sample: tuple[int, ...] | None

    def batch(self, size: int, generator: torch.Generator) -> Batch:
        """Random samples and labels."""
        if self.sample is None:
            return {"tokens": torch.randint(_CLASSES, (size, _LENGTH + 1), generator=generator)}
        labels = torch.randint(_CLASSES, (size,), generator=generator)
        return {"x": torch.randn(size, *self.sample, generator=generator), "y": labels}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross-entropy."""
        if self.sample is None:
            tokens = batch["tokens"]
            return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        return functional.cross_entropy(model(batch["x"]), batch["y"])


MODELS = {
    "convolutions": Model(make=_convolutions, sample=(1, 28, 28)),
    "attention": Model(make=_Attention, sample=None),
    "norms": Model(make=_norms, sample=(3, _LENGTH)),
    "recurrent": Model(make=_Recurrent, sample=(_LENGTH, 3)),
}
