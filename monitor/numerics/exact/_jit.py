"""Compiled CPU kernels: numba without fast-math, in threads of our own.

Without fast-math LLVM neither contracts a multiplication and an addition to FMA nor reorders additions. Kernels release
the GIL and take a range of rows, so a plain thread pool serves: it needs no OpenMP run-time that could clash with
torch's, and it survives calls from several threads.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch

from firmware_sim.errors import DeviceError

__all__ = ["compiled", "contracted", "guarded", "inlined", "reordered", "run_pieces"]

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_owner = -1
_PIECES = 4
_PROBE = np.ones(1, dtype=np.uint32)


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
    options = {"nogil": True, "error_model": "numpy", **options}
    try:
        kernel = numba.njit(function, cache=True, **options)
    except RuntimeError:
        # No cache folder can be written: the kernel is compiled again in every process.
        return numba.njit(function, **options)
    _watch_helpers(kernel, function)
    return kernel


def compiled(function: Callable[..., Any]) -> Any:
    """A kernel compiled at its first call, from the on-disk cache where that can be written.

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
    value = probe.view(np.float32)
    return value[0] * np.float32(1.0) != np.float32(0.0)


def guarded(kernel: Callable[..., Any], begin: int, end: int, arguments: tuple[Any, ...]) -> Any:
    """kernel(begin, end, *arguments); DeviceError if this thread flushes subnormal numbers to zero."""
    if not _keeps_subnormals(_PROBE):
        raise DeviceError(
            "this thread flushes subnormal numbers to zero, so results would not be equal on other devices; "
            "call torch.set_flush_denormal(False)"
        )
    return kernel(begin, end, *arguments)


def _executor(threads: int) -> ThreadPoolExecutor:
    """The shared pool; a forked child gets its own, since threads do not survive a fork."""
    global _pool, _pool_owner
    with _lock:
        if _pool is None or _pool_owner != os.getpid() or _pool._max_workers < threads:
            _pool, _pool_owner = ThreadPoolExecutor(threads, thread_name_prefix="exact"), os.getpid()
        return _pool


def run_pieces(kernel: Callable[..., Any], rows: int, work: int, *arguments: Any, grain: int = 1 << 16) -> list[Any]:
    """kernel(begin, end, *arguments) over [0, rows) in pieces, and their results in the order of the range.

    Threads take pieces as they get to them, and the caller's thread never waits for one that has not begun: after a
    matrix product torch's own threads spin for a while and hold the other cores.

    Args:
        rows: length of the range.
        work: number of elements the whole call touches; below `grain` for each thread the caller's thread does it all.

    Raises:
        DeviceError: a thread flushes subnormal numbers to zero.
    """
    threads = 1 if work < 2 * grain else min(torch.get_num_threads(), rows, work // grain)
    if threads <= 1:
        return [guarded(kernel, 0, rows, arguments)]
    pieces = min(rows, _PIECES * threads)
    edges = [rows * i // pieces for i in range(pieces + 1)]
    remaining = iter(range(pieces))

    results: list[Any] = [None] * pieces

    def work_off() -> None:
        while (i := next(remaining, None)) is not None:
            results[i] = guarded(kernel, edges[i], edges[i + 1], arguments)

    pool = _executor(threads)
    helpers = [pool.submit(work_off) for _ in range(threads - 1)]
    work_off()
    for helper in helpers:
        if not helper.cancel():
            helper.result()
    return results
