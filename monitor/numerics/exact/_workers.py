"""Threads that each take whole tiles of a result: split or widen, multiply, round, while the tile lies in the cache.

Torch's own threads serve badly here: between two products they spin and hold the cores that the next kernel needs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from monitor.numerics.exact._jit import guarded

__all__ = ["run_tiles", "workers"]

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_owner = -1
_SMALL = 1 << 21


def _enter_thread() -> None:
    """One torch thread for each worker, and no autograd: grad mode belongs to a thread."""
    # The first question makes a thread take over the process's setting, which would undo one made before it.
    torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)


def _executor(threads: int) -> ThreadPoolExecutor:
    """The shared pool with all its threads started; a forked child gets its own."""
    global _pool, _pool_owner
    with _lock:
        if _pool is None or _pool_owner != os.getpid() or _pool._max_workers < threads:
            own = torch.get_num_threads()
            pool = ThreadPoolExecutor(threads, thread_name_prefix="tiles", initializer=_enter_thread)
            barrier = threading.Barrier(threads)
            for started in [pool.submit(barrier.wait) for _ in range(threads)]:
                started.result()
            # A thread's setting is also the default of threads that start later.
            torch.set_num_threads(own)
            _pool, _pool_owner = pool, os.getpid()
        return _pool


def workers(work: int) -> int:
    """Threads for an operation of that many multiplications; 1 where another dispatch mode must see the arithmetic."""
    if work < _SMALL or torch._C._len_torch_dispatch_stack() > 0:
        return 1
    return torch.get_num_threads()


def _here(begin: int, end: int, task: Callable[[int], Any]) -> list[Any]:
    return [task(i) for i in range(begin, end)]


def run_tiles(count: int, work: int, task: Callable[[int], Any]) -> list[Any]:
    """[task(0), …, task(count − 1)], in threads where the work is worth it.

    Raises:
        DeviceError: a thread flushes subnormal numbers to zero.
    """
    threads = min(workers(work), count)
    if threads <= 1:
        with torch.no_grad():
            done: list[Any] = guarded(_here, 0, count, (task,))
        return done
    remaining = iter(range(count))
    results: list[Any] = [None] * count

    def work_off() -> None:
        while (i := next(remaining, None)) is not None:
            results[i] = guarded(_here, i, i + 1, (task,))[0]

    for helper in [_executor(threads).submit(work_off) for _ in range(threads)]:
        helper.result()
    return results
