"""The Philox stream by compiled kernels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from monitor.numerics.engines.cpu.exact.philox_kernels import philox_mask, philox_words
from monitor.numerics.kernels.arrays import array
from monitor.numerics.kernels.workers import run_pieces

__all__ = ["bits", "fill_mask"]


def bits(key: int, counter: int, count: int, _: torch.device | None = None) -> Tensor:
    """`count` words of the stream of `key` from block `counter` on."""
    out = torch.empty(((count + 3) // 4, 4), dtype=torch.int64)
    run_pieces(philox_words, out.shape[0], out.numel() * 4, np.uint64(counter), np.uint64(key), array(out))
    return out.reshape(-1)[:count]


def fill_mask(out: Tensor, key: int, counter: int, threshold: int) -> None:
    """Overwrites a plain FP32 tensor by 1 where a word of the stream lies below `threshold`, else by 0."""
    n = out.numel()
    where = (np.uint64(counter), np.uint64(key), threshold, out.data_ptr(), n)
    run_pieces(philox_mask, (n + 3) // 4, n, *where)
