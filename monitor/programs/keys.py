"""Keys of random operators in a recorded step: draws of a generator seeded by the run's seed and the step.

A step has streams of draws. Stream 0 is the step's own; micro-batch m draws from stream m + 1, so that any process
that computes it, in any order, draws the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from firmware_sim.errors import CallerError, EvidenceError

__all__ = ["MAXIMUM_DRAWS", "MAXIMUM_STREAMS", "OwnKeys", "RecordedKeys", "RepeatedKeys", "step_seed"]

MAXIMUM_DRAWS = 1 << 20
"""Of each stream."""
MAXIMUM_STREAMS = 1 << 20


def step_seed(seed: int, step: int, stream: int = 0) -> int:
    """Seed of torch's generator at the start of a step, or of a stream of its draws, in [0, 2^63)."""
    place = f"{step}/{stream}" if stream else f"{step}"
    digest = hashlib.sha256(f"chipwitness/step-seed/{seed}/{place}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _draw(generator: torch.Generator) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


class _Sequence:
    """The draws 0, 1, 2, … of one stream of a step."""

    def __init__(self, seed: int, step: int, stream: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(step_seed(seed, step, stream))
        self._drawn: list[int] = []

    def at(self, index: int) -> int:
        if index >= MAXIMUM_DRAWS:
            raise EvidenceError(f"a step draws more than the {MAXIMUM_DRAWS} random keys that are allowed")
        while len(self._drawn) <= index:
            self._drawn.append(_draw(self._generator))
        return self._drawn[index]


class RecordedKeys:
    """Takes keys from torch's global generator and says which draws of the step they are.

    The global generator is used so that activation checkpointing, which puts the generator back before it computes a
    part again, gets the same keys again.
    """

    def __init__(self, seed: int, step: int) -> None:
        self._seed, self._step = seed, step
        self._stream = 0
        self._expected = _Sequence(seed, step)
        self._index_of: dict[int, int] = {}
        self._taken: list[int] = []

    @contextmanager
    def stream(self, number: int) -> Iterator[None]:
        """While it is open, torch's generator gives the draws of another stream than the step's own."""
        before, random = (self._stream, self._expected, self._index_of), torch.get_rng_state()
        self._stream, self._expected, self._index_of = number, _Sequence(self._seed, self._step, number), {}
        torch.default_generator.manual_seed(step_seed(self._seed, self._step, number))
        try:
            yield
        finally:
            self._stream, self._expected, self._index_of = before
            torch.set_rng_state(random)

    def __call__(self) -> int:
        key = _draw(torch.default_generator)
        index = self._index_of.setdefault(key, len(self._index_of))
        if self._expected.at(index) != key:
            raise CallerError(
                "the step seeds torch's generator or restores the generator state of another step; leave the "
                "generator alone"
            )
        self._taken.append(self._stream * MAXIMUM_DRAWS + index)
        return key

    def take(self) -> list[int]:
        """The draws since the last time that this was asked: index + 2^20 · stream."""
        taken, self._taken = self._taken, []
        return taken


class OwnKeys:
    """Keys of operators that run between two steps: torch's generator stays as the loop left it."""

    def __init__(self, seed: int, step: int) -> None:
        self._sequence = _Sequence(seed, step)
        self._drawn = self._taken = 0

    def __call__(self) -> int:
        self._drawn += 1
        return self._sequence.at(self._drawn - 1)

    def take(self) -> list[int]:
        """The draws since the last time that this was asked."""
        first, self._taken = self._taken, self._drawn
        return list(range(first, self._drawn))


class RepeatedKeys:
    """Gives a replay the keys of the draws that its program names."""

    def __init__(self, seed: int, step: int) -> None:
        self._seed, self._step = seed, step
        self._streams: dict[int, _Sequence] = {}
        self._due: list[int] = []

    def expect(self, draws: Sequence[int]) -> None:
        """The next call takes these draws; EvidenceError if the last one left some."""
        if self._due:
            raise EvidenceError("a call takes fewer random keys than its program says")
        self._due = list(draws)

    def __call__(self) -> int:
        if not self._due:
            raise EvidenceError("a call takes more random keys than its program says")
        stream, index = divmod(self._due.pop(0), MAXIMUM_DRAWS)
        if stream not in self._streams:
            self._streams[stream] = _Sequence(self._seed, self._step, stream)
        return self._streams[stream].at(index)
