"""Ranks that depart from the program, each in one moment of one step; what they sign is what they did."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from firmware_sim.errors import CallerError
from monitor.distributed.job import Job
from monitor.distributed.rank import Rank
from monitor.distributed.reduction import Chunk

__all__ = ["RANK_LIES", "lying_rank"]


class _Lying(Rank):
    """Lies in step ``step``."""

    def __init__(self, job: Job, layout: str, *, seed: int, step: int) -> None:
        self._wrong = step
        super().__init__(job, layout, seed=seed)

    @property
    def _is_time(self) -> bool:
        return self.steps + 1 == self._wrong


class _OtherBatch(_Lying):
    """Trains on the samples of its first micro-batch in another order, so that labels and inputs shift."""

    def read(self, part: Any, micro: int) -> Any:
        if self._is_time and micro == self.rank:
            part = tree_map(lambda each: each.flip(-1) if isinstance(each, Tensor) else each, part)
        return super().read(part, micro)


class _OtherChunk(_Lying):
    """Sends the last rank one gradient that it did not compute."""

    def sent(self, chunk: Chunk) -> None:
        if self._is_time and chunk.micro == self.rank and chunk.destination == self.ranks - 1 and chunk.data.numel():
            chunk.data[0] += 1.0
        super().sent(chunk)


class _OtherNorm(_Lying):
    """Scales its gradients by twice the norm."""

    def norms(self) -> list[Tensor]:
        norms = super().norms()
        return [2.0 * norm for norm in norms] if self._is_time else norms


class _OtherShard(_Lying):
    """Changes a weight of its own after the update."""

    def close(self) -> None:
        if self.steps == self._wrong:
            first = next(held for (kind, _), (_, held) in self.shards().items() if kind == "weight" and held.numel())
            with torch.no_grad():
                first.view(-1)[0] += 1.0
        super().close()


class _OtherWork(_Lying):
    """Multiplies matrices that are no part of the step; nothing else shows it."""

    def norms(self) -> list[Tensor]:
        if self._is_time:
            undeclared = torch.ones(32, 32)
            with torch.no_grad():
                undeclared @ undeclared
        return super().norms()


RANK_LIES: dict[str, type[_Lying]] = {
    "batch": _OtherBatch,
    "chunk": _OtherChunk,
    "norm": _OtherNorm,
    "shard": _OtherShard,
    "work": _OtherWork,
}
"""By what the rank alters."""


def lying_rank(kind: str, job: Job, layout: str, *, seed: int, step: int) -> Rank:
    """A rank that alters one thing in one step; CallerError on an unknown kind."""
    if kind not in RANK_LIES:
        raise CallerError(f"unknown lie of a rank {kind!r}; choose {', '.join(RANK_LIES)}")
    return RANK_LIES[kind](job, layout, seed=seed, step=step)
