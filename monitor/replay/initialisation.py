"""The initial state, computed from the program that declares it: no Python of the lab runs, and no batch is read."""

from __future__ import annotations

import torch

from firmware_sim.errors import EvidenceError
from monitor import numerics
from monitor.declaration.statement import Declaration
from monitor.environment import accelerator
from monitor.programs.interpreter import Prepared
from monitor.programs.keys import RepeatedKeys
from monitor.programs.program import Program
from monitor.sharding import ShardedMemory

__all__ = ["initialised_memory"]


def initialised_memory(declared: Declaration, program: Program, *, device: torch.device | None = None) -> ShardedMemory:
    """W_0 in the declared layout, as a program makes it from the declared seed, in exact numerics.

    Args:
        device: where it is computed, by default where this process trains.

    Raises:
        EvidenceError: the run declares another program or none, or it cannot be executed.
    """
    begun = declared.origin.initialisation
    if begun is None or begun.program != program.digest:
        raise EvidenceError("the run does not declare that this program makes its initial state")
    memory = declared.empty_memory(accelerator() if device is None else device)
    keys = RepeatedKeys(begun.seed, 0)
    Prepared(program, memory).run({}, program.numbers, numerics.replaying("exact", b"", keys=keys), keys)
    return memory
