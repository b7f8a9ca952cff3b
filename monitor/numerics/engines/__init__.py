"""Engines: what computes on a kind of device. Each gives the same bits; the choice among them is made here alone.

``eager`` serves any device and is the specification in PyTorch; ``cpu`` has compiled kernels. An engine for another
kind of device is a folder next to these and a line in ``engine_of``; within an engine, ``capability`` tells by known
answers which of its means a device may use.
"""

from __future__ import annotations

import torch

from monitor.numerics.engines.cpu import CPU
from monitor.numerics.engines.eager import EAGER
from monitor.numerics.engines.engine import Engine
from monitor.numerics.kernels.pointers import is_host

__all__ = ["engine_of"]


def engine_of(device: torch.device) -> Engine:
    """The engine for tensors on that device."""
    return CPU if is_host(device) else EAGER
