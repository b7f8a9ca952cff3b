"""Engines: what computes on a kind of device. Each gives the same bits; the choice among them is made here alone.

``eager`` serves any device and is the specification in PyTorch; ``cpu`` overrides what compiled kernels do faster.
An engine for another kind of device is a folder beside these two and a line in ``engine_of``; within an engine,
``capability`` tells which of its means a device may use, by known answers.
"""

from __future__ import annotations

import torch

from monitor.numerics.engines.cpu.engine import CpuEngine
from monitor.numerics.engines.eager.engine import EagerEngine
from monitor.numerics.kernels.pointers import is_host

__all__ = ["EagerEngine", "engine_of"]

_EAGER = EagerEngine()
_CPU = CpuEngine()


def engine_of(device: torch.device) -> EagerEngine:
    """The engine for tensors on that device."""
    return _CPU if is_host(device) else _EAGER
