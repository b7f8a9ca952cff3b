"""Random numbers as a function of (key, counter): Philox4x32-10 (Salmon et al. 2011), equal on every device.

Block b of a stream is the cipher of the 128-bit counter `counter + b` under a 64-bit key and gives four 32-bit words;
word i of the stream is word i mod 4 of block i div 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics.engines import engine_of

__all__ = ["bits"]

_CPU = torch.device("cpu")


def _require(key: int, counter: int, count: int) -> None:
    if not 0 <= key < 1 << 64:
        raise CallerError(f"a Philox key must fit in 64 bits, not {key}")
    if counter < 0 or counter + (count + 3) // 4 > 1 << 64:
        raise CallerError(f"a Philox counter and its last block must lie in [0, 2^64), not {counter}")
    if count < 0:
        raise CallerError(f"can't draw {count} numbers")


def bits(key: int, counter: int, count: int, device: torch.device = _CPU) -> Tensor:
    """`count` words of the stream as int64 in [0, 2^32), from block `counter` on.

    Args:
        key: 64-bit key.
        counter: first block; the stream uses ⌈count/4⌉ blocks.
        count: number of 32-bit words.
        device: where the tensor is made; the bits are the same.

    Raises:
        CallerError: a key, counter or count out of range.
    """
    _require(key, counter, count)
    return engine_of(device).bits(key, counter, count, device)
