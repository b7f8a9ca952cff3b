"""What a loop does with the state between steps: it is metered, allowed up to what the run declares, and told of.

Between steps a chip cannot know what an operator is for. A loop may log a norm there; whatever takes more, such as an
evaluation, is recorded as a program.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack, _pop_mode

from firmware_sim import NO_WORK, Work
from firmware_sim.errors import CallerError
from monitor.programs.calls import ITEM
from monitor.programs.trace import name_of, tensors_in, written_arguments
from monitor.programs.work import live_work, makes
from monitor.sharding import ShardedMemory

__all__ = ["Between"]

_PLAIN = (Tensor, nn.Parameter)


class Between(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes to the meter each operator on the state, or on results of such, that its thread runs between steps.

    Reading a number out of a result, and taking a view, is no work. It holds nothing of its owner's but the meter.

    Args:
        owner: without it there is nothing to meter any more.
        memory: what the chips hold.
        allowed: work from one training step to the next.
        before: what of it the steps since the last training step have told of.
        trained: whether there was a training step; until then each step has the whole of it.
        written: called with the owner when an operator has written the state.
        exceeded: called with the owner when more was done than is allowed; an error follows.

    Attributes:
        taken: work since the last step.
    """

    supports_higher_order_operators = True
    sees_arithmetic = False  # ``monitor.numerics.kernels.workers``

    def __init__(
        self,
        owner: Any,
        memory: ShardedMemory,
        allowed: Work,
        *,
        before: Work = NO_WORK,
        trained: bool = False,
        written: Callable[[Any], None],
        exceeded: Callable[[Any], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.taken = NO_WORK
        self._owner = weakref.ref(owner)
        weakref.finalize(owner, self._leave).atexit = False
        self._meter = memory.meter
        self._state = {each.untyped_storage()._cdata for each in memory.tensors.values() if type(each) in _PLAIN}
        self._allowed, self._written, self._exceeded = allowed, written, exceeded
        self._before, self._trained = before, trained
        self._is_on = False

    def begin(self) -> None:
        """From now on the loop's own operators run."""
        while (stack := _get_current_dispatch_mode_stack()) and _is_left(stack[-1]):
            stack[-1].__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self not in stack:
            self.__enter__()  # type: ignore[no-untyped-call]
        self._is_on = True

    def end(self) -> None:
        """From now on the recorder's operators run, or those of a step."""
        self._is_on = False
        self._leave()

    def _leave(self) -> None:
        """See operators no more; they still pass through where another mode was entered since."""
        stack = _get_current_dispatch_mode_stack()
        if stack and stack[-1] is self:
            self.__exit__(None, None, None)

    def __exit__(self, *raised: Any) -> None:
        """Leave the thread's modes; also where this was done before, on a copy of them.

        Within a backward autograd works on such a copy, and puts back those that were there before: whoever is let go
        in there has left once and stands among them again.
        """
        if self.old_dispatch_mode_flags:
            super().__exit__(*raised)  # type: ignore[no-untyped-call]
        else:
            _pop_mode()

    @property
    def told(self) -> Work:
        """All that counts against what is allowed now."""
        return self.taken + (self._before if self._trained else NO_WORK)

    def require(self, trains: bool) -> None:
        """CallerError if a step's kind makes what was done before it more than is allowed: evaluations share it."""
        if trains and not self._before + self.taken <= self._allowed:
            raise CallerError(
                f"before the first training step {self._before + self.taken} ran on the state beside programs, and "
                f"{self._allowed} is allowed for each training step; run it in 'with recorder.evaluation(batch):', or "
                "declare a higher beside"
            )

    def take(self, trains: bool) -> Work:
        """What was done since the last step, which the next one tells of, a training step or an evaluation."""
        taken, self.taken = self.taken, NO_WORK
        self._before = NO_WORK if trains else self._before + taken
        self._trained |= trains
        return taken

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        owner = self._owner() if self._is_on else None
        if owner is None or func.namespace == "profiler" or not any(map(self._is_ours, _inputs(args, kwargs))):
            return func(*args, **kwargs)
        if not isinstance(func, OpOverload):
            raise CallerError(
                f"{func} between two steps is none that chips meter; run it in an evaluation, or on copies"
            )
        out = func(*args, **kwargs)
        if name_of(func) != ITEM:
            self._charge(owner, func, args, kwargs, out)
        return out

    def _is_ours(self, tensor: Tensor) -> bool:
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage()._cdata in self._state or self._meter.holdings.holds(tensor)

    def _charge(
        self, owner: Any, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object
    ) -> None:
        work = live_work(func, args, kwargs, out)
        if work == NO_WORK:
            return
        self.taken += work
        if makes(func):
            self._meter.holdings.note(out)
        self._meter.charge(work)
        if not self.told <= self._allowed:
            self._is_on = False
            self._exceeded(owner)
            raise CallerError(
                f"{func} is one operator more on the state than is allowed between two training steps: {self.told} in "
                f"all, allowed are {self._allowed}; run it in 'with recorder.evaluation(batch):', or declare a higher "
                "beside; Recorder.resume goes on from the last step"
            )
        if func._schema.is_mutable and any(
            each.untyped_storage()._cdata in self._state for each in written_arguments(func, args, dict(kwargs))
        ):
            self._written(owner)


def _is_left(mode: TorchDispatchMode) -> bool:
    """Whether a mode is of a recorder that nobody holds any more."""
    return isinstance(mode, Between) and mode._owner() is None


def _inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    yield from tensors_in(args)
    if kwargs:
        yield from tensors_in(list(kwargs.values()))
