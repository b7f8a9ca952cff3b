"""Batch tensors that an earlier committed state holds: weights that a loop has put aside and takes back.

A program names such a tensor ``recalled:weight/0.bias``. The batch also holds the number of the step after which
the state held it, and hashes in place of all else in that state. With the leaf of that step one can check that the
values are true (``require_recalled``); an analysis of a program may take them for the state's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from firmware_sim.errors import EvidenceError
from monitor.sharding import ShardedMemory, StateDigest

__all__ = ["PROOF", "RECALLED", "STEP", "is_recalled", "require_recalled", "state_of"]

RECALLED = "recalled:"
STEP, PROOF = f"{RECALLED}step", f"{RECALLED}proof"
_KINDS = ("weight/", "buffer/")


def is_recalled(names: Iterable[str]) -> bool:
    """Whether a batch of these names holds something of an earlier state."""
    return any(name.startswith(RECALLED) for name in names)


def state_of(source: str) -> str | None:
    """The tensor of the state, ``kind/name``, that a source of a program is an earlier value of, if it is one."""
    name = source.removeprefix(f"batch:{RECALLED}")
    return name if name != source and name.startswith(_KINDS) else None


def require_recalled(
    batch: Mapping[str, Tensor], step: int, memory: ShardedMemory, state_after: Callable[[int], StateDigest]
) -> None:
    """EvidenceError unless a step's batch holds what it says of an earlier state; a batch without such passes.

    Args:
        step: the step whose batch it is.
        memory: in the run's layout; it stays as it is.
        state_after: what an earlier step commits to.
    """
    if not is_recalled(batch):
        return
    try:
        number, proof = batch[STEP], batch[PROOF]
    except KeyError:
        raise EvidenceError(f"step {step} recalls tensors, but does not say from the state of which step") from None
    if number.dtype != torch.int64 or number.numel() != 1 or not 0 <= int(number) < step:
        raise EvidenceError(f"step {step} recalls tensors, but not from a step before it")
    held, given = memory.export(), {}
    for name in sorted(batch.keys() - {STEP, PROOF}):
        if name.startswith(RECALLED):
            tensor, own = batch[name], state_of(f"batch:{name}")
            like = None if own is None else held.get(own)
            if own is None or like is None or tensor.dtype != like.dtype or tensor.numel() != like.numel():
                raise EvidenceError(f"step {step} recalls {name!a:.100}, which is not a weight or buffer of the state")
            given[own] = tensor.reshape(like.shape)
    if memory.digest_with(given, proof) != state_after(int(number)):
        raise EvidenceError(f"step {step} recalls tensors that are not those of the state after step {int(number)}")
