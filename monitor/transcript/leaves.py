"""The committed steps of a run, however many: a leaf is decoded when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import overload

from monitor.transcript.leaf import Leaf

__all__ = ["Leaves"]

_KEPT = 4096
"""Leaves that are kept, those asked for last: a shorter run is decoded once."""


class Leaves(Sequence[Leaf]):
    """Leaves of steps 0 … count - 1; memory does not grow with their number.

    Args:
        read: returns the leaf of a step; EvidenceError where its record is no longer the signed one.
    """

    def __init__(self, read: Callable[[int], Leaf], count: int) -> None:
        self._read = lru_cache(maxsize=_KEPT)(read)
        self._steps = range(count)

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> Leaf: ...
    @overload
    def __getitem__(self, index: slice) -> Leaves: ...
    def __getitem__(self, index: int | slice) -> Leaf | Leaves:
        if isinstance(index, int):
            return self._read(self._steps[index])
        part = Leaves.__new__(Leaves)
        part._read, part._steps = self._read, self._steps[index]
        return part
