"""Compiled CPU kernels: numba without fast-math.

Without fast-math LLVM neither contracts a multiplication and an addition to FMA nor reorders additions. Kernels release
the GIL and take a range of rows, so that plain threads can share one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from firmware_sim import compilation
from firmware_sim.errors import DeviceError

__all__ = ["compiled", "contracted", "guarded", "inlined", "reordered"]

_PROBE = 2.0**-149
"""The smallest FP32 number: neither its conversion nor a product may make it zero."""


def _jit(function: Callable[..., Any], **options: Any) -> Any:
    return compilation.compiled(function, nogil=True, error_model="numpy", **options)


def compiled(function: Callable[..., Any]) -> Any:
    """A kernel compiled at its first call, from the user's cache where there is one.

    Its closure may hold numbers and strings but no other kernel, which would give it a new cache key in every process.
    """
    return _jit(function)


def inlined(function: Callable[..., Any]) -> Any:
    """A scalar helper of kernels, expanded where it is used so that loops stay vectorised."""
    return _jit(function, forceinline=True)


def contracted(function: Callable[..., Any]) -> Any:
    """A kernel in which LLVM may contract to FMA: for arithmetic that is exact, which no contraction can change."""
    return _jit(function, fastmath={"contract"})


def reordered(function: Callable[..., Any]) -> Any:
    """A kernel whose additions LLVM may reorder into vector lanes: for sums whose error bound holds in any order."""
    return _jit(function, fastmath={"reassoc"})


@compiled
def _keeps_subnormals(probe: Any) -> Any:
    return np.float32(probe) * np.float32(1.0) != np.float32(0.0)


def guarded(kernel: Callable[..., Any], begin: int, end: int, arguments: tuple[Any, ...]) -> Any:
    """kernel(begin, end, *arguments); DeviceError if this thread flushes subnormal numbers to zero."""
    if not _keeps_subnormals(_PROBE):
        raise DeviceError(
            "this thread flushes subnormal numbers to zero, so results would not be equal on other devices; "
            "call torch.set_flush_denormal(False)"
        )
    return kernel(begin, end, *arguments)
