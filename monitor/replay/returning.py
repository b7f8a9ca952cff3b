"""Results of programs that only compute, where later batches bring them back: whole tensors or rows, bit for bit.

What comes back in another form, or in part, is not seen, nor what comes back later than the batches that are given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from firmware_sim.errors import EvidenceError

__all__ = ["LEAST", "Returned", "Returns"]

LEAST = 64
"""Elements of a result below which it is not looked for."""
_MOST = 16
Returned = tuple[int, int, int, int]
"""The step that computed a result, the later one whose batch holds it, that tensor's place among the names there in
order, and how many elements come back."""


class Returns:
    """Looks among the results of steps for what the batches of later ones hold.

    Args:
        batch: of a step.
        last: up to which step a result is looked for.

    Attributes:
        found: at most 16.
    """

    def __init__(self, batch: Callable[[int], Mapping[str, Tensor]], last: int) -> None:
        self._batch, self._last = batch, last
        self._pieces: dict[int, dict[bytes, tuple[int, int]]] = {}
        self._sizes: dict[int, set[tuple[Any, int]]] = {}
        self.found: list[Returned] = []

    def watch(self, step: int) -> _Watch | None:
        """What looks at the results of a step; None where no later batch has anything that is long enough."""
        wanted: dict[bytes, tuple[int, int, int]] = {}
        for later in range(self._last, step, -1):
            wanted |= {digest: (later, *told) for digest, told in self._of(later).items()}
        wanted = {digest: told for digest, told in wanted.items() if digest not in self._of(step)}
        sizes = set().union(*(self._sizes[later] for later in range(step + 1, self._last + 1)))
        return _Watch(self, step, wanted, sizes) if wanted else None

    def _of(self, step: int) -> Mapping[bytes, tuple[int, int]]:
        """Digests of what is long enough in a step's batch; of none that is not there, as after a segment."""
        if step not in self._pieces:
            self._pieces[step], self._sizes[step] = {}, set()
            try:
                batch = self._batch(step)
            except EvidenceError:
                batch = {}
            for place, name in enumerate(sorted(batch)):
                for piece in _pieces(batch[name]):
                    self._sizes[step].add((piece.dtype, piece.numel()))
                    if digest := _digest(piece):
                        self._pieces[step][digest] = place, piece.numel()
        return self._pieces[step]


class _Watch:
    def __init__(
        self, owner: Returns, step: int, wanted: dict[bytes, tuple[int, int, int]], sizes: set[tuple[Any, int]]
    ) -> None:
        self._owner, self._step, self._wanted, self._sizes = owner, step, wanted, sizes

    def before(self, inputs: Sequence[Tensor]) -> None:
        """Nothing to see."""

    def after(self, outputs: Sequence[Tensor]) -> None:
        """Look for what a call has returned or written."""
        for piece in (piece for tensor in outputs for piece in _pieces(tensor)):
            if (piece.dtype, piece.numel()) in self._sizes and len(self._owner.found) < _MOST:
                told = self._wanted.pop(_digest(piece), None)
                if told is not None:
                    self._owner.found.append((self._step, *told))


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor, and its rows, of at least so many elements."""
    if tensor.numel() >= LEAST and tensor.dtype is not torch.bool:
        yield tensor
        if tensor.dim() > 1 and len(tensor) > 1 and tensor[0].numel() >= LEAST:
            yield from tensor


def _digest(piece: Tensor) -> bytes:
    """Of its bytes; empty where all its elements are one."""
    flat = piece.detach().reshape(-1).contiguous()
    if bool((flat == flat[0]).all()):
        return b""
    return hashlib.sha256(flat.cpu().view(torch.uint8).numpy().data).digest()
