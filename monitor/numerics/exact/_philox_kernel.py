"""Compiled CPU twin of the Philox rounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from monitor.numerics.exact._jit import compiled

__all__ = ["philox_words"]

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_MASK, _SHIFT = np.uint64(0xFFFF_FFFF), np.uint64(32)


@compiled
def philox_words(begin: Any, end: Any, counter: Any, key: Any, out: Any) -> Any:
    """Blocks counter + [begin, end) of the stream as out (blocks, 4) in int64."""
    for block in range(begin, end):
        position = counter + np.uint64(block)
        c0, c1, c2, c3 = position & _MASK, position >> _SHIFT, np.uint64(0), np.uint64(0)
        k0, k1 = key & _MASK, key >> _SHIFT
        for _ in range(10):
            first, second = c0 * _M0, c2 * _M1
            c0, c1, c2, c3 = (second >> _SHIFT) ^ c1 ^ k0, second & _MASK, (first >> _SHIFT) ^ c3 ^ k1, first & _MASK
            k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
        out[block, 0], out[block, 1], out[block, 2], out[block, 3] = c0, c1, c2, c3
