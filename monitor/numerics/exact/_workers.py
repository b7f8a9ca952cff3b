"""Threads that each run torch and compiled kernels on one core: tiles of a product need no synchronisation within."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch

__all__ = ["run_tasks", "worker_count"]

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_key = (-1, 0)


def _use_one_core() -> None:
    """Limits OpenMP in calls from this thread; torch.set_num_threads would limit MKL in all threads."""
    torch.get_num_threads()  # a thread's own number is set at its first question, so ask before changing it
    set_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if set_threads is not None:
        set_threads(1)


@lru_cache(maxsize=1)
def _can_use_one_core() -> bool:
    with ThreadPoolExecutor(1, initializer=_use_one_core) as pool:
        return pool.submit(torch.get_num_threads).result() == 1


def worker_count() -> int:
    """Number of tasks that run at the same time: torch's threads, or 1 where a thread can't be limited to one core."""
    threads = torch.get_num_threads()
    return threads if threads == 1 or _can_use_one_core() else 1


def _executor(threads: int) -> ThreadPoolExecutor:
    """The shared pool; a forked child gets its own, since threads do not survive a fork."""
    global _pool, _pool_key
    with _lock:
        if _pool is None or _pool_key != (os.getpid(), threads):
            _pool, _pool_key = ThreadPoolExecutor(threads, "tiles", _use_one_core), (os.getpid(), threads)
        return _pool


def run_tasks(tasks: Sequence[Callable[[], None]]) -> None:
    """Runs all tasks, which write to different memory, and raises the first error of one."""
    threads = worker_count()
    if threads == 1 or len(tasks) == 1:
        for task in tasks:
            task()
        return
    futures = [_executor(threads).submit(task) for task in tasks]
    for future in futures:
        future.result()
