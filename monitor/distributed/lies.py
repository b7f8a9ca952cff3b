"""Ranks that depart from the program, each in one moment of one step; what they sign is what they did."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from firmware_sim.errors import CallerError
from monitor.distributed.job import Job
from monitor.distributed.rank import Rank
from monitor.distributed.statements import Label
from monitor.distributed.wire import Places, Wire

__all__ = ["RANK_LIES", "lying_rank"]


class _Lying(Rank):
    """Lies in step ``step``."""

    def __init__(self, job: Job, layout: str, *, seed: int, step: int) -> None:
        self._wrong = step
        super().__init__(job, layout, seed=seed)

    @property
    def is_time(self) -> bool:
        """Whether the present step is the one."""
        return self.steps + 1 == self._wrong


class _OtherBatch(_Lying):
    """Trains on the samples of its first micro-batch in another order, so that labels and inputs shift."""

    def read(self, part: Any, micro: int) -> Any:
        if self.is_time and micro == self.rank:
            part = tree_map(lambda each: each.flip(-1) if isinstance(each, Tensor) else each, part)
        return super().read(part, micro)


class _Altered(Wire):
    """Alters one number of what its rank gives first of a kind in one step, before it signs or after."""

    def __init__(self, owner: _Lying, kind: str, *, is_signed: bool = True) -> None:
        super().__init__(owner.rank, owner.ranks)
        self._owner, self._kind, self._is_signed = owner, kind, is_signed
        self._at: tuple[int, ...] | None = None

    def to_each(self, label: Label, rows: Tensor, places: Places) -> Tensor:
        other = self.ranks - 1 if self.rank != self.ranks - 1 else self.ranks - 2
        self._look(label, (other, _first(places(other))))
        return super().to_each(label, self._altered(rows) if self._is_signed else rows, places)

    def to_all(self, label: Label, row: Tensor, places: Places | None = None) -> Tensor:
        self._look(label, (_first(places(self.rank)) if places else 0,))
        return super().to_all(label, self._altered(row) if self._is_signed else row, places)

    def carry(self, rows: Tensor) -> Tensor:
        return super().carry(self._altered(rows))

    def carry_to_all(self, row: Tensor) -> Tensor:
        return super().carry_to_all(self._altered(row))

    def _look(self, label: Label, place: tuple[int, ...]) -> None:
        if label.kind == self._kind and self._owner.is_time:
            self._at = place

    def _altered(self, rows: Tensor) -> Tensor:
        if self._at is not None:
            rows, self._kind = rows.clone(), ""
            rows[self._at] += 1
            self._at = None
        return rows


def _first(places: Sequence[tuple[int, int]]) -> int:
    """Where in a row the first number lies that is no padding."""
    return next(sum(width for width, _ in places[:number]) for number, (_, size) in enumerate(places) if size)


class _OtherChunk(_Lying):
    """Sends the last other rank one gradient that it did not compute."""

    def make_wire(self) -> Wire:
        return _Altered(self, "chunk")


class _OtherWeight(_Lying):
    """Gives the other ranks a weight that it does not hold, where they gather them."""

    def make_wire(self) -> Wire:
        return _Altered(self, "weight")


class _OtherBytes(_Lying):
    """Sends the last other rank one gradient that is another than it signed."""

    def make_wire(self) -> Wire:
        return _Altered(self, "chunk", is_signed=False)


class _OtherNorm(_Lying):
    """Scales its gradients by twice the norm."""

    def norms(self) -> list[Tensor]:
        norms = super().norms()
        return [2.0 * norm for norm in norms] if self.is_time else norms


class _OtherShard(_Lying):
    """Changes one of its own weights after the update."""

    def close(self) -> None:
        if self.steps == self._wrong:
            first = next(held for (kind, _), (_, held) in self.shards().items() if kind == "weight" and held.numel())
            with torch.no_grad():
                first.view(-1)[0] += 1.0
        super().close()


class _OtherWork(_Lying):
    """Multiplies matrices that are no part of the step; nothing else shows it."""

    def norms(self) -> list[Tensor]:
        if self.is_time:
            undeclared = torch.ones(32, 32)
            with torch.no_grad():
                undeclared @ undeclared
        return super().norms()


RANK_LIES: dict[str, type[_Lying]] = {
    "batch": _OtherBatch,
    "bytes": _OtherBytes,
    "chunk": _OtherChunk,
    "norm": _OtherNorm,
    "shard": _OtherShard,
    "weight": _OtherWeight,
    "work": _OtherWork,
}
"""By what the rank alters."""


def lying_rank(kind: str, job: Job, layout: str, *, seed: int, step: int) -> Rank:
    """A rank that alters one thing in one step; CallerError on an unknown kind."""
    if kind not in RANK_LIES:
        raise CallerError(f"unknown lie of a rank {kind!r}; choose {', '.join(RANK_LIES)}")
    return RANK_LIES[kind](job, layout, seed=seed, step=step)
