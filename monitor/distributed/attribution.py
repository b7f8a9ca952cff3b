"""Which rank departed from the program: one process repeats the run and compares what each rank signed.

No distributed code runs here. The gradients of micro-batches are what the program stacks and adds, so that a chunk is
pieces of them; whatever else a rank signs is compared likewise. The first step with a difference counts, and in it the
earliest kind: what ranks give each other before a step decides what they compute, which decides the chunks, which
decide the norms, which decide the shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firmware_sim import NO_WORK, Work
from firmware_sim.errors import CallerError, EvidenceError, Unreadable
from firmware_sim.evidence import VerifyingKey
from monitor.distributed.job import largest_of, scales_of, squares_of
from monitor.distributed.metering import STACK, expected_moves, expected_work, norms_of, sums_at
from monitor.distributed.reduction import Cut, even_pieces, row_pieces
from monitor.distributed.statements import (
    OlderStatement,
    batch_digest,
    described,
    flat_digest,
    keys_at,
    read_complaints,
    read_keys,
    read_step,
    sealed,
)
from monitor.programs.program import Program
from monitor.recording.micro_batches import micro_batch
from monitor.replay.steps import ProgramSteps, execution_of
from monitor.transcript import STEP, RunFolder

__all__ = ["Departure", "departures"]


_BEFORE = ("complaint", "statement", "load", "weight", "batch", "chunk", "largest", "squares", "sum", "norm")
_KINDS = (*_BEFORE, "loss", "shard", "work", "moved", "between")


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
        run: a recorded run, with the ranks' statements next to its folder.
        lab: the key of the lab that recorded it.

    Raises:
        EvidenceError: the run or the ranks' keys cannot be read.
        CallerError: the ranks' statements are of an older form.
    """
    folder, run_id = run.folder, run.metadata.run_id.hex()
    signers = read_keys(folder, run_id, lab)
    complaints = read_complaints(folder, run_id, signers)
    steps, batches = ProgramSteps(run, 0), run.batches()
    learning = [entry.name for entry in run.declared.state if entry.kind == "gradient"]
    for step in range(1, run.committed + 1):
        program = steps.program(step)
        watch = _Gradients(program, learning if execution_of(run.leaf(step)).kind == STEP else ())
        before = {key: tensor.clone() for key, tensor in steps.training.memory.tensors.items()}
        steps.take(watch=watch)
        truth = _Truth(watch, program, batches.batch(step), before, steps.training.memory.tensors)
        found = [Departure(each, rank, "complaint", text) for each, rank, text in complaints if each == step]
        keys = keys_at(signers, step)
        heard = [_Heard.of(truth, folder, run_id, step, rank, keys) for rank in range(len(keys))]
        found += [Departure(step, rank, *what) for rank, each in enumerate(heard) for what in each.differences]
        older = [each.older for each in heard if each.older is not None]
        if len(older) == len(keys):
            raise older[0]
        found += _conflicts(step, heard)
        between = sum((each.between for each in heard), NO_WORK)
        execution = run.leaf(step).execution
        recorded = NO_WORK if execution is None else execution.outside
        if between != recorded:
            text = f"it recorded {recorded} on the state before the step, but all ranks signed {between}"
            found.append(Departure(step, 0, "between", text))
        for kind in _KINDS:
            if first := [each for each in found if each.kind == kind]:
                return first
    return [Departure(step, rank, "complaint", text) for step, rank, text in complaints]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heard:
    """What one rank signed of a step: each difference to the program, what it gave and got, and if it is too old."""

    differences: Sequence[tuple[str, str]]
    between: Work = NO_WORK
    given: str | None = None
    seals: Sequence[str] | None = None
    older: OlderStatement | None = None

    @classmethod
    def of(cls, truth: _Truth, folder: Path, run_id: str, step: int, rank: int, keys: Sequence[VerifyingKey]) -> _Heard:
        differences: list[tuple[str, str]] = []
        try:
            said = read_step(folder, run_id, step, rank, keys[rank])
            differences += truth.compare(said, rank, len(keys))
            between, given = Work(*said["between"]), sealed(said["given"])
            return cls(differences=differences, between=between, given=given, seals=said["seals"])
        except OlderStatement as error:
            text = "its statement is of an older form than the others'"
            return cls(differences=[("statement", text)], older=error)
        except Unreadable:
            raise
        except (EvidenceError, CallerError, IndexError, KeyError, TypeError, ValueError) as error:
            return cls(differences=[*differences, ("statement", f"{error}")])


def _conflicts(step: int, heard: Sequence[_Heard]) -> Iterator[Departure]:
    """Pairs of ranks that sign different things about what one gave the other."""
    for rank, got in enumerate(heard):
        for sender, gave in enumerate(heard):
            if gave.given is not None and got.seals is not None and got.seals[sender : sender + 1] != [gave.given]:
                text = f"what it signed that rank {sender} gave it is not what rank {sender} signed: one of them lies"
                yield Departure(step, rank, "complaint", text)


class _Gradients:
    """Keeps, of one repeated step, each micro-batch's loss and gradients, and sums and norms of these."""

    def __init__(self, program: Program, names: Sequence[str]) -> None:
        self._start, self._names, self._at = sums_at(program, len(names)), names, 0
        self._norms, self.norms = norms_of(program, len(names)), list[Tensor]()
        self.parts: dict[str, list[Tensor]] = {}
        self.sums: dict[str, Tensor] = {}
        self.losses: list[Tensor] = []
        self._total = max(number for number, call in enumerate(program.calls) if call["operator"] == STACK)

    def before(self, inputs: Sequence[Tensor]) -> None:
        """The next call is about to run."""
        number, is_sum = divmod(self._at - self._start, 2)
        if 0 <= number < len(self._names) and not is_sum:
            self.parts[self._names[number]] = [tensor.detach().clone() for tensor in inputs]
        if self._at == self._total:
            self.losses = [tensor.detach().clone() for tensor in inputs]

    def after(self, outputs: Sequence[Tensor]) -> None:
        """It has returned."""
        number, is_sum = divmod(self._at - self._start, 2)
        if 0 <= number < len(self._names) and is_sum:
            self.sums[self._names[number]] = outputs[0].detach().clone()
        if self._at in self._norms:
            self.norms.append(outputs[0].detach().clone())
        self._at += 1


class _Truth:
    """What the ranks of a step should have signed."""

    def __init__(
        self,
        found: _Gradients,
        program: Program,
        batch: Mapping[str, Tensor],
        before: Mapping[tuple[str, str], Tensor],
        state: Mapping[tuple[str, str], Tensor],
    ) -> None:
        self._program = program
        self.parts, self.sums, self.losses, self.before, self._state = (
            found.parts,
            found.sums,
            found.losses,
            before,
            state,
        )
        self._batch = dict(batch) if set(batch) != {"batch"} else batch["batch"]
        self.count, self.norms = len(found.losses), found.norms

    def compare(self, said: Mapping[str, Any], rank: int, ranks: int) -> list[tuple[str, str]]:
        """Kind and text of each difference."""
        found: list[tuple[str, str]] = []
        own = range(rank, self.count, ranks)
        if set(said["batches"]) != {str(micro) for micro in own}:
            found.append(("statement", f"it signed micro-batches that are not exactly its {len(own)}"))
        for micro in own:
            expected = batch_digest(micro_batch(self._batch, micro, self.count))
            if said["batches"].get(str(micro)) != expected:
                found.append(("batch", f"it trained on samples that are not those of micro-batch {micro}"))
        found += self._exchanged(said["given"], said["moved"], rank, ranks)
        if said["norms"] != list(map(flat_digest, self.norms)):
            found.append(("norm", "it scaled by norms that are not those of the summed gradients"))
        work = expected_work(self._program, len(self.parts), self.count, ranks)
        if said["work"] != [work.calls, work.flop]:
            calls, flop = said["work"]
            extra = f"{calls - work.calls} calls and {flop - work.flop} FLOP"
            found.append(("work", f"its meter counts {extra} beyond its micro-batches and its part of the update"))
        for name, (first, last, digest) in said["shards"].items():
            kind, _, tensor = name.partition("/")
            piece = self._state[kind, tensor].reshape(-1)[first:last]
            if len(piece) != last - first or flat_digest(piece) != digest:
                found.append(("shard", f"the {name} that it held is not what the update gives"))
        return found

    def _exchanged(
        self, given: Sequence[Any], moved: Mapping[str, int], rank: int, ranks: int
    ) -> list[tuple[str, str]]:
        """What ranks give each other is pieces by one of the two cuts, and all of them; one rank gives nothing."""
        if ranks == 1:
            return [("moved", "it gave bytes to collectives, although it is the only rank")] if given or moved else []
        cuts = (_Cut(self, cut, rank, ranks) for cut in (row_pieces, even_pieces))
        return min((cut.given(given) + cut.moves(moved) for cut in cuts), key=len)


class _Cut:
    """What one rank of several should have given, where one way of cutting tensors holds."""

    def __init__(self, truth: _Truth, cut: Cut, rank: int, ranks: int) -> None:
        self._truth, self._rank, self._ranks = truth, rank, ranks
        self._is_sharded = cut is row_pieces
        weights = {name: tensor for (kind, name), tensor in truth.before.items() if kind == "weight"}
        self._pieces = {name: cut(tuple(tensor.shape), ranks) for name, tensor in weights.items()}

    def given(self, given: Sequence[Any]) -> list[tuple[str, str]]:
        """Kind and text of each difference in what the rank signed as given."""
        found, chunks = [], set()
        for kind, turn, names, digests in given:
            if kind == "chunk":
                chunks |= {(turn, name) for name in names}
            if (tensors := self._expected(kind, turn, names)) is None:
                found.append(
                    ("statement", f"it signed that it gave {kind!a:.40}, which ranks of its layout do not give")
                )
                continue
            expected = list(map(flat_digest, tensors))
            if len(digests) != len(expected):
                found.append(("statement", f"it signed {len(digests)} digests of {described(kind, names)}"))
            for to, (digest, truth) in enumerate(zip(digests, expected, strict=False)):
                if digest != truth:
                    found.append((kind, self._text(kind, turn, names, to)))
        turns = range(self._truth.count // self._ranks)
        if chunks != {(turn, name) for turn in turns for name in self._truth.parts}:
            found.append(("chunk", "it did not send each of its micro-batches' gradients to each rank"))
        return found

    def _text(self, kind: str, turn: int, names: Sequence[str], to: int) -> str:
        if kind != "chunk":
            return f"the numbers that it gave the other ranks are not those of the program: {described(kind, names)}"
        bucket = described("gradients", names)
        return f"for micro-batch {turn * self._ranks + self._rank} it sent rank {to} wrong {bucket}"

    def _expected(self, kind: str, turn: int, names: Sequence[str]) -> list[Tensor] | None:
        """What the program gives of a kind, one for each rank or one for all; None for what it does not give."""
        truth, own = self._truth, turn * self._ranks + self._rank
        if len(set(names)) != len(names) or (not names and kind != "loss"):
            return None
        if kind == "load" and self._rank == 0:
            [name] = names
            before: Tensor = truth.before[tuple(name.split("/", 1))]  # type: ignore[index]
            return [before]
        if kind == "weight" and self._is_sharded:
            return [self._joined({name: truth.before["weight", name] for name in names}, self._rank)]
        if kind == "chunk":
            parts = {name: truth.parts[name][own] for name in names}
            return [self._joined(parts, rank) for rank in range(self._ranks)]
        if kind == "sum" and not self._is_sharded:
            return [self._joined({name: truth.sums[name] for name in names}, self._rank)]
        if kind == "loss":
            return [torch.stack(truth.losses[self._rank :: self._ranks]).view(torch.int32)]
        if kind in ("largest", "squares") and self._is_sharded:
            shards = [self._joined({name: truth.sums[name]}, self._rank) for name in names]
            wholes = largest_of([truth.sums[name] for name in names])
            return [largest_of(shards) if kind == "largest" else squares_of(shards, scales_of(wholes))]
        return None

    def _joined(self, tensors: Mapping[str, Tensor], rank: int) -> Tensor:
        """A rank's pieces of some tensors, one after another."""
        return torch.cat([tensor.reshape(-1)[slice(*self._pieces[name][rank])] for name, tensor in tensors.items()])

    def moves(self, moved: Mapping[str, int]) -> list[tuple[str, str]]:
        """Kind and text, if collectives took other bytes than the cut gives."""
        learning = {name: pieces for name, pieces in self._pieces.items() if name in self._truth.parts}
        expected = expected_moves(
            learning,
            {name: pieces for name, pieces in self._pieces.items() if name not in learning},
            micro_batches=self._truth.count,
            is_sharded=self._is_sharded,
            is_clipped=bool(self._truth.norms),
        )
        limits = {kind: expected.get(kind, (0, 0)) for kind in {*moved, *expected}}
        if all(least <= moved.get(kind, 0) <= most for kind, (least, most) in limits.items()):
            return []
        return [
            (
                "moved",
                f"the bytes that it gave to collectives are not what the step's {self._ranks} ranks exchange: "
                f"{dict(moved)}",
            )
        ]
