"""Compiled CPU kernels: numba without fast-math.

Without fast-math LLVM neither contracts a multiplication and an addition to FMA nor reorders additions. Kernels release
the GIL and take a range of rows, so that plain threads can share one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from firmware_sim import compilation
from firmware_sim.errors import DeviceError

__all__ = ["compiled", "contracted", "guarded", "inlined", "reordered"]

_PROBE = 2.0**-149
"""The smallest FP32 number: neither its conversion nor a product may make it zero."""


def _helpers(function: Callable[..., Any]) -> set[str]:
    """Source files of the compiled functions that a kernel calls."""
    files: set[str] = set()
    for name in function.__code__.co_names:
        helper = getattr(function.__globals__.get(name), "py_func", None)
        if helper is not None:
            files |= {helper.__code__.co_filename} | _helpers(helper)
    return files


def _watch_helpers(kernel: Any, function: Callable[..., Any]) -> None:
    """Make numba's cache entry depend on the helpers' files too; by itself it watches the kernel's file alone."""
    cache = getattr(kernel._cache, "_cache_file", None)
    if cache is not None:
        stamps = [(name, os.stat(name).st_mtime, os.stat(name).st_size) for name in sorted(_helpers(function))]
        cache._source_stamp = (cache._source_stamp, *stamps)


def _jit(function: Callable[..., Any], **options: Any) -> Any:
    kernel = compilation.compiled(function, nogil=True, error_model="numpy", **options)
    _watch_helpers(kernel, function)
    return kernel


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
