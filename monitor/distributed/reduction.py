"""The gradients of all micro-batches, added exactly where their owners are: one exchange and one rounding.

Each gradient is cut into one piece for each rank. After each backward pass every rank sends the other ranks their
pieces of what it computed, and adds what it gets to exact sums of constant size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from firmware_sim.errors import CallerError
from monitor.numerics import Session
from monitor.numerics.exact.accumulator import ExactSum

__all__ = ["Chunk", "Cut", "Reduction", "even_pieces", "row_pieces", "strip"]

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


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one rank sent another of one micro-batch's gradients: tensors, and the bytes of their pieces in order."""

    micro: int
    names: tuple[str, ...]
    destination: int
    data: Tensor = field(compare=False)


class Reduction:
    """Sums the pieces of gradients that this rank owns, over micro-batches and ranks.

    Attributes:
        idle: this rank's present backward pass is no micro-batch's: it joins the exchange with zeros.
        last: the present backward pass is the step's last.
        sent: called with each chunk before it is sent; may change its data.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], cut: Cut, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.pieces = {name: cut(shape, ranks) for name, shape in shapes.items()}
        self.sent: Callable[[Chunk], None] | None = None
        self.micro, self.idle, self.last = 0, False, False
        self._session: Session | None = None
        self._sums: dict[str, ExactSum] = {}

    def begin(self, session: Session, micro: int, *, idle: bool, last: bool) -> None:
        """A backward pass is about to begin."""
        self._session, self.micro, self.idle, self.last = session, micro, idle, last

    @property
    def session(self) -> Session:
        """The session of the open step."""
        if self._session is None:
            raise CallerError("gradients are reduced inside a step")
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
            if self.idle:
                rows = torch.zeros_like(rows)
            elif self.sent is not None:
                for destination, row in enumerate(rows):
                    data = strip(row, [self._place(name, destination) for name in names])
                    self.sent(Chunk(self.micro, tuple(names), destination, data))
                    self._put(row, names, destination, data)
            got = torch.empty_like(rows)
            dist.all_to_all_single(got, rows.contiguous())
            return self._added(names, got)

    def _added(self, names: Sequence[str], got: Tensor) -> Tensor | None:
        result = torch.zeros_like(got[0]) if self.last else None
        at = 0
        for name in names:
            size = self._place(name, self.rank)[1]
            held = self._sums.setdefault(name, ExactSum(size, got.device))
            for row in got:
                held.add(row[at : at + size])
            if result is not None:
                result[at : at + size] = self._sums.pop(name).rounded()
            at += self.width(name)
        return result

    def _place(self, name: str, rank: int) -> tuple[int, int]:
        """Width of a tensor in a row, and how much of it is a rank's piece."""
        first, last = self.pieces[name][rank]
        return self.width(name), last - first

    def _put(self, row: Tensor, names: Sequence[str], rank: int, data: Tensor) -> None:
        at = start = 0
        for name in names:
            width, size = self._place(name, rank)
            row[at : at + size] = data[start : start + size]
            at, start = at + width, start + size


def strip(row: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
    """A row without padding, given each tensor's width in it and how much of that is used."""
    starts = [sum(width for width, _ in places[:number]) for number in range(len(places))]
    return torch.cat([row[at : at + size] for at, (_, size) in zip(starts, places, strict=True)])
