"""What a step's batch changes in the new state although every gradient is zero: proof of a path past every loss.

The program runs three times from one state with the step's keys and numbers: on the recorded batch, and on two that a
seed makes of it. The seeds of its backward passes are zeros, and running statistics stay as they are. What honest
training makes of a batch it makes by gradients, so that all three runs end alike. A run that fails proves nothing, nor
does one in which a value is not finite where the recorded batch's is, or the other way round: what is gated on that
differs honestly. Zeros have no sign here, since a gradient that vanishes may vanish from either side.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from firmware_sim.errors import EvidenceError
from monitor.programs.flows import seeds
from monitor.programs.interpreter import Watch
from monitor.programs.memory import Access, Memory
from monitor.programs.parts import RECALLED, parts_of
from monitor.programs.program import Program
from monitor.programs.trace import in_numbers, layout_of
from monitor.sharding import ShardedMemory

__all__ = ["DRAWS", "Difference", "altered", "differences"]

Run = Callable[[Mapping[str, Tensor], Watch], object]
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
    program: Program,
    memory: ShardedMemory,
    run: Run,
    batch: Mapping[str, Tensor],
    seed: bytes,
    *,
    skipped: Collection[str] = (),
) -> list[Difference]:
    """Tensors of the state that a step's batch changes past every loss, each with its first such element.

    The memory holds afterwards what it held before. Where no seed of a backward pass is known and more than buffers
    differ, a gradient may have come through, and nothing is proven.

    Args:
        run: takes the step on the memory.
        seed: makes the other batches (``altered``).
        skipped: tensors, ``kind/name``, of which nothing is said.
    """
    before = {name: tensor.clone() for name, tensor in memory.export().items()}
    watch = _Silence(program, {name: in_numbers(layout_of(each))["shape"] for name, each in before.items()})
    wanted = list(program.commit)
    reached: list[dict[str, Tensor]] = []
    marks: dict[str, Tensor] = {}
    try:
        for number in range(DRAWS + 1):
            watch.begin()
            run(altered(batch, seed, number) if number else batch, watch)
            state = memory.export()
            if number:
                seen = {name: _differs(reached[0][name], state[name]) for name in wanted}
                marks = {name: mark & marks[name] if marks else mark for name, mark in seen.items()}
                wanted = [name for name in wanted if bool(marks[name].any())]
            reached.append({name: state[name].clone() for name in wanted})
            memory.load(before)
    except EvidenceError:
        return []
    finally:
        memory.load(before)
    if not watch.seeds and not all(name.startswith("buffer/") for name in wanted):
        return []
    return [_first(name, marks[name], [each[name] for each in reached]) for name in wanted if name not in skipped]


def altered(batch: Mapping[str, Tensor], seed: bytes, number: int) -> dict[str, Tensor]:
    """A batch made of another: the elements of each tensor in another order, and real numbers scaled by 1/2 to 1.

    Zeros all over, which neither would change, become that factor. What the batch holds of an earlier state stays.
    """
    found = {}
    for name, tensor in batch.items():
        if name.startswith(RECALLED):
            found[name] = tensor
            continue
        key = hashlib.sha256(seed + number.to_bytes(_NUMBER, "big") + name.encode()).digest()
        drawn = np.random.Philox(key=int.from_bytes(key[:16], "big"))
        scale = (_SCALES + int(drawn.random_raw()) % (_SCALES - 1)) / (2 * _SCALES)
        order = torch.from_numpy(np.argsort(drawn.random_raw(tensor.numel()), kind="stable"))
        moved = tensor.reshape(-1)[order.to(tensor.device)].reshape(tensor.shape)
        if tensor.is_complex() or tensor.is_floating_point():
            wide = moved if tensor.is_complex() else moved.double()
            moved = (wide * scale if bool(wide.any()) else torch.full_like(wide, scale)).to(tensor.dtype)
        found[name] = moved
    return found


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
            raise EvidenceError("a value is finite where the recorded batch's value is not, or the reverse")
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
