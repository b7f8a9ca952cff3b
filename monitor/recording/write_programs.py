"""What a loop does with the state between two steps, as a program: a declared write, if it writes any of it.

A copy into a target network, an average, a merge and its way back, running statistics that are computed anew: these
take what the state holds and write it again. They run under the run's numerics, and are committed, metered and repeated
like a step. So is what only reads, such as a teacher's answers or a rollout, where it is much. What they take from
outside of the state, such as the batches of ``update_bn`` or a file's content, is the program's batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from firmware_sim import Meter, Work
from firmware_sim.errors import CallerError
from firmware_sim.evidence import DTYPE_SIZES
from monitor import numerics
from monitor.numerics.arguments import Arguments, Keywords
from monitor.programs.batches import IN_NO_FILE, batch_layout
from monitor.programs.bits import same_bytes
from monitor.programs.capture import Capture
from monitor.programs.keys import OwnKeys
from monitor.programs.memory_watch import WriteWatch
from monitor.programs.parts import RECALLED
from monitor.programs.program import Constant, Program
from monitor.programs.trace import reach
from monitor.programs.wiring import Place
from monitor.recording.refusals import Line
from monitor.recording.state_watch import Earlier

__all__ = ["Interval", "WriteCapture"]


class WriteCapture(Capture):
    """Captures operators on the state; what they read that is none of it, and no result of theirs, is their batch.

    Attributes:
        batch: what they read from outside, each stretch of memory as it was when it was read.
    """

    def __init__(
        self, keys: OwnKeys, watch: WriteWatch, meter: Meter, known: list[Program], earlier: Earlier | None = None
    ) -> None:
        super().__init__(keys, watch, meter=meter, known=known)
        self._earlier = earlier
        self.batch: dict[str, Tensor] = {}
        self._outside: dict[int, bool] = {}  # storages from outside -> whether a call has written there
        self._read: dict[str, Tensor] = {}
        self._stretches: dict[int, list[tuple[int, int]]] = {}  # of a storage, that were read from outside

    def after(self, index: int, func: OpOverload, args: Arguments, kwargs: Keywords, out: object) -> None:
        """Also remember which memory from outside holds results now."""
        for tensor in self._written:
            if tensor.untyped_storage()._cdata in self._outside:
                self._outside[tensor.untyped_storage()._cdata] = True
        super().after(index, func, args, kwargs, out)

    def wrote(self, tensor: Tensor) -> bool:
        """Whether a call has written the memory from outside in which a tensor lies."""
        return self._outside.get(tensor.untyped_storage()._cdata, False)

    def recalling(self, captured: Program) -> Program:
        """The program, in which what was read from outside is named by the earlier state that holds it, if one does.

        What such a batch has to hold in addition is added to ``batch``.
        """
        found = None if self._earlier is None else self._earlier.find(self.batch)
        if found is None or self._earlier is None:
            return captured
        constants = {str(~number): each.tensor() for number, each in enumerate(captured.constants)}
        found = self._earlier.find({**self.batch, **constants}) or found
        step, names = found
        proofs = self._earlier.evidence(step, names)
        named = {old: f"{RECALLED}{own}" for old, own in names.items()}
        numbers = {~int(old): new for old, new in named.items() if old in constants}
        captured = captured.carrying(numbers, {old: new for old, new in named.items() if old not in constants})
        kept = {named.get(name, name): tensor for name, tensor in self.batch.items()}
        self.batch = {**kept, **{named[old]: each for old, each in constants.items() if old in named}, **proofs}
        return replace(captured, batch={**captured.batch, **batch_layout(proofs)})

    def take_in(self, state: Mapping[str, Tensor | None]) -> None:
        """The interval ends with this state; tensors that were put there from outside belong to the batch."""
        for name, tensor in state.items():
            if tensor is not None:
                self._place_of(tensor, name)

    def _place_of(self, tensor: Tensor, reader: str) -> Place:
        is_outside = tensor.untyped_storage()._cdata in self._outside
        if not self._wiring.knows(tensor) or (is_outside and not self._is_as_read(tensor, reader)):
            self._stranger(tensor, reader)
        return self._wiring.place_of(tensor, reader)

    def _is_as_read(self, tensor: Tensor, reader: str) -> bool:
        """Whether memory from outside still holds what was read there, or what a call has left."""
        start, stop = _extent(tensor)
        stretches = self._stretches[tensor.untyped_storage()._cdata]
        if not any(first <= start and stop <= last for first, last in stretches):
            return False  # it reaches beyond what was read
        place = self._wiring.place_of(tensor, reader)
        if place.source.startswith("node:"):
            return True
        flat, before = (
            torch.view_as_real(each).flatten() if each.is_complex() else each
            for each in (_stretch(tensor), self._read[place.source])
        )
        stop = place.offset + flat.numel()
        return place.offset >= 0 and stop <= before.numel() and same_bytes(flat, before[place.offset : stop])

    def _stranger(self, tensor: Tensor, operator: str) -> None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPE_SIZES or tensor.dtype in IN_NO_FILE or tensor.layout != torch.strided:
            raise CallerError(
                f"{operator} reads a {dtype} tensor from outside the state, which is not recorded; pass it as a dense "
                "tensor of another type"
            )
        content = _stretch(tensor).clone()
        raw = content.view(torch.uint8).cpu().numpy().tobytes() if content.numel() else b""
        constant = Constant.of(dtype, raw)
        if constant.is_uniform:
            source = f"constant:{len(self._constants)}"
            self._constants.append(constant)
            self._readers.append(operator)
        else:
            name = str(len(self.batch))
            self.batch[name], source = content, f"batch:{name}"
        self._read[source] = content
        self._outside.setdefault(tensor.untyped_storage()._cdata, False)
        self._stretches.setdefault(tensor.untyped_storage()._cdata, []).append(_extent(tensor))
        self._wiring.record(_stretch(tensor), source)


class Interval:
    """The operators on the state since the last commit, as a program that is being captured.

    Args:
        declared: the run's numerics.

    Attributes:
        has_written: whether one of them has written the state.
        line: the caller's that did so first.
        log: the rounding log, once it is closed.
    """

    line: Line | None = None
    log = b""

    def __init__(self, capture: WriteCapture, declared: str, keys: OwnKeys) -> None:
        self.capture = capture
        self.has_written = False
        self._session = numerics.recording(declared, observer=capture, keys=keys)
        self._open = ExitStack()
        self._open.enter_context(self._session.direct())

    @property
    def work(self) -> Work:
        """What the meter has counted of it."""
        return self.capture.work

    def call(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
        """Make the next call; raises as a step does."""
        return self._session.call(func, args, kwargs)

    def close(self, kept: Iterable[Tensor | None] | None = None) -> bool:
        """No call follows. Where this is a program, which commits ``kept``, the sums of unused results are read first.

        Returns whether they were read: after a call that failed none can be made.
        """
        is_read = False
        if kept is not None:
            with suppress(CallerError):
                self.capture.read_ends(kept, lambda operator, tensor: self.call(operator, (tensor,), {}))
                is_read = True
        self._open.close()
        if kept is not None:
            self.capture.writes.close()
        self.log = self._session.log
        return is_read


def _extent(tensor: Tensor) -> tuple[int, int]:
    """A tensor's first element in its memory, and the one after its last."""
    start = int(tensor.storage_offset())
    return start, start + reach(list(tensor.shape), list(tensor.stride()))


def _stretch(tensor: Tensor) -> Tensor:
    """The memory from a tensor's first element to its last."""
    start, stop = _extent(tensor)
    return tensor.detach().as_strided((stop - start,), (1,), start)
