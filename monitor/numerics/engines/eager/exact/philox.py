"""The Philox cipher in eager PyTorch on any device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["bits", "philox_rounds"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFF_FFFF


def _multiply(x: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low words of x·constant for x in [0, 2^32), in int64 by halves so that nothing overflows."""
    low = (x & 0xFFFF) * constant
    high = (x >> 16) * constant + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox_rounds(words: list[Tensor], key: int) -> list[Tensor]:
    """Ten rounds on four counter words (int64 in [0, 2^32))."""
    k0, k1 = key & _WORD, key >> 32
    c0, c1, c2, c3 = words
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return [c0, c1, c2, c3]


def bits(key: int, counter: int, count: int, device: torch.device) -> Tensor:
    """`count` words of the stream of `key` from block `counter` on."""
    block = torch.arange((count + 3) // 4, dtype=torch.int64, device=device)
    low = block + (counter & _WORD)
    high = (low >> 32) + (counter >> 32)
    zero = torch.zeros_like(block)
    words = philox_rounds([low & _WORD, high & _WORD, zero, zero], key)
    return torch.stack(words, dim=1).reshape(-1)[:count]
