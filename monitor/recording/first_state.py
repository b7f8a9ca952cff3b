"""Brings what an optimizer makes of its state into chip memory, at the call that makes it.

The program of the step says afterwards which calls these were (``monitor.programs.creations``). What they will be shows
beforehand, in a trial of the update on a copy of the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from firmware_sim.errors import CallerError
from monitor.loops.optimizers import Several, trial_copy, trial_error, try_step
from monitor.loops.state import LoopState
from monitor.numerics import Observer
from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.operators import is_counted
from monitor.programs.capture import Capture
from monitor.programs.program import Program
from monitor.programs.trace import tensors_in

__all__ = ["FirstState"]


class FirstState:
    """Observes the steps of one boot of the chips.

    Attributes:
        capture: of the open step.
    """

    capture: Capture

    def __init__(self, state: LoopState) -> None:
        self._state = state
        self._inner: Observer | None = None
        self._due: dict[int, str] = {}
        self._held: dict[int, str] = {}
        self._moved: dict[int, tuple[Tensor, Tensor]] = {}
        self._fresh: int | None = None
        self._left: Collection[str] = ()

    def begin(self, inner: Observer | None) -> FirstState:
        """A step opens, which ``inner`` observes before this does."""
        self._inner, self._fresh = inner, None
        self._due, self._held, self._moved, self._left = {}, {}, {}, ()
        return self

    def foresee(
        self, aside: Callable[[], AbstractContextManager[None]], left: Collection[str], optimizer: Optimizer
    ) -> None:
        """An optimizer's update begins; find out which of its calls make state that it does not have.

        Args:
            aside: opens a context whose calls are no part of the step.
            left: what the step before left absent, ``kind/name``.

        Raises:
            CallerError: the optimizer cannot be copied or tried.
        """
        self._left = left
        absent = {key: name for key, name in self._state.absent().items() if f"optimizer/{name}" in left}
        if any(owner.grad is not None for owner, _ in absent):  # what learns nothing is given no state
            with aside():
                calls = _trial(optimizer, self._state.place_of(optimizer), absent)
            self._due |= {self.capture.taken + number: name for number, name in calls.items()}

    def before(self, index: int, func: OpOverload, args: Arguments, kwargs: Keywords) -> None:
        """Have the call find what was made in chip memory, by whatever tensors it takes of it."""
        if self._moved:
            if self._fresh is not None:
                self.capture.move(*self._moved[self._fresh])
                self._fresh = None
            for tensor in (*tensors_in(args), *tensors_in(list(kwargs.values()))):
                self._move(tensor)
        if self._inner is not None:
            self._inner.before(index, func, args, kwargs)

    def after(self, index: int, func: OpOverload, args: Arguments, kwargs: Keywords, out: object) -> None:
        """Copy what the call made to where it will lie."""
        if self._inner is not None:
            self._inner.after(index, func, args, kwargs, out)
        name = self._due.get(index)
        if name is None or not isinstance(out, Tensor):
            return
        place = self._state.memory.tensors["optimizer", name]
        if (out.dtype, out.shape, out.stride(), out.device) == (place.dtype, place.shape, place.stride(), place.device):
            with torch.no_grad():
                place.copy_(out)
            self.capture.writes.after([place])
            self._fresh = out.untyped_storage()._cdata
            self._moved[self._fresh] = out, place
            self._held[index] = f"optimizer/{name}"

    def end(self) -> None:
        """The step has ended; what the optimizer holds of what it made is what lies in chip memory."""
        if self._fresh is not None:  # the step's last call made it
            self.capture.move(*self._moved[self._fresh])
            self._fresh = None
        for tensor in self._state.current().values() if self._moved else ():
            if tensor is not None:
                self._move(tensor)
        self._moved = {}

    def require(self, program: Program) -> None:
        """CallerError if a step made state where the trial did not show it: its chips may have seen something else."""
        made = {call: name for call, name in program.births.items() if name in self._left}
        if self._held != made:
            odd = min(dict(self._held.items() ^ made.items()).values())
            raise CallerError(
                f"the optimizer created {odd} in a different call when its update was tried out; call optimizer.step() "
                "once before recording begins"
            )

    def _move(self, tensor: Tensor) -> None:
        """Have a tensor of the memory of something that was made lie in chip memory."""
        found = self._moved.get(tensor.untyped_storage()._cdata)
        if found is not None:
            made, place = found
            if tensor.dtype != place.dtype:
                raise CallerError(f"an update created optimizer state as {place.dtype}, but reads it as {tensor.dtype}")
            offset = place.storage_offset() + tensor.storage_offset() - made.storage_offset()
            tensor.data = place.as_strided(tensor.shape, tensor.stride(), offset)


class _Makers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which call of those that a session would show made or first took the memory of a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._taken = 0
        self._made: dict[int, int] = {}
        self._kept: list[Tensor] = []

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_counted(func):
            if isinstance(out, Tensor):
                self._kept.append(out)  # so that its address is given to no other
                self._made.setdefault(out.untyped_storage()._cdata, self._taken)
            self._taken += 1
        return out

    def maker(self, tensor: Tensor) -> int | None:
        """Number of the call, if one did."""
        return self._made.get(tensor.untyped_storage()._cdata)


def _trial(optimizer: Optimizer, place: str, absent: dict[tuple[Tensor, str], str]) -> dict[int, str]:
    """The calls of an update that make what is absent, by number, with its name; found on a copy.

    An optimizer that only holds others may need more than a copy has; what it makes itself is then not foreseen.
    """
    calls = _Makers()
    try:
        twin = trial_copy(optimizer)
        groups = zip(optimizer.param_groups, twin.param_groups, strict=True)
        pairs = [pair for mine, theirs in groups for pair in zip(mine["params"], theirs["params"], strict=True)]
        for mine, copied in pairs:
            copied.grad = None if mine.grad is None else mine.grad.detach().clone()
        with torch.random.fork_rng(devices=[]), calls:
            try_step(twin)
    except Exception as error:
        if len(Several([optimizer]).members) > 1:
            return {}
        raise trial_error(optimizer, error) from None
    found = {}
    for mine, copied in pairs:
        for key, value in twin.state.get(copied, {}).items():
            number = calls.maker(value) if isinstance(value, Tensor) else None
            if number is not None and (mine, place + key) in absent:
                found[number] = absent[mine, place + key]
    return found
