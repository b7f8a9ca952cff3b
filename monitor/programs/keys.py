"""Keys of random operators in a recorded step: draws of a generator seeded by the run's seed and the step."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from firmware_sim.errors import CallerError, EvidenceError

__all__ = ["MAXIMUM_DRAWS", "RecordedKeys", "RepeatedKeys", "step_seed"]

MAXIMUM_DRAWS = 1 << 20


def step_seed(seed: int, step: int) -> int:
    """Seed of torch's generator at the start of a step, in [0, 2^63)."""
    digest = hashlib.sha256(f"chipwitness/step-seed/{seed}/{step}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _draw(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


class _Sequence:
    """The draws 0, 1, 2, … of a step."""

    def __init__(self, seed: int, step: int) -> None:
        self._generator = torch.Generator().manual_seed(step_seed(seed, step))
        self._drawn: list[int] = []

    def at(self, index: int) -> int:
        if index >= MAXIMUM_DRAWS:
            raise EvidenceError(f"a step draws at most {MAXIMUM_DRAWS} random keys")
        while len(self._drawn) <= index:
            self._drawn.append(_draw(self._generator))
        return self._drawn[index]


class RecordedKeys:
    """Takes keys from torch's global generator and says which draws of the step they are.

    The global generator is used so that activation checkpointing, which puts the generator back before it computes a
    part again, gets the same keys again.
    """

    def __init__(self, seed: int, step: int) -> None:
        self._expected = _Sequence(seed, step)
        self._index_of: dict[int, int] = {}
        self._taken: list[int] = []

    def __call__(self) -> int:
        key = _draw(torch.default_generator)
        index = self._index_of.setdefault(key, len(self._index_of))
        if self._expected.at(index) != key:
            raise CallerError("the step seeds torch's generator or puts back a state of another step; leave it alone")
        self._taken.append(index)
        return key

    def take(self) -> list[int]:
        """Indices of the draws since the last time that this was asked."""
        taken, self._taken = self._taken, []
        return taken


class RepeatedKeys:
    """Gives a replay the keys of the draws that its program names."""

    def __init__(self, seed: int, step: int) -> None:
        self._keys = _Sequence(seed, step)
        self._due: list[int] = []

    def expect(self, draws: Sequence[int]) -> None:
        """The next call takes these draws; EvidenceError if the last one left some."""
        if self._due:
            raise EvidenceError("a call takes fewer random keys than its program says")
        self._due = list(draws)

    def __call__(self) -> int:
        if not self._due:
            raise EvidenceError("a call takes more random keys than its program says")
        return self._keys.at(self._due.pop(0))
