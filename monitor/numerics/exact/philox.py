"""Random numbers as a function of (key, counter): Philox4x32-10 (Salmon et al. 2011), equal on every device.

Block b of a stream is the cipher of the 128-bit counter `counter + b` under a 64-bit key and gives four 32-bit words;
word i of the stream is word i mod 4 of block i div 4.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics.engines.cpu.exact.functions import normal_engine
from monitor.numerics.engines.cpu.exact.philox_kernels import philox_mask, philox_words
from monitor.numerics.engines.eager.exact.functions import EPSILON, box_muller
from monitor.numerics.exact.unary import resolve_elements
from monitor.numerics.kernels.bits import round_or_flag
from monitor.numerics.kernels.workers import run_pieces

__all__ = ["bernoulli", "bits", "fill_bernoulli", "normal", "uniform"]

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFF_FFFF
_CPU = torch.device("cpu")


def _require(key: int, counter: int, count: int) -> None:
    if not 0 <= key < 1 << 64:
        raise CallerError(f"a Philox key is 64 bits, not {key}")
    if counter < 0 or counter + (count + 3) // 4 > 1 << 64:
        raise CallerError(f"a Philox counter and its last block must lie in [0, 2^64), not {counter}")
    if count < 0:
        raise CallerError(f"can't draw {count} numbers")


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
    if device.type == "cpu":
        out = torch.empty(((count + 3) // 4, 4), dtype=torch.int64)
        run_pieces(philox_words, out.shape[0], out.numel() * 4, np.uint64(counter), np.uint64(key), out.numpy())
        return out.reshape(-1)[:count]
    return bits_reference(key, counter, count, device)


def bits_reference(key: int, counter: int, count: int, device: torch.device = _CPU) -> Tensor:
    """The specification of `bits` in eager PyTorch on any device."""
    block = torch.arange((count + 3) // 4, dtype=torch.int64, device=device)
    low = block + (counter & _WORD)
    high = (low >> 32) + (counter >> 32)
    zero = torch.zeros_like(block)
    words = philox_rounds([low & _WORD, high & _WORD, zero, zero], key)
    return torch.stack(words, dim=1).reshape(-1)[:count]


def uniform(key: int, counter: int, count: int, device: torch.device = _CPU) -> Tensor:
    """FP32 numbers ⌊word/2^8⌋·2^-24 in [0, 1), one word each; arguments and errors as in `bits`."""
    return (bits(key, counter, count, device) >> 8).to(torch.float32) * 2.0**-24


def normal(key: int, counter: int, count: int, device: torch.device = _CPU) -> Tensor:
    """Standard normal FP32 numbers by Box-Muller, each the correctly rounded value of the formula; one word each.

    Words (a, b) at even positions 2i, 2i+1 give √(-2 ln u)·cos 2πw and √(-2 ln u)·sin 2πw with u = (a + ½)/2^32 and
    w = (b + ½)/2^32, so that |z| ≤ 6.77. Arguments and errors as in `bits`.
    """
    words = bits(key, counter, count + count % 2, device)
    if device.type != "cpu":
        return normal_reference(words)[:count]
    if count == 0:
        return torch.empty(0)
    result, open_positions = normal_engine(words.reshape(-1, 2))
    pairs = open_positions // 2 * 2
    for position, pair in zip(open_positions.tolist(), pairs.tolist(), strict=True):
        result[position] = normal_reference(words[pair : pair + 2])[position - pair]
    return result[:count]


def normal_reference(words: Tensor) -> Tensor:
    """The normal numbers of an even number of words, in eager PyTorch on any device."""
    radius, angle = words[0::2].repeat_interleave(2), words[1::2].repeat_interleave(2)
    quarter = torch.arange(words.numel(), device=words.device) & 1
    result, undecided = round_or_flag(box_muller(radius, angle, quarter), EPSILON["normal"])
    return resolve_elements("normal", result, undecided, radius, angle, quarter)


def bernoulli(key: int, counter: int, count: int, probability: float, device: torch.device = _CPU) -> Tensor:
    """Boolean tensor, true where word < ⌊probability·2^32⌋; arguments and errors as in `bits`.

    Raises:
        CallerError: a probability outside [0, 1], or an argument out of range.
    """
    if not 0.0 <= probability <= 1.0:
        raise CallerError(f"a probability lies in [0, 1], not {probability}")
    return bits(key, counter, count, device) < int(probability * 2.0**32)


def fill_bernoulli(out: Tensor, key: int, counter: int, probability: float) -> None:
    """Writes `bernoulli` as 1 and 0 into a plain FP32 tensor (``elementwise.is_plain``); errors as there."""
    if not 0.0 <= probability <= 1.0:
        raise CallerError(f"a probability lies in [0, 1], not {probability}")
    n = out.numel()
    _require(key, counter, n)
    threshold = int(probability * 2.0**32)
    where = (np.uint64(counter), np.uint64(key), threshold, out.data_ptr(), n)
    run_pieces(philox_mask, (n + 3) // 4, n, *where)
