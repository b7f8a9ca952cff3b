"""Which rank departed from the program: one process repeats the run and compares what each rank signed.

No distributed code runs here. The gradients of micro-batches are what the program stacks and adds, so that a chunk is
pieces of them; a batch, a norm and a shard are compared likewise. The first step with a difference is told, and in it
the earliest kind: what a rank read decides what it sent, which decides the norms, which decide the shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import VerifyingKey
from monitor.distributed.job import norm_of
from monitor.distributed.metering import expected_moves, expected_work, norms_of, sums_at
from monitor.distributed.reduction import Cut, even_pieces, row_pieces
from monitor.distributed.statements import batch_digest, flat_digest, read_keys, read_step
from monitor.programs.program import Program
from monitor.recording.micro_batches import micro_batch
from monitor.replay.steps import ProgramSteps
from monitor.transcript import RunFolder

__all__ = ["Departure", "departures"]


_KINDS = ("statement", "batch", "chunk", "norm", "shard", "work", "moved")


@dataclass(frozen=True, slots=True)
class Departure:
    """What one rank did otherwise than the program: ``kind`` is one of ``_KINDS``."""

    step: int
    rank: int
    kind: str
    text: str


def departures(run: RunFolder, lab: VerifyingKey) -> list[Departure]:
    """The departures of the first step that has any; none where every rank did what the program says.

    Args:
        run: a recorded run, with the ranks' statements beside its folder.
        lab: the key of the lab that recorded it.

    Raises:
        EvidenceError: the run or the ranks' keys cannot be read.
    """
    folder, run_id = run.folder, run.metadata.run_id.hex()
    signers = read_keys(folder, run_id, lab)
    steps, batches = ProgramSteps(run, 0), run.batches()
    names = [entry.name for entry in run.declared.state if entry.kind == "gradient"]
    for step in range(1, run.committed + 1):
        program = steps.program(step)
        watch = _Gradients(program, names)
        steps.take(watch=watch)
        truth = _Truth(watch, program, batches.batch(step), steps.training.memory.tensors)
        found: list[Departure] = []
        keys = signers[max(first for first in signers if first <= step)]
        for rank, key in enumerate(keys):
            try:
                said = read_step(folder, run_id, step, rank, key)
                found += [Departure(step, rank, *what) for what in truth.compare(said, rank, len(keys))]
            except (EvidenceError, CallerError, KeyError, TypeError, ValueError) as error:
                found.append(Departure(step, rank, "statement", f"{error}"))
        for kind in _KINDS:
            if first := [each for each in found if each.kind == kind]:
                return first
    return []


class _Gradients:
    """Keeps, of one repeated step, the gradients of each micro-batch and their sums."""

    def __init__(self, program: Program, names: Sequence[str]) -> None:
        self._start, self._names, self._at = sums_at(program, len(names)), names, 0
        self.parts: dict[str, list[Tensor]] = {}
        self.sums: dict[str, Tensor] = {}

    def before(self, inputs: Sequence[Tensor]) -> None:
        """The next call is about to run."""
        number, is_sum = divmod(self._at - self._start, 2)
        if 0 <= number < len(self._names) and not is_sum:
            self.parts[self._names[number]] = [tensor.detach().clone() for tensor in inputs]

    def after(self, outputs: Sequence[Tensor]) -> None:
        """It has returned."""
        number, is_sum = divmod(self._at - self._start, 2)
        if 0 <= number < len(self._names) and is_sum:
            self.sums[self._names[number]] = outputs[0].detach().clone()
        self._at += 1


class _Truth:
    """What the ranks of a step should have signed."""

    def __init__(
        self,
        found: _Gradients,
        program: Program,
        batch: Mapping[str, Tensor],
        state: Mapping[tuple[str, str], Tensor],
    ) -> None:
        self._program = program
        self._parts, self._sums, self._state = found.parts, found.sums, state
        self._batch = dict(batch) if set(batch) != {"batch"} else batch["batch"]
        self._count = len(next(iter(found.parts.values())))

    def compare(self, said: Mapping[str, Any], rank: int, ranks: int) -> list[tuple[str, str]]:
        """Kind and text of each difference."""
        found: list[tuple[str, str]] = []
        own = range(rank, self._count, ranks)
        if set(said["batches"]) != {str(micro) for micro in own}:
            found.append(("statement", f"it signs other micro-batches than its {len(own)}"))
        for micro in own:
            expected = batch_digest(micro_batch(self._batch, micro, self._count))
            if said["batches"].get(str(micro)) != expected:
                found.append(("batch", f"it trained on other samples than micro-batch {micro}'s"))
        found += self._chunks(said["chunks"], own, ranks)
        norms = [flat_digest(norm_of(each)) for each in self._sums.values()] if said["norms"] else []
        if said["norms"] != norms:
            found.append(("norm", "it scaled by other norms than those of the summed gradients"))
        work = expected_work(self._program, len(self._parts), self._count, ranks)
        if said["work"] != [work.calls, work.flop]:
            calls, flop = said["work"]
            extra = f"{calls - work.calls} calls and {flop - work.flop} FLOP"
            found.append(("work", f"its meter counts {extra} beside its micro-batches and its part of the update"))
        found += self._moves(said["moved"], ranks)
        for name, (first, last, digest) in said["shards"].items():
            kind, _, tensor = name.partition("/")
            if flat_digest(self._state[kind, tensor].reshape(-1)[first:last]) != digest:
                found.append(("shard", f"it held another {name} than the update leads to"))
        return found

    def _moves(self, moved: Mapping[str, int], ranks: int) -> list[tuple[str, str]]:
        """Collectives take what one of the two cuts gives, and none where there is one rank."""
        shapes = {name: tuple(parts[0].shape) for name, parts in self._parts.items()}
        is_clipped = norms_of(self._program, len(shapes)) > 0
        for cut in (row_pieces, even_pieces):
            pieces = {name: cut(shape, ranks) for name, shape in shapes.items()}
            expected = expected_moves(
                pieces, micro_batches=self._count, is_sharded=cut is row_pieces, is_clipped=is_clipped
            )
            kinds = {*moved, *expected} if ranks > 1 else set(moved)
            limits = {kind: expected.get(kind, (0, 0)) if ranks > 1 else (0, 0) for kind in kinds}
            if all(least <= moved.get(kind, 0) <= most for kind, (least, most) in limits.items()):
                return []
        return [("moved", f"it gave other bytes to collectives than the step's {ranks} ranks exchange: {dict(moved)}")]

    def _chunks(self, chunks: Sequence[Any], own: range, ranks: int) -> list[tuple[str, str]]:
        """Chunks are pieces of the gradients by one of the two cuts, and all of them."""
        if ranks == 1:
            return []
        found: list[list[tuple[str, str]]] = []
        for cut in (row_pieces, even_pieces):
            try:
                found.append(self._cut(chunks, own, ranks, cut))
            except IndexError:
                continue
        return min(found, key=len)

    def _cut(self, chunks: Sequence[Any], own: range, ranks: int, cut: Cut) -> list[tuple[str, str]]:
        pieces = {name: cut(tuple(parts[0].shape), ranks) for name, parts in self._parts.items()}
        found = []
        sent: set[tuple[int, str, int]] = set()
        for micro, names, destination, digest in chunks:
            data = [self._parts[name][micro].reshape(-1)[slice(*pieces[name][destination])] for name in names]
            sent |= {(micro, name, destination) for name in names}
            if flat_digest(torch.cat(data)) != digest:
                bucket = f"{names[0]} … {names[-1]}" if len(names) > 1 else names[0]
                found.append(
                    ("chunk", f"of micro-batch {micro} it sent rank {destination} other gradients of {bucket}")
                )
        if sent != {(micro, name, to) for micro in own for name in self._parts for to in range(ranks)}:
            found.append(("chunk", "it did not send each of its micro-batches' gradients to each rank"))
        return found
