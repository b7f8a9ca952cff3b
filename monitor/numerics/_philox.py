"""Philox4x32-10 (Salmon et al. 2011): random numbers as a function of a key and a counter, equal on every device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["philox_bits"]

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_MASK = 0xFFFFFFFF


def _multiply(x: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of x·constant for x in [0, 2^32), in int64 without overflow (16-bit halves)."""
    low = x & 0xFFFF
    high = x >> 16
    first = low * constant
    second = high * constant + (first >> 16)
    return second >> 16, ((second & 0xFFFF) << 16) | (first & 0xFFFF)


def philox_bits(seed: int, count: int, device: torch.device) -> Tensor:
    """``count`` numbers in [0, 2^32) as int64 for a 64-bit key; counter block i gives numbers 4i … 4i+3."""
    c0 = torch.arange((count + 3) // 4, dtype=torch.int64, device=device)
    c1, c2, c3 = c0 >> 32, torch.zeros_like(c0), torch.zeros_like(c0)
    c0 = c0 & _MASK
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(10):
        high0, low0 = _multiply(c0, _M0)
        high1, low1 = _multiply(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=1).reshape(-1)[:count]
