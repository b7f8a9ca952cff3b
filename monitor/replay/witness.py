"""What a step's batch changes in the new state although every gradient is zero: proof of a path past every loss.

The program runs three times from one state with the step's keys and numbers: on the recorded batch, and on two that a
seed makes of it. The seeds of its backward passes are zeros, and running statistics stay as they are. What honest
training makes of a batch it makes by gradients, so that all three runs end alike. A run that fails proves nothing, nor
does one in which a value is not finite where the recorded batch's is, or the other way round: what is gated on that
differs honestly. Zeros have no sign here, since a gradient that vanishes may vanish from either side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from firmware_sim.errors import EvidenceError
from monitor.numerics import recording
from monitor.programs.memory import Access, Memory
from monitor.programs.parts import parts_of
from monitor.programs.paths import seeds
from monitor.programs.program import Program
from monitor.replay.replaying import ProgramTraining

__all__ = ["DRAWS", "Difference", "altered", "differences"]

DRAWS = 2
"""Batches made of the recorded one: a difference counts where each of them shows it."""
_STATISTICS = frozenset({"running_mean", "running_var"})
_SCALES = 128
_NUMBER = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """An element of the new state that differs by the batch.

    Attributes:
        tensor: its name, ``kind/name``.
        element: its number in the flattened tensor.
        values: what the recorded batch and each other one leave there.
    """

    tensor: str
    element: int
    values: tuple[float | int, ...]


def differences(
    training: ProgramTraining,
    program: Program,
    scalars: Sequence[float],
    batch: Mapping[str, Tensor],
    seed: bytes,
    *,
    skipped: Collection[str] = (),
) -> list[Difference]:
    """Tensors of the state that the next step's batch changes past every loss, each with its first such element.

    The training stands afterwards where it stood before. Where no seed of a backward pass is known, gradients may be
    anything, and buffers alone are looked at.

    Args:
        seed: makes the other batches (``altered``).
        skipped: tensors, ``kind/name``, of which nothing is said.
    """
    watch = _Silence(program, {f"{each.kind}/{each.name}": each.shape for each in training.task.state})
    wanted = [name for name in program.commit if name not in skipped and (watch.seeds or name.startswith("buffer/"))]
    reached: list[dict[str, Tensor]] = []
    marks: dict[str, Tensor] = {}
    with _undone(training) as put_back:
        for number in range(DRAWS + 1):
            given = altered(batch, seed, number) if number else batch
            watch.begin()
            try:
                training.run(program, scalars, given, partial(recording, training.task.numerics), watch)
            except EvidenceError:
                return []
            state = training.memory.export()
            for name in wanted if number else ():
                mark = _differs(reached[0][name], state[name])
                marks[name] = mark if number == 1 else marks[name] & mark
            wanted = [name for name in wanted if not number or bool(marks[name].any())]
            if not wanted:
                return []
            reached.append({name: state[name].clone() for name in wanted})
            put_back()
    return [_first(name, marks[name], [each[name] for each in reached]) for name in wanted]


def altered(batch: Mapping[str, Tensor], seed: bytes, number: int) -> dict[str, Tensor]:
    """A batch made of another: the elements of each tensor in another order, and real numbers scaled by 1/2 to 1."""
    found = {}
    for name, tensor in batch.items():
        key = hashlib.sha256(seed + number.to_bytes(_NUMBER, "big") + name.encode()).digest()
        drawn = np.random.Philox(key=int.from_bytes(key[:16], "big"))
        scale = (_SCALES + int(drawn.random_raw()) % (_SCALES - 1)) / (2 * _SCALES)
        order = torch.from_numpy(np.argsort(drawn.random_raw(tensor.numel()), kind="stable"))
        moved = tensor.reshape(-1)[order.to(tensor.device)].reshape(tensor.shape)
        if tensor.is_complex() or tensor.is_floating_point():
            wide = moved if tensor.is_complex() else moved.double()
            moved = (wide * scale).to(tensor.dtype)
        found[name] = moved
    return found


@contextmanager
def _undone(training: ProgramTraining) -> Iterator[Callable[[], None]]:
    """Whatever steps are taken inside are undone at its end, and whenever what it yields is called."""
    before = {name: tensor.clone() for name, tensor in training.memory.export().items()}
    step, absent, left = training.step, training.absent, training.left

    def put_back() -> None:
        training.memory.load(before)
        training.step, training.absent, training.left = step, absent, left

    try:
        yield put_back
    finally:
        put_back()


class _Silence:
    """Has seeds be zeros, keeps running statistics, and ends a run that is finite elsewhere than the first."""

    def __init__(self, program: Program, state: Mapping[str, Sequence[int]]) -> None:
        self.seeds = seeds(program, state)
        accesses = Memory(program, state).accesses
        self._views = frozenset(access.number for access in accesses if access.is_view)
        self._statistics = {access.number: found for access in accesses if (found := _statistics(access))}
        self._finite: list[list[Tensor | None]] = []
        self._is_first, self._call = True, 0
        self._kept: list[tuple[Tensor, Tensor]] = []

    def begin(self) -> None:
        """A run begins."""
        self._is_first, self._call = not self._finite, 0

    def before(self, inputs: Sequence[Tensor]) -> None:
        """The next call is about to run."""
        slots = self._statistics.get(self._call, ())
        self._kept = [(inputs[slot], inputs[slot].clone()) for slot in slots]

    def after(self, outputs: Sequence[Tensor]) -> None:
        """It has returned and written these."""
        for tensor, before in self._kept:
            tensor.copy_(before)
        if self._call not in self._views:
            for tensor in outputs:
                if self._call in self.seeds:
                    tensor.zero_()
                elif _has_sign(tensor):
                    tensor.add_(0.0)
        found = [_finite(tensor) for tensor in outputs]
        if self._is_first:
            self._finite.append(found)
        elif not all(map(_is_alike, self._finite[self._call], found)):
            raise EvidenceError("a value is finite where the recorded batch's is not, or the other way round")
        self._call += 1


def _statistics(access: Access) -> tuple[int, ...]:
    """Inputs of a call that are running statistics which it writes."""
    slots = (slot for part in parts_of(access) for name in _STATISTICS for slot in part.slots.get(name, ()))
    return tuple(slot for slot in slots if slot in access.written)


def _has_sign(tensor: Tensor) -> bool:
    return (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype.itemsize > 1


def _finite(tensor: Tensor) -> Tensor | None:
    """Where a tensor is finite; None where it is so everywhere."""
    if not _has_sign(tensor):
        return None
    found = torch.isfinite(tensor)
    return None if bool(found.all()) else found


def _is_alike(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _differs(one: Tensor, other: Tensor) -> Tensor:
    """Where both are finite, and not equal."""
    found = _flat(one) != _flat(other)
    return found & torch.isfinite(_flat(one)) & torch.isfinite(_flat(other)) if _has_sign(one) else found


def _flat(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def _first(name: str, mark: Tensor, reached: Sequence[Tensor]) -> Difference:
    element = int(mark.int().argmax())
    return Difference(tensor=name, element=element, values=tuple(_flat(each)[element].item() for each in reached))
