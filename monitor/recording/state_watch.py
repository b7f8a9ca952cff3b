"""Notices writes of the state that no recorded operator made.

A copy of all that lies in the memory of chips, laid out as it lies there.

What committed states held, so that weights which a loop takes back are known for what they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import Node
from monitor.declaration.statement import Declaration
from monitor.loops.state import LoopState
from monitor.programs.bits import copy_over, same_bytes
from monitor.programs.memory_watch import WriteWatch
from monitor.programs.parts import PROOF, STEP
from monitor.programs.program import Program
from monitor.replay.repetition import ProgramTraining
from monitor.replay.steps import ProgramSteps
from monitor.sharding import ShardedMemory
from monitor.transcript import Leaf, RunFolder

__all__ = ["Earlier", "HeldState", "Mirror", "way_inside"]


_MOST_HASHES = 1 << 17
_KINDS = ("weight", "buffer")


class Earlier:
    """Hashes of the newest committed states: as many as there are 131,072 of, and one state at least.

    Args:
        memory: the state, whose digest is taken at each commit.
    """

    def __init__(self, memory: ShardedMemory) -> None:
        self._memory = memory
        self._states: OrderedDict[int, tuple[Node, ...]] = OrderedDict()
        self._count = 0

    def remember(self, step: int) -> None:
        """Keep what the memory's last digest was made of."""
        self._states[step] = tuple(self._memory.leaves)
        self._count += len(self._states[step])
        while self._count > _MOST_HASHES and len(self._states) > 1:
            self._count -= len(self._states.popitem(last=False)[1])

    def find(self, given: Mapping[str, Tensor]) -> tuple[int, dict[str, str]] | None:
        """The state that holds most of these flat tensors as weights or buffers, of several the newest.

        Returns its step, and under which name, ``kind/name``, it holds each; None where none holds any.
        """
        places = {name: list(self._places(tensor)) for name, tensor in given.items()}
        best: tuple[int, dict[str, str]] | None = None
        for step, nodes in reversed(self._states.items()):
            hashes = {node.start: node.hash for node in nodes}
            found: dict[str, str] = {}
            for name, forms in places.items():
                for own, leaves in forms:
                    if own not in found.values() and all(hashes.get(leaf.start) == leaf.hash for leaf in leaves):
                        found[name] = own
                        break
            if found and (best is None or len(found) > len(best[1])):
                best = step, found
        return best

    def evidence(self, step: int, names: Mapping[str, str]) -> dict[str, Tensor]:
        """What else a batch has to hold that holds tensors of a state, by their names there."""
        proof = self._memory.proof(self._states[step], set(names.values()))
        return {STEP: torch.tensor([step]), PROOF: proof}

    def _places(self, tensor: Tensor) -> Iterator[tuple[str, list[Node]]]:
        """Each tensor of the state that this may be a value of, with the hashes that it would have there."""
        for (kind, name), own in self._memory.tensors.items():
            if kind in _KINDS and own.dtype == tensor.dtype and own.numel() == tensor.numel() > 0:
                key = f"{kind}/{name}"
                yield key, self._memory.leaves_of({key: tensor.reshape(own.shape)})


class Mirror:
    """What memory held when it last followed; whole buffers are copied and compared, not tensor by tensor.

    Attributes:
        tensors: the copies, under ``kind/name``.
    """

    def __init__(self, memory: ShardedMemory) -> None:
        self._memory = memory
        self._buffers = [buffer.clone() for buffer in memory.buffers]
        spots = memory.spots.values()
        self.tensors = {
            name: self._buffers[number].as_strided(tensor.shape, tensor.stride(), first)
            for (name, tensor), (number, first) in zip(memory.export().items(), spots, strict=True)
        }

    def follow(self) -> None:
        """Hold what lies in memory now."""
        with torch.no_grad():
            for mine, buffer in zip(self._buffers, self._memory.buffers, strict=True):
                copy_over(mine, buffer)

    def differing(self) -> list[str]:
        """Names of tensors that hold other bytes in memory than here."""
        if all(map(same_bytes, self._buffers, self._memory.buffers)):
            return []
        return [name for name, tensor in self._memory.export().items() if not same_bytes(tensor, self.tensors[name])]


_INSIDE = "write the state only inside the with statement of a step"
_IN_STEP = "let the optimizer's own step() write it, or drop it inside of a step (optimizer.state.clear())"
_BY_OPERATORS = "write it with PyTorch's operators"


def way_inside(name: str) -> str:
    """Where a tensor of the state may be written, of one that was written between steps."""
    return _IN_STEP if name.startswith("optimizer/") else _INSIDE


class HeldState:
    """A copy of the state after the last committed step.

    Args:
        watched: look for writes; otherwise nothing here refuses anything.
        kept: hold the copy although nothing is watched.

    Attributes:
        before: the copy, under ``kind/name``; empty if none is held. It stays the same object, and follows.
    """

    def __init__(self, loop: LoopState, *, watched: bool, kept: bool) -> None:
        self._loop, self._watched = loop, watched
        self._mirror = Mirror(loop.memory) if watched or kept else None
        self._followed = Mirror(loop.memory) if watched else None

    @property
    def before(self) -> Mapping[str, Tensor]:
        return {} if self._mirror is None else self._mirror.tensors

    def remember(self) -> None:
        """Hold what lies in memory now."""
        for mirror in (self._mirror, self._followed):
            if mirror is not None:
                mirror.follow()

    def require_untouched(self) -> None:
        """CallerError if somebody wrote the state between steps."""
        for refusal in self.written_between():
            raise refusal

    def written_between(self, *, by_operators: bool | None = None) -> Iterator[CallerError]:
        """Why the next step cannot be recorded, for each tensor of the state that was written since the last one.

        Args:
            by_operators: operators of the loop are captured, and whether any has written weights or buffers; None
                where no write is.
        """
        if not self._watched or self._mirror is None:
            return
        for name in self._loop.strays():
            if by_operators is None or name.startswith(("gradient/", "optimizer/")):
                yield CallerError(f"{name} was moved out of chip memory between steps; {way_inside(name)}")
        for name in () if by_operators else self._mirror.differing():
            yield CallerError(f"{name} was written between steps; {way_inside(name)}")

    def has_moved(self) -> bool:
        """Whether a tensor of the state lies elsewhere than in chip memory."""
        return self._watched and bool(self._loop.strays())

    def watch(self, step: int, batch: Mapping[str, Tensor]) -> WriteWatch:
        """A watch over the state and the batch of a step that is about to begin."""
        watch = WriteWatch(step)
        if self._followed is not None:
            for name, tensor in self._loop.memory.export().items():
                watch.add(name, tensor, self._followed.tensors[name])
            for name, tensor in batch.items():
                watch.add(f"batch tensor {name}", tensor)
        return watch

    def repeat(
        self, declared: Declaration, program: Program, leaf: Leaf, batch: Mapping[str, Tensor], root: bytes, log: bytes
    ) -> None:
        """Interpret a step from the state before it.

        Raises:
            CallerError: it does not lead to what lies in memory now, or to another leaf.
        """
        assert leaf.execution is not None
        training = ProgramTraining(declared, device=self._loop.memory.place)
        training.memory.load(self.before)
        training.step = leaf.step - 1
        try:
            reached, _ = training.take_step(program, leaf.execution, batch, root, log)
        except EvidenceError as error:
            raise CallerError(f"step {leaf.step} cannot be recorded: {error}") from None
        self._require_equal(training, leaf.step)
        if reached != leaf:
            raise CallerError(f"step {leaf.step} reads other values when its program is repeated")

    def repeat_segment(self, run: RunFolder, last: int) -> None:
        """Interpret the steps since the last checkpoint, from disk; raises as ``repeat`` does."""
        start = run.checkpoint_before(last)
        steps = ProgramSteps(run, start, device=self._loop.memory.place)
        for _ in range(start, last):
            steps.take()
        self._require_equal(steps.training, last)

    def _require_equal(self, training: ProgramTraining, step: int) -> None:
        mine = self._loop.memory.export()
        for name, tensor in training.memory.export().items():
            if not same_bytes(tensor, mine[name]):
                raise CallerError(
                    f"in step {step}, something other than a recorded operator wrote {name}; {_BY_OPERATORS}"
                )
