"""The body of a ``with`` statement as one step: what it computes is seen by the recorder's session."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from firmware_sim.errors import CallerError
from monitor.declaration.statement import BESIDE_MODEL
from monitor.numerics import Session
from monitor.programs.batches import batch_layout
from monitor.programs.capture import Capture
from monitor.programs.keys import RecordedKeys
from monitor.programs.memory_watch import WriteWatch
from monitor.recording.follower import Follower
from monitor.recording.loop_writes import own_operators
from monitor.recording.micro_batches import micro_batches
from monitor.recording.refusals import locate
from monitor.transcript import STEP

__all__ = ["OpenStep", "RecordedStep", "exchange"]

_LOSSES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class OpenStep:
    """What a step works with from its opening on.

    Attributes:
        content: the declared batch as a file, where the run keeps it.
        declared: what that file holds.
        batch: what the body really trains on.
        displaced: tensors of the caller's that a lie wrote, with what they held before.
        given: the batch as the caller holds it.
        parameters: the model's, by name.
        keys: of the step's random operators.
        kind: ``STEP`` or ``EVALUATION``.
        state: gives the tensors that the step commits; where it is there, the sums of unused results are read.
        hold: brings a parameter's gradient into memory, given its name.
        begin: what a lab does as the body begins, as a part of it.
    """

    observed: Capture | Follower
    session: Session
    watch: WriteWatch
    seed: int
    content: bytes
    declared: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]
    displaced: list[tuple[Tensor, Tensor]]
    given: object
    parameters: Mapping[str, nn.Parameter]
    keys: RecordedKeys
    kind: str = STEP
    state: Callable[[], Mapping[str, Tensor | None]] | None = None
    hold: Callable[[nn.Parameter, str], None] = lambda parameter, name: None
    begin: Callable[[], None] = lambda: None


class RecordedStep(AbstractContextManager["RecordedStep"]):
    """One recorded step; used once."""

    def __init__(
        self,
        begin: Callable[[RecordedStep], OpenStep],
        end: Callable[[RecordedStep, OpenStep, bool], None],
    ) -> None:
        """``begin`` opens the step, ``end`` closes it and receives whether its body came to its end."""
        self._begin, self._end = begin, end
        self._open: OpenStep | None = None
        self._is_accumulating = False
        self.loss: Tensor | None = None

    def commit(self, loss: Tensor) -> None:
        """Commit to the step's loss, a tensor of one number that the body computed; called inside the step.

        One in half precision is widened to FP32, as a part of the step.
        """
        if self._open is None:
            raise CallerError("commit a loss inside the with statement of its step")
        if not isinstance(loss, Tensor):
            raise CallerError(
                f"the loss of a step must be a tensor, not a {type(loss).__name__}; commit it before .item()"
            )
        if loss.numel() != 1 or loss.dtype not in _LOSSES or loss.device.type == "meta":
            what = f"{str(loss.dtype).removeprefix('torch.')}{list(loss.shape)} on {loss.device.type}"
            raise CallerError(f"the loss of a step must be one number in FP32, not {what}; commit loss.float().mean()")
        loss = loss.detach().float()
        self.loss = loss.reshape(()) if loss.dim() else loss

    def micro_batches(self, count: int) -> Iterator[Any]:
        """Cut the step's batch into ``count`` equal parts along its first dimension, and give them one after another.

            for part in step.micro_batches(12):
                (loss(model, part) / TOKENS).backward()

        The loop begins without gradients. When it has ended, each parameter's gradient is the exact sum of those of
        all parts, rounded once; added up as PyTorch does, it would be rounded with each part, and depend on who
        computed which. The keys of dropout come from step, part and call. A tensor without dimensions goes whole to
        each part.

        Raises:
            CallerError: outside of the step; the parts are not equal; a part leaves a trainable parameter without a
                gradient.
        """
        if self._open is None or self._is_accumulating:
            raise CallerError("take micro-batches inside the with statement of their step, in one loop at a time")
        opened, self._is_accumulating = self._open, True
        try:
            own = {name: each for name, each in opened.parameters.items() if not name.startswith(BESIDE_MODEL)}
            yield from micro_batches(opened.given, count, own, opened.keys)
        finally:
            self._is_accumulating = False
        for name, parameter in opened.parameters.items():
            self._watch(name, parameter)

    def accumulated(self, name: str, parameter: nn.Parameter) -> None:
        """Have a parameter's gradient lie in memory, and notice from now on whatever writes it outside operators."""
        if self._open is not None and not self._is_accumulating:
            self._open.hold(parameter, name)
            self._watch(name, parameter)

    def _watch(self, name: str, parameter: nn.Parameter) -> None:
        if self._open is not None and parameter.grad is not None:
            with self._open.session.aside():
                self._open.watch.add(f"gradient/{name}", parameter.grad)

    def _read_ends(self, taken: OpenStep) -> None:
        if taken.state is not None and isinstance(taken.observed, Capture):
            try:
                kept = [*taken.state().values(), self.loss]
            except CallerError:
                return  # which is reported as the step is recorded
            with torch.no_grad():
                taken.observed.read_ends(kept, lambda operator, tensor: operator(tensor.detach()))

    def __enter__(self) -> Self:
        torch.clear_autocast_cache()  # of a block around the step; a program makes each cast that it reads
        self._open = self._begin(self)
        self._random = torch.get_rng_state()
        torch.default_generator.manual_seed(self._open.seed)
        self._open.session.__enter__()
        self._open.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        taken, self._open = self._open, None
        assert taken is not None
        torch.clear_autocast_cache()
        if isinstance(error, CallerError):
            locate(error)
        whole = False
        try:
            try:
                if kind is None:
                    self._read_ends(taken)
            finally:
                try:
                    taken.session.__exit__(kind, error, trace)
                finally:
                    torch.set_rng_state(self._random)
            if kind is None:
                with own_operators():
                    taken.watch.close()
                whole = True
        finally:
            try:
                self._end(self, taken, whole)
            finally:
                for tensor, content in taken.displaced:
                    tensor.copy_(content)


def exchange(given: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Put another batch where a body reads; returns the tensors written, with what they held before."""
    if batch_layout(other) != batch_layout(given):
        raise CallerError("this lie replaces a step's batch with another one, so both batches need the same shapes")
    displaced = [(tensor, tensor.clone()) for tensor in given.values()]
    for name, tensor in given.items():
        tensor.copy_(other[name])
    return displaced
