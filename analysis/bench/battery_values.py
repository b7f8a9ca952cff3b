"""Values that battery cases share, from integers, so that no device makes others; and a call by its name."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

__all__ = ["aten", "large", "plain", "specials"]


_BITS = (
    *(0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F812345, 0xFFFFFFFF),
    *(0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF),
    *(0x3F000000, 0xBF000000, 0x3F800000, 0xBF800000, 0x3FC00000, 0xC0200000, 0x40490FDB, 0x3F7FFFFF),
    *(0x3F800001, 0xBE99999A, 0x42B17218, 0xC2CE8ED0, 0x41A00000, 0xC1200000, 0x4B000001, 0x5F000000),
)


def _floats(bits: Tensor) -> Tensor:
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


@functools.cache
def specials() -> tuple[Tensor, Tensor]:
    """Every pair of special values, and an odd number more."""
    values = torch.tensor(_BITS, dtype=torch.int64)
    left, right = values.repeat_interleave(len(_BITS)), values.repeat(len(_BITS))
    return _floats(torch.cat([left, values[:7]])), _floats(torch.cat([right, values[1:8]]))


def plain(*shape: int, seed: int = 0) -> Tensor:
    """Numbers in (-2, 2) from a hash of their index."""
    count = 1
    for size in shape:
        count *= size
    mixed = (torch.arange(count, dtype=torch.int64) + 7919 * seed) * 2654435761 % (1 << 32)
    mixed = (mixed ^ (mixed >> 15)) * 2246822519 % (1 << 32)
    mixed = mixed ^ (mixed >> 13)
    return ((mixed >> 8).to(torch.float32) * 2.0**-22 - 2.0).reshape(shape)


@functools.cache
def large() -> tuple[Tensor, Tensor]:
    """Enough elements for several threads, one a transposed view, with special values strewn in."""
    a, b = plain(263, 257, seed=1), plain(257, 263, seed=2).t()
    special, _ = specials()
    a.view(-1)[::67] = special[: len(a.view(-1)[::67])]
    return a, b


def aten(name: str, *args: Any, **kwargs: Any) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")(*args, **kwargs)
