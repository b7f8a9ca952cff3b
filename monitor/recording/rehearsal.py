"""A dry run of a loop: each step is examined as a recorder would, and nothing is written, signed or sent to a chip.

What a recorder would refuse is noted, and the step goes on without control: the arithmetic after a refusal is not that
of a recorded run, but whatever else cannot be recorded shows itself too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from firmware_sim.errors import CallerError
from firmware_sim.evidence import digest_bytes
from monitor import numerics
from monitor.declaration.schedules import declared_groups
from monitor.loops.state import LoopState
from monitor.numerics import UnsupportedOperator
from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.operators import remedy_for_tensors
from monitor.programs.batches import batch_layout, flatten_batch
from monitor.programs.capture import Capture
from monitor.programs.interpreter import loss_bits
from monitor.programs.keys import OwnKeys, RecordedKeys, step_seed
from monitor.programs.memory_watch import WriteWatch, unwritten
from monitor.programs.program import Program, operator_of
from monitor.programs.trace import written_arguments
from monitor.recording.loop_writes import Between
from monitor.recording.options import RunConfig, refusals_of_objects
from monitor.recording.overview import Overview, Taken, cost_of
from monitor.recording.refusals import Line, Refusals, caller_line, shapes_of
from monitor.recording.state_watch import Earlier, HeldState
from monitor.recording.step import OpenStep, RecordedStep
from monitor.recording.step_programs import (
    StepPrograms,
    changed_number,
    differences,
)
from monitor.recording.updates import OptimizerUpdates
from monitor.recording.write_programs import Interval, WriteCapture
from monitor.transcript import EVALUATION, STEP, WRITE, Execution, Leaf

__all__ = ["EnoughSteps", "Rehearsal", "Rehearsals", "rehearsals"]

_SHARES = (1,)


class EnoughSteps(BaseException):
    """Ends a loop of which enough has been seen; no ``except Exception`` of the loop's own catches it."""


@dataclass
class Rehearsals:
    """All dry runs that a piece of code made.

    Attributes:
        most: steps of each, after which its loop is ended; None for all.
    """

    most: int | None
    made: list[Rehearsal] = field(default_factory=list)


_OPEN: ContextVar[Rehearsals | None] = ContextVar("rehearsals", default=None)


@contextmanager
def rehearsals(most: int | None = None) -> Iterator[Rehearsals]:
    """While it is open, every recorder that is made in this thread is a dry run."""
    found = Rehearsals(most)
    token = _OPEN.set(found)
    try:
        yield found
    finally:
        _OPEN.reset(token)
        for each in found.made:
            each.leave()


class Rehearsal:
    """One dry run: steps like a recorder's, and what cannot be recorded of them.

    Args:
        model, optimizer, objects, options: as a ``Recorder`` has them.

    Attributes:
        refusals: so far.
        steps: so far, without evaluations.
        evaluations: so far.
        programs: different programs so far.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, objects: Mapping[str, object], options: RunConfig
    ) -> None:
        self.refusals = Refusals()
        self.steps = self.evaluations = 0
        self._is_clean, self._has_exceeded = True, False
        self._all = _OPEN.get()
        if self._all is not None:
            self._all.made.append(self)
        self._model, self._optimizer, self._options = model, optimizer, options
        self._objects = objects
        self._seed, self._numerics = options.seed, options.numerics
        self._loop: LoopState | None = None
        self._between: Between | None = None
        self._writes = 0
        self._last: Taken | None = None
        self._structures: list[Program] = []
        for error in refusals_of_objects(model, optimizer):
            self._refuse(error)
        if not self.refusals:
            try:
                self._adopt(model, optimizer, options)
            except CallerError as error:
                self._loop = None
                self._refuse(error)
        self._look_on()

    @classmethod
    def is_wanted(cls) -> bool:
        """Whether the code that runs is one whose recorders are dry runs."""
        return _OPEN.get() is not None

    def leave(self) -> None:
        """Look at nothing any more."""
        if self._between is not None:
            self._between.abandon()

    @property
    def programs(self) -> int:
        """Number of different programs so far."""
        return len(self._structures)

    def overview(self) -> Overview:
        """What is recorded, bound, unbound and refused so far, and what a step takes."""
        rules = None if self._loop is None else self._programs.rules
        entries = () if self._loop is None else self._loop.entries
        recorded = Counter(entry.kind for entry in entries)
        taken = {"step": self.steps, "evaluation": self.evaluations, "write": self._writes, "program": self.programs}
        can_repeat = self._last is not None and not self.refusals
        return Overview(
            recorded={**recorded, **taken},
            bound=() if rules is None or not rules.updates else sorted(rules.names - rules.unbound.keys()),
            unbound={} if rules is None else rules.unbound,
            refused=len(self.refusals),
            numerics=self._numerics,
            seed=self._seed,
            cost=cost_of(self._last, self._declared, self._held) if can_repeat and self._last is not None else None,
        )

    def step(self, batch: object, kind: str = STEP) -> RecordedStep:
        """As ``Recorder.step``, or ``Recorder.evaluation``.

        Raises:
            EnoughSteps: as many were taken as somebody wants to see.
        """
        if self._all is not None and self._all.most is not None and self.steps >= self._all.most:
            self.leave()
            raise EnoughSteps
        return RecordedStep(lambda step: self._open_step(batch, kind), self._close_step)

    def finish(self) -> str:
        """Digest of the state that was reached; CallerError with all refusals where there are any, or with no step."""
        if self._loop is not None:
            self._end_interval()
        self.leave()
        if self.refusals:
            count = len(self.refusals)
            raise CallerError(f"{count} refusal{'s' * (count > 1)}: " + " | ".join(map(str, self.refusals)))
        if not self.steps + self.evaluations or self._loop is None:
            raise CallerError("no step was taken; there is nothing to say about this loop")
        return str(self._loop.memory.digest().root)

    def _adopt(self, model: nn.Module, optimizer: Optimizer, options: RunConfig) -> None:
        """Take model and optimizer into memory as a recorder does, and declare them."""
        self._loop = LoopState(model, optimizer, _SHARES, objects=self._objects)
        self._earlier = Earlier(self._loop.memory)
        self._held = HeldState(self._loop, watched=True, kept=False)
        self._updates = OptimizerUpdates(optimizer)
        groups = declared_groups(options.schedule, self._updates.used, {})
        self._declared = replace(options, checkpoint_every=1).declare(model, optimizer, self._loop, groups, _SHARES)
        self._groups = groups
        self._between = Between(
            self,
            self._loop.memory,
            self._declared.allowance,
            opened=Rehearsal._open_interval,
            closed=Rehearsal._judge_interval,
            exceeded=Rehearsal._exceed,
            refuse=Rehearsal._refuse,
        )
        self._programs = StepPrograms(self._declared, groups, self._options, checked=True, start=self._held.before)
        with self._noted():
            self._options.require_named({f"{entry.kind}/{entry.name}" for entry in self._loop.entries})

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note what is refused in here, and go on after it."""
        try:
            yield
        except CallerError as error:
            self._refuse(error)

    def _refuse(self, error: CallerError, line: Line | None = None, **more: Any) -> None:
        self._is_clean = False
        self.refusals.add(error, step=self.steps, line=line or caller_line(), **more)

    def _exceed(self, error: CallerError) -> None:
        """The loop did more between two steps than is allowed, which is said of the first operator that does."""
        if not self._has_exceeded:
            self._has_exceeded = True
            self._refuse(error)

    def _current(self) -> dict[str, Tensor | None]:
        """The tensors of the state, or of what would be one if it could be adopted."""
        if self._loop is not None:
            return self._loop.current()
        found: dict[str, Tensor | None] = {}
        for name, weight in self._model.named_parameters() if isinstance(self._model, nn.Module) else ():
            if isinstance(weight, UninitializedParameter):
                continue
            found[f"weight/{name}"], found[f"gradient/{name}"] = weight, weight.grad
        for name, buffer in self._model.named_buffers() if isinstance(self._model, nn.Module) else ():
            found[f"buffer/{name}"] = buffer
        for owner, slots in enumerate(self._optimizer.state.values() if isinstance(self._optimizer, Optimizer) else ()):
            for key, value in slots.items():
                found[f"optimizer/{owner}/{key}"] = value if isinstance(value, Tensor) else None
        return found

    def _open_step(self, given: object, kind: str) -> OpenStep:
        if kind == EVALUATION:
            self.evaluations += 1
        else:
            self.steps += 1
        try:
            batch = flatten_batch(given)
        except CallerError as error:
            self._refuse(error)
            batch = {}
        keys = RecordedKeys(self._seed, self.steps)
        watch = _Watch(self.steps, self._refuse)
        if self._loop is not None:
            self._end_interval()
            for name, tensor in self._loop.memory.export().items():
                watch.add(name, tensor)
            for name, tensor in batch.items():
                watch.add(f"batch tensor {name}", tensor)
        observed = _Survey(keys, watch, self._refuse)
        try:
            state = {name: tensor.detach() for name, tensor in self._current().items() if tensor is not None}
        except CallerError as error:
            self._refuse(error)
            state = {}
        observed.declare_inputs(state, batch)
        if self._loop is not None:
            self._updates.begin(observed, self._groups)
        self._is_clean = True
        self._traces = ExitStack()
        self._traces.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
        session = numerics.recording(self._numerics, observer=observed, keys=keys)
        session.tolerate = observed.tolerate
        observed.session = session
        content = {name: tensor.clone() for name, tensor in batch.items()}
        return OpenStep(
            observed=observed,
            session=session,
            watch=watch,
            seed=step_seed(self._seed, self.steps),
            content=b"",
            declared=content,
            batch=content,
            displaced=[],
            given=given,
            parameters=dict(self._model.named_parameters()) if isinstance(self._model, nn.Module) else {},
            keys=keys,
            kind=kind,
            state=None if self._loop is None else self._loop.current,
        )

    def _close_step(self, step: RecordedStep, opened: OpenStep, whole: bool) -> None:
        self._traces.close()
        observed = opened.observed
        assert isinstance(observed, _Survey)
        if whole and self._loop is not None:
            self._last = None if opened.kind == STEP else self._last
            self._judge(observed, opened, step.loss)
            if self._between is not None:
                self._between.take(opened.kind == STEP, None if self._last is None else self._last.program.work)
            self._settle()
        step.loss = None
        self._look_on()

    def _look_on(self) -> None:
        """From now on look at what the loop does between two steps."""
        if self._between is not None and self._loop is not None:
            self._between.begin()

    def _open_interval(self) -> Interval:
        assert self._loop is not None
        keys = OwnKeys(self._seed, self.steps + 1)
        watch, memory = self._held.watch(self.steps + 1, {}), self._loop.memory
        capture = WriteCapture(keys, watch, memory.meter, [], self._earlier)
        capture.declare_inputs(self._loop.inputs(), {})
        return Interval(capture, self._numerics, keys)

    def _end_interval(self) -> None:
        """Judge what the loop wrote between two steps, and bring memory up to date."""
        if self._between is not None:
            self._between.end()
            self._between.settle(self, self._held)
        self._settle()

    def _judge_interval(self, interval: Interval) -> bool:
        """What a recorder would find of a write between steps; whether there is one."""
        assert self._loop is not None
        assert self._between is not None
        if not interval.has_written:
            interval.close()
            if is_recorded := self._between.is_much(interval.work):
                self._between.recorded += interval.work
                self._between.take(trains=False)
            return is_recorded
        self._between.take(trains=False)
        capture = interval.capture
        try:
            now = self._loop.current()
            interval.close(now.values())
            capture.take_in(now)
            self._updates.begin(capture, self._groups)
            self._updates.end()
            program, _execution = self._programs.explain(capture, self._updates, now, capture.batch, None, WRITE)
            self._writes += 1
            if program.digest not in self._programs.known:
                self._programs.know(program)
                self._review(program, [interval.line] * len(program.calls))
        except CallerError as error:
            self._refuse(error, interval.line)
        self._settle()
        return True

    def _settle(self) -> None:
        """Bring memory up to date with whatever the caller's objects hold."""
        assert self._loop is not None
        with self._noted():
            self._loop.settle()
        self._held.remember()
        self._loop.memory.digest()
        self._earlier.remember(self.steps + self.evaluations + self._writes)

    def _judge(self, observed: _Survey, opened: OpenStep, loss: Tensor | None) -> None:
        """What a recorder would find at the end of a step."""
        assert self._loop is not None
        if observed.is_lost:
            self._updates.end()
            return
        try:
            program = observed.program(self._loop.current(), batch_layout(opened.batch), self._updates.places, loss)
        except CallerError as error:
            self._refuse(error)
            return
        finally:
            self._updates.end()
        if self._is_clean or opened.kind == STEP:  # a refused operator hides what it writes
            with self._noted():
                self._programs.settle(program, opened.kind)
        known = self._alike(program)
        slots = differences(program, known)
        with self._noted():
            self._programs.changes(self._updates)
        inside = {call for first, last in program.updates for call in range(first, last)}
        numbers = {number for changed in slots.values() for number in changed}
        for call, places in enumerate(program.scalar_places if not self._options.free_slots else ()):
            if call not in inside and numbers & {number for number, _ in places}:
                text = changed_number(program.calls[call]["operator"])
                self._refuse(CallerError(text), observed.lines[call])
        if not self._is_clean:
            return  # what follows looks at programs of known operators
        with self._noted():
            found, execution = self._programs.explain(observed, self._updates, self._loop.current(), opened.batch, loss)
            if found.digest not in self._programs.known:
                self._programs.know(found)
                self._review(found, observed.lines)
                self._repeat(found, execution, opened, loss)
            if opened.kind == STEP:
                self._last = Taken(found, execution, {**opened.batch, **observed.carried})

    def _alike(self, program: Program) -> Program:
        """The first program of this structure."""
        structure = program.structure()
        for known in self._structures:
            if len(known.calls) == len(program.calls) and known.structure() == structure:
                return known
        self._structures.append(program)
        return program

    def _review(self, program: Program, lines: Sequence[Line | None]) -> None:
        """What would leave an inspection of a program that was recorded without a verdict."""
        found = self._programs.foresee(program, dict(enumerate(lines)))
        if found is not None:
            self._refuse(*found)

    def _repeat(self, program: Program, execution: Execution, opened: OpenStep, loss: Tensor | None) -> None:
        """Interpret the step from its program."""
        assert self._loop is not None
        self._loop.settle()
        root, log = bytes(32), opened.session.log
        leaf = Leaf(
            step=self.steps,
            batch=root.hex(),
            state=self._loop.memory.digest(),
            log=str(digest_bytes("rounding-log", log)),
            loss="" if loss is None else loss_bits(loss),
            flop=program.flop,
            execution=execution,
        )
        self._held.repeat(self._declared, program, leaf, {**opened.batch, **opened.observed.carried}, root, log)


class _Survey(Capture):
    """Captures a step, refused calls included, and notes where the caller's code makes each.

    Attributes:
        is_lost: a refused call has made a tensor that no program can hold; from there on refusals alone are noted.
    """

    def __init__(self, keys: RecordedKeys, watch: WriteWatch, refuse: Callable[..., None]) -> None:
        super().__init__(keys, watch)
        self.lines: list[Line | None] = []
        self.session: numerics.Session | None = None
        self._refuse = refuse
        self._refused: set[int] = set()
        self.is_lost = False

    def before(self, index: int, func: OpOverload, args: Arguments, kwargs: Keywords) -> None:
        self.lines[self.taken :] = [caller_line()]
        self._open, self._written = ([], [], []), written_arguments(func, args, kwargs)
        try:
            operator_of(str(func)) if self.is_lost else super().before(index, func, args, kwargs)
        except CallerError as error:
            self._note(index, error, func, args, kwargs)

    def after(self, index: int, func: OpOverload, args: Arguments, kwargs: Keywords, out: object) -> None:
        remedy = remedy_for_tensors((*args, *kwargs.values(), out))
        if remedy and not self.is_lost:
            self._note(index, UnsupportedOperator(str(func), remedy), func, args, kwargs)
            self.is_lost = True
        if self.is_lost:
            self._calls.append({})
            self.writes.after([tensor for tensor in self._written if not remedy_for_tensors([tensor])])
        else:
            super().after(index, func, args, kwargs, out)

    def _put_down(self, func: OpOverload, args: Arguments, kwargs: Keywords, *found: Any) -> Program | None:
        """A refused call may have arguments that no program can hold."""
        is_refused = len(self.lines) - 1 in self._refused
        return super()._put_down(func, () if is_refused else args, {} if is_refused else kwargs, *found)

    def _charge(self, known: Program | None) -> None:
        """No chip takes part."""

    def tolerate(self, error: CallerError, func: OpOverload, args: Arguments, kwargs: Mapping[str, Any]) -> Any:
        """The result of a refused call, without control."""
        if len(self.lines) == self.taken:  # refused before it could be looked at
            self.lines.append(caller_line())
            self._open, self._written = ([], [], []), []
        index = len(self.lines) - 1
        self._note(index, error, func, args, dict(kwargs))
        out = func(*args, **kwargs)
        if self.taken <= index:
            self.after(index, func, args, dict(kwargs), out)
        return out

    def _note(self, index: int, error: CallerError, func: OpOverload, args: Arguments, kwargs: Keywords) -> None:
        follows = self.is_lost and remedy_for_tensors((*args, *kwargs.values()))
        if index not in self._refused and not follows:
            self._refused.add(index)
            self._refuse(error, self.lines[index], operator=str(func), shapes=shapes_of(*args, *kwargs.values()))


class _Watch(WriteWatch):
    """Notes hidden writes, each once, and goes on."""

    def __init__(self, step: int, refuse: Callable[..., None]) -> None:
        super().__init__(step)
        self._refuse = refuse

    def _require_unwritten(self, name: str, now: Tensor, copy: Tensor) -> None:
        if not unwritten(now, copy):
            copy.copy_(now)
            self._refuse(self._refusal(name))
