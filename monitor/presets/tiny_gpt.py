"""``tiny-gpt``: a byte-level GPT on English text."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from monitor.presets._gpt import CONTEXT, byte_level, causal_weights

__all__ = ["TINY_GPT"]

_WIDTH = 64
_HEADS = 4
_LAYERS = 2
_VOCABULARY = 256


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.output = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, _HEADS, _WIDTH // _HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = causal_weights(query, key) @ value
        return self.output(mixed.transpose(1, 2).reshape(batch, length, _WIDTH))  # type: ignore[no-any-return]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(_WIDTH)
        self.attention = _Attention()
        self.norm_2 = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))  # type: ignore[no-any-return]


class _TinyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.positions = nn.Embedding(CONTEXT, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(_LAYERS))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


TINY_GPT = byte_level(
    name="tiny-gpt",
    summary="byte-level GPT, 2 layers of width 64, on the text of Python's own help topics or your file",
    build=_TinyGPT,
)
