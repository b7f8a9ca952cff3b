"""The gradients of all micro-batches, added exactly where their owners are: one exchange and one rounding.

Each gradient is cut into one piece for each rank. After each backward pass every rank sends the other ranks their
pieces of what it computed, and adds what it gets to exact sums of constant size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.distributed.statements import Label
from monitor.distributed.wire import Wire
from monitor.numerics import Session
from monitor.numerics.exact.accumulator import ExactSum

__all__ = ["Cut", "Reduction", "even_pieces", "row_pieces"]

Cut = Callable[[tuple[int, ...], int], list[tuple[int, int]]]
"""First and end of each rank's piece of a flattened tensor, given its shape and the number of ranks."""


def even_pieces(shape: tuple[int, ...], ranks: int) -> list[tuple[int, int]]:
    """Equal parts of the elements, the last ones shorter or empty."""
    total = prod(shape)
    size = -(-total // ranks)
    return [(min(size * rank, total), min(size * (rank + 1), total)) for rank in range(ranks)]


def row_pieces(shape: tuple[int, ...], ranks: int) -> list[tuple[int, int]]:
    """Equal parts of the first dimension, as FSDP2 cuts; the last ones shorter or empty."""
    inner = prod(shape[1:])
    return [(first * inner, last * inner) for first, last in even_pieces((shape[0],) if shape else (1,), ranks)]


class Reduction:
    """Sums the pieces of gradients that this rank owns, over micro-batches and ranks.

    Attributes:
        turn: number of the present backward pass in the step, from 0.
        last: it is the step's last.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], cut: Cut, wire: Wire) -> None:
        self.wire, self.rank, self.ranks = wire, wire.rank, wire.ranks
        self.pieces = {name: cut(shape, self.ranks) for name, shape in shapes.items()}
        self.turn, self.last = 0, False
        self._session: Session | None = None
        self._sums: dict[str, ExactSum] = {}

    def begin(self, session: Session, turn: int, *, last: bool) -> None:
        """A backward pass is about to begin."""
        self._session, self.turn, self.last = session, turn, last

    @property
    def micro(self) -> int:
        """The micro-batch of the present backward pass."""
        return self.turn * self.ranks + self.rank

    @property
    def session(self) -> Session:
        """The session of the open step."""
        if self._session is None:
            raise CallerError("reduce gradients only inside a step")
        return self._session

    def width(self, name: str) -> int:
        """Elements of a rank's row that a tensor takes; its piece may be shorter."""
        first, last = self.pieces[name][0]
        return last - first

    def exchange(self, names: Sequence[str], rows: Tensor) -> Tensor | None:
        """Send row r of some tensors' pieces to rank r, and add what comes; this rank's row of sums at the last pass.

        Args:
            rows: (ranks, Σ width) FP32; padding is ignored.
        """
        with self.session.aside(), torch.no_grad():
            label = Label("chunk", tuple(names), self.turn)
            return self._added(names, self.wire.to_each(label, rows, lambda rank: self.places(names, rank)))

    def _added(self, names: Sequence[str], got: Tensor) -> Tensor | None:
        result = torch.zeros_like(got[0]) if self.last else None
        at = 0
        for name in names:
            [(width, size)] = self.places([name], self.rank)
            held = self._sums.setdefault(name, ExactSum(size, got.device))
            for row in got:
                held.add(row[at : at + size])
            if result is not None:
                result[at : at + size] = self._sums.pop(name).rounded()
            at += width
        return result

    def places(self, names: Sequence[str], rank: int) -> list[tuple[int, int]]:
        """Width of each tensor in a row, and how much of it is a rank's piece."""
        pieces = [self.pieces[name][rank] for name in names]
        return [(self.width(name), last - first) for name, (first, last) in zip(names, pieces, strict=True)]
