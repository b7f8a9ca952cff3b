"""``gpt2-117m``: GPT-2's smallest model (Radford et al. 2019) with dropout, at the papers' batch of 8 × 64 tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from firmware_sim.errors import CallerError
from monitor.presets._dropout import Masks, MaskStream
from monitor.presets._gpt import causal_weights, next_token_loss, text_windows
from monitor.presets._preset import Preset, Samples

__all__ = ["GPT2", "GPT2_117M", "GPT2Config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config:
    """Sizes of a GPT-2; the defaults are the preset's. GPT-2's own context is 1024, the papers train on 64 tokens."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    context: int = 64
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.vocabulary, self.context) < 1:
            raise CallerError("the sizes of a GPT-2 must be at least 1")
        if self.width % self.heads:
            raise CallerError(f"a width of {self.width} cannot be divided by {self.heads} heads")


class _Block(nn.Module):
    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self._heads = config.heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor, masks: Masks) -> Tensor:
        batch, length, _ = x.shape
        keep_weights, keep_mixed, keep_mlp = masks.draw(
            x.dtype, (batch, self._heads, length, length), tuple(x.shape), tuple(x.shape)
        )
        x = x + self._attend(self.norm_1(x), keep_weights) * keep_mixed
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh")) * keep_mlp  # type: ignore[no-any-return]

    def _attend(self, x: Tensor, keep_weights: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, self._heads, width // self._heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = causal_weights(query, key) * keep_weights @ value
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class GPT2(nn.Module):
    """GPT-2 with the head tied to the token embedding, and dropout after embedding, attention and residual branches."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.masks = MaskStream(config.dropout)
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, length, vocabulary] of tokens int64 [batch, length]."""
        masks = self.masks()
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        (keep,) = masks.draw(x.dtype, tuple(x.shape))
        x = x * keep
        for block in self.blocks:
            x = block(x, masks)
        return functional.linear(self.norm(x), self.tokens.weight)


def preset_of(name: str, summary: str, config: GPT2Config) -> Preset:
    """A preset that trains a GPT-2 of that size on pairs of bytes."""
    return Preset(
        name=name,
        summary=summary,
        build=lambda: GPT2(config),
        samples=_samples(name, config),
        loss=next_token_loss,
        optimizer="adamw",
        learning_rate=3e-4,
        weight_decay=0.1,
        batch_size=8,
    )


def _samples(name: str, config: GPT2Config) -> Callable[[Path | None], Samples]:
    """Windows of context + 1 tokens: {"tokens": int32 [n, context + 1]}.

    GPT-2's own vocabulary cannot be downloaded: a token is two bytes of text, number (256·first + second) mod
    vocabulary, which at GPT-2's vocabulary is one to one on ASCII text.
    """

    def read(source: Path | None) -> Samples:
        pairs = text_windows(source, 2 * (config.context + 1), name).astype(np.int32)
        return {"tokens": (pairs[:, 0::2] * 256 + pairs[:, 1::2]) % config.vocabulary}

    return read


GPT2_117M = preset_of(
    "gpt2-117m",
    "GPT-2: 12 layers of width 768, vocabulary 50257, dropout 0.1, on pairs of bytes of text",
    GPT2Config(),
)
