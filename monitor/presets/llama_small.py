"""``llama-small``: a byte-level Llama (Touvron et al. 2023) on English text: RMSNorm, rotary positions, SwiGLU."""

from __future__ import annotations

from decimal import Decimal

import torch
from torch import Tensor, nn
from torch.nn import functional

from monitor.presets._gpt import byte_level, causal_weights

__all__ = ["LLAMA_SMALL"]

_WIDTH = 96
_HEADS = 6
_LAYERS = 4
_HIDDEN = 256
_VOCABULARY = 256
_BASE = 10000


class _RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * ((x * x).mean(-1, keepdim=True) + 1e-5).rsqrt() * self.weight


class _Rotary(nn.Module):
    """Angles position·10000^(-2j/width) for j < width/2, as cosine and sine [length, width/2].

    The frequencies lie in a buffer and come from decimal arithmetic: the C library's powers differ between systems.
    """

    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        width = _WIDTH // _HEADS
        values = [float(Decimal(_BASE) ** (Decimal(-2 * index) / width)) for index in range(width // 2)]
        self.register_buffer("frequencies", torch.tensor(values, dtype=torch.float32))

    def forward(self, length: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(length, device=self.frequencies.device).to(self.frequencies.dtype)
        angles = positions.unsqueeze(1) * self.frequencies
        return angles.cos(), angles.sin()


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn element j of the first half against element j of the second by the position's angle."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = _RMSNorm()
        self.query_key_value = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.output = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.norm_2 = _RMSNorm()
        self.gate = nn.Linear(_WIDTH, _HIDDEN, bias=False)
        self.up = nn.Linear(_WIDTH, _HIDDEN, bias=False)
        self.down = nn.Linear(_HIDDEN, _WIDTH, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self._attend(self.norm_1(x), cosine, sine)
        y = self.norm_2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]

    def _attend(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, _HEADS, _WIDTH // _HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        mixed = causal_weights(_rotate(query, cosine, sine), _rotate(key, cosine, sine)) @ value
        return self.output(mixed.transpose(1, 2).reshape(batch, length, _WIDTH))  # type: ignore[no-any-return]


class _Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.rotary = _Rotary()
        self.blocks = nn.ModuleList(_Block() for _ in range(_LAYERS))
        self.norm = _RMSNorm()
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        cosine, sine = self.rotary(tokens.shape[1])
        for block in self.blocks:
            x = block(x, cosine, sine)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


LLAMA_SMALL = byte_level(
    name="llama-small",
    summary="byte-level Llama, 4 layers of width 96, on the text of Python's own help topics or your file",
    build=_Llama,
)
