"""What a loop does with the state between steps: it is metered, allowed up to what the run declares, and reported.

Between steps a chip cannot know what an operator is for. A loop may log a norm there. Whatever takes more than a
hundredth of a step, or writes weights or buffers, is recorded as a program (``written``).
"""

from __future__ import annotations

import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode

from firmware_sim import NO_WORK, Work
from firmware_sim.errors import CallerError
from monitor.declaration.statement import MOST_SLACK
from monitor.numerics import UnsupportedOperator
from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.kernels.workers import dispatch_modes
from monitor.numerics.operators import is_counted
from monitor.numerics.operators.lookup import is_composite, remedy_for_tensors, take_apart
from monitor.programs.addresses import Addresses, are_fake, dispatches, is_dense, span
from monitor.programs.calls import ITEM, charge, is_view
from monitor.programs.flop import is_uncounted, live_work, makes
from monitor.programs.memory_watch import HiddenWrite
from monitor.programs.trace import name_of, tensors_in, written_arguments
from monitor.recording.refusals import caller_line
from monitor.recording.state_watch import HeldState, way_inside
from monitor.recording.write_programs import Interval
from monitor.sharding import ShardedMemory

__all__ = ["Between", "own_operators"]

_KNOWN = ("aten", "prims")
"""Namespaces of operators whose work a chip knows."""
_EVALUATE = (
    "run it in 'with recorder.evaluation(batch):', or declare a higher 'beside' and a maximum_slack with room for it"
)


class _Own(threading.local):
    """Whether operators of a thread are a recorder's own."""

    depth = 0


_own = _Own()


@contextmanager
def own_operators() -> Iterator[None]:
    """While it is open, the operators are a recorder's own, which no recorder of the process meters."""
    _own.depth += 1
    try:
        yield
    finally:
        _own.depth -= 1


_watched: weakref.WeakSet[Between] = weakref.WeakSet()


class _Elsewhere(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators of another thread than a recorder's; on memory of its chips they are refused."""

    supports_higher_order_operators = True
    sees_arithmetic = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(dispatches, types)):
            return func(*args, **kwargs) if are_fake(types, args, kwargs, _is_anybodys) else NotImplemented
        if not _own.depth and any(each.is_met(func, args, kwargs) for each in list(_watched)):
            raise CallerError(
                f"thread {threading.current_thread().name!r:.100} ran {func} on a recorder's state, or on something "
                "computed from it; run it in the thread that trains, or on a copy made there, such as "
                "tensor.detach().numpy().copy()"
            )
        return func(*args, **kwargs)


def _is_anybodys(tensor: Tensor) -> bool:
    """Whether a tensor lies in the memory of a recorder that is in use."""
    return not _own.depth and any(each._is_ours(tensor) for each in list(_watched))


def _watch_threads() -> None:
    """Have each thread that starts from now on enter ``_Elsewhere`` first."""
    before = threading.getprofile()
    if before is not None and getattr(before, "watches", False):
        return

    def enter(*event: Any) -> None:
        sys.setprofile(before)
        if _watched:
            _Elsewhere().__enter__()  # type: ignore[no-untyped-call]
        if before is not None:
            before(*event)

    enter.watches = True  # type: ignore[attr-defined]
    threading.setprofile(enter)


class Between(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Passes to the meter each operator on the state, or on results of such, that its thread runs between steps.

    It captures them as a program, which its owner may commit. Else the next step reports them. It holds
    nothing of its owner's but the meter.

    Args:
        owner: without it there is nothing to meter any more.
        memory: what the chips hold.
        allowed: work from one training step to the next that is part of no program.
        before: what of it the steps since the last training step have reported.
        trained: whether there was a training step; until then each step has the whole of it.
        opened: called with the owner when the first operator is about to run.
        closed: called with the owner and an interval that is over; whether it was committed, as one must be that has
            written the state.
        exceeded: called with the owner, and the error that says so, when more was done than is allowed.
        refuse: called with the owner and the error on a write that cannot be recorded; the error follows if it raises.

    Attributes:
        taken: work since the last commit that is part of no program.
        recorded: work since the last training step that only read, and was recorded.
        interval: what was captured since then, if any operator ran.
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
        opened: Callable[[Any], Interval],
        closed: Callable[[Any, Interval], bool],
        exceeded: Callable[[Any, CallerError], None],
        refuse: Callable[[Any, CallerError], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.taken = NO_WORK
        self.interval: Interval | None = None
        self._owner = weakref.ref(owner)
        weakref.finalize(owner, self.abandon).atexit = False
        self._meter = memory.meter
        plain = {name: each for name, each in memory.export().items() if is_dense(each)}
        self._state = {each.untyped_storage()._cdata for each in plain.values()}
        self._addresses = Addresses(plain.values())
        self._places = sorted((at.data_ptr(), at.data_ptr() + at.nbytes, name) for name, at in plain.items())
        self._sizes = {name: at.itemsize for name, at in plain.items()}
        self._allowed, self._opened, self._closed = allowed, opened, closed
        self._before, self._trained = before, trained
        self._exceeded, self._refuse = exceeded, refuse
        self._step: Work | None = None
        self.recorded = NO_WORK
        self._is_above = self._is_on = False
        _watched.add(self)
        _watch_threads()

    def begin(self) -> None:
        """From now on the loop's own operators run."""
        while (stack := dispatch_modes()) and _is_left(stack[-1]):
            stack[-1].__exit__(None, None, None)
        if self not in stack:
            self.__enter__()  # type: ignore[no-untyped-call]
        self._is_on = True

    def is_met(self, func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> bool:
        """Whether an operator of another thread works on the memory of a recorder that is in use."""
        is_work = not isinstance(func, OpOverload) or (is_counted(func) and not is_view(func) and name_of(func) != ITEM)
        return is_work and self._owner() is not None and any(map(self._is_ours, _inputs(args, kwargs)))

    def end(self) -> None:
        """From now on the recorder's operators run, or those of a step."""
        self._is_on = False
        self._leave()

    def _leave(self) -> None:
        """See operators no more; they still pass through where another mode was entered since."""
        stack = dispatch_modes()
        if stack and stack[-1] is self:
            self.__exit__(None, None, None)

    def __exit__(self, *raised: Any) -> None:
        """Leave the thread's modes; also where this was done before, on a copy of them.

        Within a backward autograd works on such a copy, and puts back those that were there before: a mode that
        is let go in there has left once and is among them again.
        """
        if self.old_dispatch_mode_flags:
            super().__exit__(*raised)  # type: ignore[no-untyped-call]
        else:
            _pop_mode()

    @property
    def counted(self) -> Work:
        """All that counts against what is allowed now."""
        reads = NO_WORK if self.interval is None or self.interval.has_written else self.interval.work
        return self.taken + reads + (self._before if self._trained else NO_WORK)

    def require(self, trains: bool) -> None:
        """CallerError if a step's kind makes what was done before it more than is allowed: evaluations share it."""
        if trains and not self._before + self.taken <= self._allowed:
            raise CallerError(
                f"before the first training step, the loop ran {self._before + self.taken} on the state outside any "
                f"program, but only {self._allowed} is allowed for each training step; {_EVALUATE}"
            )
        if trains and self._is_above and self._exceeds_step(self._before + self.taken):
            raise CallerError(
                "twice in a row, the loop did more work on the state between two training steps than a whole step "
                f"does: {self._before + self.taken} outside any program, after a step of {self._step}; inspections of "
                "such a run are inconclusive; run it in 'with recorder.evaluation(batch):', which is replayed"
            )

    def is_much(self, work: Work) -> bool:
        """Whether work is better recorded than reported as slack: more than a hundredth of a training step.

        With what was recorded since that step it is no more than the step itself; more is an evaluation.
        """
        return self._exceeds_step(work, MOST_SLACK / 5) and not self._exceeds_step(self.recorded + work)

    def _exceeds_step(self, work: Work, share: Fraction | int = 1) -> bool:
        """Whether work is more than a share of what the last training step of this process took, if there was one."""
        step = self._step
        return step is not None and (work.flop > share * step.flop or work.moved > share * step.moved)

    def take(self, trains: bool, step: Work | None = None) -> Work:
        """What was done since the last commit, which the next one tells of, a training step or another one.

        ``step`` is what the training step itself took.
        """
        taken, self.taken = self.taken, NO_WORK
        if trains:
            self._is_above, self._step = self._exceeds_step(self._before + taken), step
        self._before = NO_WORK if trains else self._before + taken
        self.recorded = NO_WORK if trains else self.recorded
        self._trained |= trains
        return taken

    def settle(self, owner: Any, held: HeldState) -> None:
        """The loop's turn is over: commit what it wrote, and refuse what no operator has written."""
        is_written = self.interval is not None and self.interval.has_written
        for error in held.written_between(by_operators=is_written):
            self._refuse(owner, error)
        if not is_written and held.has_moved():
            self.interval = self.interval or self._opened(owner)
            self.interval.has_written = True
        self.flush(owner)

    def flush(self, owner: Any) -> None:
        """The interval ends here; where it is not committed, its work is part of no program."""
        interval, self.interval = self.interval, None
        if interval is not None and not self._closed(owner, interval):
            self.taken += interval.work

    def abandon(self) -> None:
        """Nothing that the loop does matters any more."""
        if self.interval is not None:
            self.interval.close()
        self.interval = None
        self.end()
        _watched.discard(self)

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        kwargs = kwargs or {}
        owner = self._owner() if self._is_on and not _own.depth else None
        if owner is not None and any(map(dispatches, types)):
            if are_fake(types, args, kwargs, self._is_ours):
                return func(*args, **kwargs)
            return NotImplemented  # a subclass takes its operators apart, and what it makes of them comes back here
        if owner is None or func.namespace == "profiler" or not any(map(self._is_ours, _inputs(args, kwargs))):
            return func(*args, **kwargs)
        if not isinstance(func, OpOverload) or (func.namespace not in _KNOWN and not is_composite(func)):
            raise CallerError(
                f"{func} between two steps is not metered by chips; write it as plain operators, or compute it "
                "on NumPy copies"
            )
        if not is_counted(func) or name_of(func) == ITEM:  # to read a number, or take a view, is no work
            return func(*args, **kwargs)
        if is_composite(func):
            with self:  # another mode's handler has called it, so that it has not been taken apart yet
                return take_apart(func, args, kwargs)
        if is_uncounted(func):
            raise CallerError(f"{func} between two steps does multiplications that no chip can count; {_EVALUATE}")
        written = [] if _keeps(func, args) else list(filter(self._is_state, written_arguments(func, args, kwargs)))
        for name in filter(None, map(self._kept, written)):
            self._refuse(owner, CallerError(f"{name} was written between steps; {way_inside(name)}"))
            return func(*args, **kwargs)
        out = self._captured(owner, func, args, kwargs, written)
        self._require_allowed(owner, func)
        return out

    def _captured(
        self, owner: Any, func: OpOverload, args: Arguments, kwargs: Keywords, written: Sequence[Tensor]
    ) -> Any:
        """Make a call as one of a program; one that no program can hold runs by itself, and may write no state."""
        if self.interval is None:
            self.interval = self._opened(owner)
        interval = self.interval
        try:
            self._require_one(args, kwargs)
            out = interval.call(func, args, kwargs)
        except CallerError as error:
            self.flush(owner)
            if written or isinstance(error, HiddenWrite):
                self._refuse(owner, error)
        else:
            if written and not interval.has_written:
                interval.has_written, interval.line = True, caller_line()
            return out
        out = func(*args, **kwargs)
        if remedy := remedy_for_tensors((out,)):
            raise UnsupportedOperator(name_of(func), remedy)
        work = live_work(func, args, kwargs, out)
        if work != NO_WORK:
            self.taken += work
            if makes(func):
                self._meter.holdings.note(out)
            charge(self._meter, work)
        return out

    def _reached(self, tensor: Tensor) -> list[str]:
        """Names of the tensors of the state into which one reaches."""
        start, stop, found = tensor.data_ptr(), tensor.data_ptr() + span(tensor), []
        for begin, end, name in self._places[max(bisect_right(self._places, (start,)) - 1, 0) :]:
            if begin >= stop:
                break
            if end > start:
                found.append(name)
        return found

    def _kept(self, tensor: Tensor) -> str | None:
        """The gradient or optimizer's tensor into which one reaches, if any."""
        return next((name for name in self._reached(tensor) if name.startswith(("gradient/", "optimizer/"))), None)

    def _require_one(self, args: Arguments, kwargs: Mapping[str, Any]) -> None:
        """CallerError on memory that is neither a tensor of the state nor a part of one, such as a copy of it all."""
        for tensor in filter(self._is_state, _inputs(args, kwargs)):
            names = self._reached(tensor)
            is_alias = tensor.untyped_storage()._cdata not in self._state
            if is_alias or len(names) > 1 or any(self._sizes[name] != tensor.itemsize for name in names):
                name = names[0] if names else "memory outside the state"
                raise CallerError(f"{name} was written between steps as a part of other memory; {way_inside(name)}")

    def _require_allowed(self, owner: Any, func: OpOverload) -> None:
        counted = self.counted
        if not counted <= self._allowed:
            error = CallerError(
                f"{func} exceeds the work allowed on the state between two training steps: {counted} in all, "
                f"{self._allowed} allowed; {_EVALUATE}; use Recorder.resume to continue from the last step"
            )
            self._exceeded(owner, error)

    def _is_ours(self, tensor: Tensor) -> bool:
        if not is_dense(tensor):
            return False
        if self._is_state(tensor) or self._meter.holdings.holds(tensor):
            return True
        return self.interval is not None and self.interval.capture.wrote(tensor)

    def _is_state(self, tensor: Tensor) -> bool:
        """Whether a tensor reaches into the memory of the state."""
        return self._addresses.reaches(tensor)


def _keeps(func: OpOverload, args: Arguments) -> bool:
    """Whether a normalisation is one by stored statistics, which is said to write them, and does not."""
    names = [argument.name for argument in func._schema.arguments]
    return "batch_norm" in name_of(func) and "training" in names and args[names.index("training")] is False


def _is_left(mode: TorchDispatchMode) -> bool:
    """Whether a mode is of a recorder that is no longer referenced."""
    return isinstance(mode, Between) and mode._owner() is None


def _inputs(args: Arguments, kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    yield from tensors_in(args)
    if kwargs:
        yield from tensors_in(list(kwargs.values()))
