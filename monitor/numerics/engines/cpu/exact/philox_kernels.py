"""Compiled CPU twin of the Philox rounds, in tiles of blocks whose words lie apart so that LLVM uses vector lanes."""

from __future__ import annotations

from typing import Any

import numpy as np

from monitor.numerics.kernels.jit import compiled
from monitor.numerics.kernels.pointers import floats

__all__ = ["philox_mask", "philox_words"]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_MASK, _SHIFT = np.uint64(0xFFFF_FFFF), np.uint64(32)
_TILE = 256


@compiled
def _tile(first: Any, count: Any, key: Any, words: Any) -> None:
    """Blocks first … first + count - 1 of the stream into the columns of words (4, at least count)."""
    w0, w1, w2, w3 = words[0], words[1], words[2], words[3]
    for b in range(count):
        position = first + np.uint64(b)
        c0, c1, c2, c3 = position & _MASK, position >> _SHIFT, np.uint64(0), np.uint64(0)
        k0, k1 = key & _MASK, key >> _SHIFT
        for _ in range(10):
            low, high = c0 * _M0, c2 * _M1
            c0, c1, c2, c3 = (high >> _SHIFT) ^ c1 ^ k0, high & _MASK, (low >> _SHIFT) ^ c3 ^ k1, low & _MASK
            k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
        w0[b], w1[b], w2[b], w3[b] = c0, c1, c2, c3


@compiled
def philox_words(begin: Any, end: Any, counter: Any, key: Any, out: Any) -> None:
    """Blocks counter + [begin, end) of the stream as out (blocks, 4) in int64."""
    words = np.empty((4, _TILE), np.uint64)
    for start in range(begin, end, _TILE):
        part = out[start : min(start + _TILE, end)]
        _tile(counter + np.uint64(start), part.shape[0], key, words)
        for b in range(part.shape[0]):
            for i in range(4):
                part[b, i] = words[i, b]


@compiled
def philox_mask(begin: Any, end: Any, counter: Any, key: Any, threshold: Any, out_at: Any, size: Any) -> None:
    """out[i] = 1 where word i of the stream lies below `threshold`, else 0, for the words of blocks [begin, end)."""
    words = np.empty((4, _TILE), np.uint64)
    bound = np.uint64(threshold)
    for start in range(begin, end, _TILE):
        count = min(_TILE, end - start)
        _tile(counter + np.uint64(start), count, key, words)
        part = floats(out_at + 16 * start, min(4 * count, size - 4 * start))
        whole = part.shape[0] // 4
        for b in range(whole):
            for i in range(4):
                part[4 * b + i] = np.float32(words[i, b] < bound)
        for i in range(part.shape[0] - 4 * whole):
            part[4 * whole + i] = np.float32(words[i, whole] < bound)
