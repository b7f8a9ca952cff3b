"""Memory that a thread keeps between calls: fresh pages cost as much time as the arithmetic on them."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

__all__ = ["scratch"]

_KEPT_BYTES = 1 << 26


_KEPT_VIEWS = 1024


class _Store(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.views: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}


_store = _Store()


def scratch(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialised CPU tensor that is valid until the thread's next request under this name.

    Requests above 64 MiB get memory of their own.
    """
    known = _store.views.get((name, shape, dtype))
    if known is not None:
        return known
    size = math.prod(shape) * dtype.itemsize
    if size > _KEPT_BYTES:
        return torch.empty(shape, dtype=dtype)
    with torch.inference_mode(False):  # what inference mode makes, no later call may write
        buffer = _store.buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = _store.buffers[name] = torch.empty(size, dtype=torch.uint8)
            _store.views.clear()
        if len(_store.views) == _KEPT_VIEWS:
            _store.views.clear()
        view = _store.views[name, shape, dtype] = buffer[:size].view(dtype).view(shape)
    return view
