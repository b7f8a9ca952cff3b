"""Random numbers as a function of (key, counter): Philox4x32-10 (Salmon et al. 2011), equal on every device.

Block b of a stream is the cipher of the 128-bit counter `counter + b` under a 64-bit key and gives four 32-bit words;
word i of the stream is word i mod 4 of block i div 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics.engines import engine_of

__all__ = ["bernoulli", "bits", "normal", "uniform"]

_CPU = torch.device("cpu")


def _require(key: int, counter: int, count: int) -> None:
    if not 0 <= key < 1 << 64:
        raise CallerError(f"a Philox key is 64 bits, not {key}")
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


def uniform(key: int, counter: int, count: int, device: torch.device = _CPU) -> Tensor:
    """FP32 numbers ⌊word/2^8⌋·2^-24 in [0, 1), one word each; arguments and errors as in `bits`."""
    return (bits(key, counter, count, device) >> 8).to(torch.float32) * 2.0**-24


def normal(key: int, counter: int, count: int, device: torch.device = _CPU) -> Tensor:
    """Standard normal FP32 numbers by Box-Muller, each the correctly rounded value of the formula; one word each.

    Words (a, b) at even positions 2i, 2i+1 give √(-2 ln u)·cos 2πw and √(-2 ln u)·sin 2πw with u = (a + ½)/2^32 and
    w = (b + ½)/2^32, so that |z| ≤ 6.77. Arguments and errors as in `bits`.
    """
    return engine_of(device).normal(bits(key, counter, count + count % 2, device))[:count]


def bernoulli(key: int, counter: int, count: int, probability: float, device: torch.device = _CPU) -> Tensor:
    """Boolean tensor, true where word < ⌊probability·2^32⌋; arguments and errors as in `bits`.

    Raises:
        CallerError: a probability outside [0, 1], or an argument out of range.
    """
    if not 0.0 <= probability <= 1.0:
        raise CallerError(f"a probability lies in [0, 1], not {probability}")
    return bits(key, counter, count, device) < int(probability * 2.0**32)
