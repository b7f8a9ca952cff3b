"""CPU engine of the elementwise functions: compiled kernels, the eager engine for what they leave undecided."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from monitor.numerics.engines.cpu.exact.function_kernels import (
    CIRCULAR_LIMIT,
    POWER_KERNEL,
    UNARY_KERNELS,
)
from monitor.numerics.engines.eager.exact import functions as eager
from monitor.numerics.kernels.arrays import array
from monitor.numerics.kernels.workers import run_pieces

__all__ = ["power", "unary"]

_WORK = 32
_FIRST_FOUND = 256


def _run(kernel: Any, x: Tensor, before: tuple[Any, ...], out: Tensor, after: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    """Runs a kernel over the first dimension; the flat positions that it left undecided."""
    n = x.shape[0]
    room = _FIRST_FOUND
    while True:
        lists: list[np.ndarray[Any, Any]] = []

        def piece(begin: int, end: int, source: Any, target: Any, room: int = room, lists: Any = lists) -> Any:
            found = np.empty(room, np.int64)
            count = kernel(begin, end, source, *before, target, *after, found)
            lists.append(found[: min(count, room)])
            return count

        counts = run_pieces(piece, n, n * _WORK, array(x), array(out))
        if max(counts) <= room:
            return np.concatenate(lists)
        room = max(counts)


def unary(name: str, x: Tensor) -> Tensor:
    """A function of FP32 numbers on a CPU; what has no compiled kernel is the eager engine's."""
    if name not in UNARY_KERNELS:
        return eager.unary(name, x)
    flat = x.contiguous().reshape(-1)
    out = torch.empty_like(flat)
    limit = CIRCULAR_LIMIT if name in ("sin", "cos") else np.inf
    found = _run(UNARY_KERNELS[name], flat, (), out, (limit,))
    if len(found):
        positions = torch.from_numpy(found)
        out[positions] = eager.unary(name, flat[positions])
    return out.reshape(x.shape)


def power(x: Tensor, y: Tensor) -> Tensor:
    """x**y for CPU FP32 x and y of one shape, or y of one element."""
    flat, exponents = x.contiguous().reshape(-1), y.contiguous().reshape(-1)
    step = 0 if exponents.numel() == 1 else 1
    out = torch.empty_like(flat)
    found = _run(POWER_KERNEL, flat, (array(exponents), step), out, ())
    if len(found):
        positions = torch.from_numpy(found)
        out[positions] = eager.power(flat[positions], exponents[positions] if step else exponents)
    return out.reshape(x.shape)
