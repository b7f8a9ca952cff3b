"""What ranks hand each other: signed by who gives it, and compared by who gets it before anybody uses it.

A seal is one rank's signature over the digests of what it gives in one collective: one digest for each receiver, or one
for all of them. Bytes unlike it stop the step where they arrive (``statements.Statements.require``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from monitor.distributed.statements import SEAL_BYTES, Label, Statements

__all__ = ["Places", "Wire", "strip"]

Places = Callable[[int], Sequence[tuple[int, int]]]
"""Given a rank, each tensor's width in a row that it gives or gets, and how much of that is used."""


class Wire:
    """One rank's end of the collectives of a step, in the open process group.

    Attributes:
        statements: signs and compares; None where ranks sign nothing.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.statements: Statements | None = None

    def to_each(self, label: Label, rows: Tensor, places: Places) -> Tensor:
        """Give row r to rank r; returns the rows that came, by sender.

        Args:
            rows: (ranks, width); what ``places`` leaves out is padding, which is not signed.

        Raises:
            EvidenceError: a sender signed something else.
        """
        parts = [strip(row, places(rank)) for rank, row in enumerate(rows)]
        seals = self._seals(label, parts, rows.device)
        came = self.carry(rows)
        self._compare(label, seals, [strip(row, places(self.rank)) for row in came])
        return came

    def to_all(self, label: Label, row: Tensor, places: Places | None = None) -> Tensor:
        """Give one row to every rank; returns (ranks, width): the rows that came, by sender.

        Raises:
            EvidenceError: a sender signed something else.
        """
        used = places or (lambda _: [(row.numel(), row.numel())])
        seals = self._seals(label, [strip(row, used(self.rank))], row.device)
        came = self.carry_to_all(row)
        self._compare(label, seals, [strip(each, used(rank)) for rank, each in enumerate(came)])
        return came

    def from_first(self, label: Label, value: Tensor) -> None:
        """Have rank 0's tensor in this one, on every rank; EvidenceError where rank 0 signed something else."""
        seals = self._seals(label, [value] if self.rank == 0 else [], value.device)
        if self.ranks > 1:
            dist.broadcast(value, 0)
        self._compare(label, seals[:1], [value])

    def settle(self) -> None:
        """All ranks compare the seals that they got: who gave two ranks unlike ones is found out.

        Raises:
            EvidenceError: another rank got other seals.
        """
        if self.statements is None or self.ranks == 1:
            return
        for rank, seals in enumerate(self._gathered(self.statements.seals(), torch.device("cpu"))):
            if rank != self.rank:
                self.statements.require_same(rank, seals)

    def carry(self, rows: Tensor) -> Tensor:
        """Row r to rank r; what each rank gave this one."""
        came = torch.empty_like(rows)
        dist.all_to_all_single(came, rows.contiguous())
        return came

    def carry_to_all(self, row: Tensor) -> Tensor:
        """One row to every rank; what each rank gave."""
        came = row.new_empty((self.ranks, row.numel()))
        dist.all_gather_into_tensor(came.view(-1), row.contiguous())
        return came

    def _seals(self, label: Label, parts: Sequence[Tensor], device: torch.device) -> list[bytes]:
        """Every rank's seal, zeros of one that gives nothing; none where ranks sign nothing."""
        if self.statements is None or self.ranks == 1:
            return []
        found = self._gathered(self.statements.give(label, parts) if parts else bytes(SEAL_BYTES), device)
        for rank, seal in enumerate(found):
            if any(seal):
                self.statements.note(rank, seal)
        return found

    def _gathered(self, data: bytes, device: torch.device) -> list[bytes]:
        """What every rank gives of these bytes' size."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        every = [torch.empty_like(mine) for _ in range(self.ranks)]
        dist.all_gather(every, mine)
        return [each.cpu().numpy().tobytes() for each in every]

    def _compare(self, label: Label, seals: Sequence[bytes], parts: Sequence[Tensor]) -> None:
        if self.statements is not None:
            for sender, (seal, part) in enumerate(zip(seals, parts, strict=False)):
                if sender != self.rank:
                    self.statements.require(sender, label, seal, part)


def strip(row: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
    """A row without padding, given each tensor's width in it and how much of that is used."""
    ends = list(accumulate(width for width, _ in places))
    if all(width == size for width, size in places):
        return row[: ends[-1] if ends else 0]
    return torch.cat([row[end - width : end - width + size] for end, (width, size) in zip(ends, places, strict=True)])
