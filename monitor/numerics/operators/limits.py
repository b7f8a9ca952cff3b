"""Clamping. A number that equals a limit is kept, so that a zero keeps its sign; a NaN, of number or limit, stays one.

The kernels of CPUs do just that at scalar limits. At those of tensors the zero that they take depends on its place in
memory, and graphics cards take the larger one: those kernels are not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from monitor.numerics.backend import Backend
from monitor.numerics.engines import engine_of

__all__ = ["clamp", "clamp_max", "hardtanh", "relu"]

Limit = Tensor | float | None


def _beyond(x: Tensor, limit: Tensor | float, compare: Callable[[Tensor, Any], Tensor]) -> Tensor:
    """x, or the limit where x compares as beyond it or the limit is NaN."""
    if isinstance(limit, Tensor):
        return torch.where(compare(x, limit) | limit.isnan(), limit, x)
    return torch.full_like(x, limit) if math.isnan(limit) else torch.where(compare(x, limit), limit, x)


def clamp(_: Backend, x: Tensor, low: Limit = None, high: Limit = None) -> Tensor:
    is_native = engine_of(x.device).clamps and not isinstance(low, Tensor) and not isinstance(high, Tensor)
    if is_native or not x.dtype.is_floating_point or (low is None and high is None):
        return torch.clamp(x, low, high)  # type: ignore[arg-type]
    out = x if low is None else _beyond(x, low, torch.lt)
    return out if high is None else _beyond(out, high, torch.gt)


def clamp_max(backend: Backend, x: Tensor, high: Limit) -> Tensor:
    return clamp(backend, x, None, high)


def relu(backend: Backend, x: Tensor) -> Tensor:
    return clamp(backend, x, 0.0 if x.dtype.is_floating_point else 0)


def hardtanh(backend: Backend, x: Tensor, low: float = -1.0, high: float = 1.0) -> Tensor:
    if not x.dtype.is_floating_point:
        return torch.ops.aten.hardtanh.default(x, low, high)  # type: ignore[no-any-return]
    return clamp(backend, x, low, high)
