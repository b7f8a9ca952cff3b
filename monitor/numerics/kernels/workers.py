"""Threads of our own: pieces of a kernel's range, and tiles of a result, each by one thread from operands to rounding.

Torch's own threads serve badly here: between two products they spin and hold the cores that the next kernel needs. A
plain pool needs no OpenMP run-time that could clash with torch's, and it survives calls from several threads.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any

import torch

from monitor.numerics.kernels.jit import guarded

__all__ = ["dispatch_modes", "edges", "run_pieces", "run_tiles", "workers"]

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_owner = -1
_PIECES = 4
_GRAIN = 1 << 18
_SMALL = 1 << 24
"""Half a millisecond of one core: waking another one takes up to a tenth of a millisecond."""


def _enter_thread() -> None:
    """One torch thread for each worker, no autograd, subnormal numbers kept, no modes: all four belong to a thread."""
    while torch._C._len_torch_dispatch_stack():
        torch._C._pop_torch_dispatch_stack(None)
    # The first question makes a thread take over the process's setting, which would undo one made before it.
    torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.set_flush_denormal(False)  # inherited from the thread that made the pool


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


def _shared(count: int, threads: int, task: Callable[[int], Any]) -> list[Any]:
    """[task(0), …, task(count − 1)] by this thread and others; it never waits for one that has not begun."""
    if threads <= 1 or count <= 1:
        return [task(i) for i in range(count)]
    remaining = iter(range(count))
    results: list[Any] = [None] * count

    def work_off() -> None:
        try:
            while (i := next(remaining, None)) is not None:
                results[i] = task(i)
        except BaseException:
            deque(remaining, maxlen=0)  # no thread goes on
            raise

    pool = _executor(threads - 1)
    helpers = [pool.submit(work_off) for _ in range(min(threads, count) - 1)]
    try:
        work_off()
    finally:
        begun = [helper for helper in helpers if not helper.cancel()]
        wait(begun)
    for helper in begun:
        helper.result()
    return results


def edges(count: int, each: int) -> list[tuple[int, int]]:
    """Ranges of at most ``each`` that cover [0, count)."""
    each = max(each, 1)
    return [(begin, min(begin + each, count)) for begin in range(0, count, each)]


def run_pieces(kernel: Callable[..., Any], rows: int, work: int, *arguments: Any) -> list[Any]:
    """kernel(begin, end, *arguments) over [0, rows) in pieces, and their results in the order of the range.

    Args:
        rows: length of the range.
        work: number of elements the whole call touches, in units of about a nanosecond.

    Raises:
        DeviceError: a thread flushes subnormal numbers to zero.
    """
    threads = 1 if work < 2 * _GRAIN else min(torch.get_num_threads(), rows, work // _GRAIN)
    if threads <= 1:
        return [guarded(kernel, 0, rows, arguments)]
    pieces = min(rows, _PIECES * threads)
    cuts = [rows * i // pieces for i in range(pieces + 1)]
    return _shared(pieces, threads, lambda i: guarded(kernel, cuts[i], cuts[i + 1], arguments))


def _is_watched() -> bool:
    """Whether another dispatch mode must see the arithmetic, which none does in other threads.

    One that only looks at what others compute has seen the operator before, and says ``sees_arithmetic = False``.
    """
    return any(getattr(mode, "sees_arithmetic", True) for mode in dispatch_modes())


def dispatch_modes() -> list[Any]:
    """This thread's dispatch modes, the newest last.

    A finalizer that runs meanwhile may leave one, so that each is asked for only after their number.
    """
    found: list[Any] = []
    while len(found) < torch._C._len_torch_dispatch_stack():
        found.append(torch._C._get_dispatch_stack_at(len(found)))
    return found


def workers(work: int) -> int:
    """Threads for an operation of that many multiplications."""
    return 1 if work < _SMALL or _is_watched() else torch.get_num_threads()


def run_tiles(count: int, work: int, task: Callable[[int], Any]) -> list[Any]:
    """[task(0), …, task(count − 1)], in threads where the work is worth it, each with one torch thread and no autograd.

    PyTorch has one default for all threads: one that asks for the first time meanwhile begins with one torch thread.

    Raises:
        DeviceError: a thread flushes subnormal numbers to zero.
    """

    def tile(begin: int, end: int) -> Any:
        return task(begin)

    own = torch.get_num_threads()
    threads = workers(work)
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
        if not _is_watched():
            torch.set_num_threads(1)
        try:
            return _shared(count, threads, lambda i: guarded(tile, i, i + 1, ()))
        finally:
            torch.set_num_threads(own)
