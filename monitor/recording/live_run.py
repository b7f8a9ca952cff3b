"""A run while its loop goes on: how a step, an evaluation or a write between steps becomes a committed one."""

from __future__ import annotations

import functools
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from firmware_sim import NO_WORK, Work
from firmware_sim.errors import CallerError
from monitor import numerics
from monitor.programs.batches import flatten_batch
from monitor.programs.interpreter import loss_bits
from monitor.programs.keys import OwnKeys, RecordedKeys, step_seed
from monitor.programs.program import Program
from monitor.recording.loop_writes import Between, own_operators
from monitor.recording.path_warnings import LinedCapture
from monitor.recording.recording import Recording
from monitor.recording.remote_steps import TakenElsewhere, count_step
from monitor.recording.run_start import free_again
from monitor.recording.step import OpenStep, RecordedStep, exchange
from monitor.recording.write_programs import Interval, WriteCapture
from monitor.transcript import EVALUATION, STEP, WRITE

__all__ = ["CHANGES", "LiveRun"]

CHANGES = "reads a tensor that changes from step to step and that the step did not compute"


class LiveRun:
    """What a recorder does while its loop runs."""

    _state: Literal["ready", "open", "failed", "withdrawn", "stopped", "quoted", "finished"]
    _run: Recording
    _step: RecordedStep | None = None
    _between: Between | None = None

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of steps that are recorded, without evaluations and writes between steps."""

    def leave_to_others(self) -> Recording:
        """All steps come from other processes, whose devices have meters of their own (``commit_elsewhere``)."""
        if self._between is not None:
            self._between.abandon()
            self._between = None
        return self._run

    def commit_elsewhere(
        self,
        given: object,
        taken: TakenElsewhere,
        reached: Mapping[str, Tensor],
        loss: Tensor,
        outside: Callable[[Program], Work],
        ran: Work = NO_WORK,
    ) -> None:
        """Record a step that other processes took.

        Args:
            given: the batch.
            taken: the operators that one process would have run.
            reached: the state that a step came to, under ``kind/name``.
            loss: the step's loss.
            outside: what their devices counted outside the program.
            ran: what their loops ran on the state since the step before.

        Raises:
            CallerError: as for any step; also where a step that is repeated from its program leads elsewhere.
        """
        self._require_ready()
        run, memory = self._run, self._run.loop.state.memory
        run.loop.held.require_untouched()
        batch, step, left = flatten_batch(given), run.steps + 1, run.programs.left
        state: dict[str, Tensor | None] = dict.fromkeys(memory.export())
        if grown := sorted(taken.state.keys() - state.keys()):
            raise CallerError(f"the step makes {grown[0]}, which the run's state does not have")
        since = _since(run, ran)
        self._state = "failed"
        try:
            memory.meter.charge(ran)
            program, execution = run.programs.explain(
                taken.observed, taken.updates, {**state, **taken.state}, batch, taken.loss, taken.kind
            )
            if taken.observed.carried:
                raise CallerError(f"the step {CHANGES}; pass it in the batch")
            taken.settle()
            count_step(run.declared, memory, step, program, execution, batch, left)
            memory.meter.charge(outside(program))
            if taken.kind == STEP:
                memory.load({**{name: torch.zeros_like(each) for name, each in memory.export().items()}, **reached})
            run.reported = NO_WORK if taken.kind == STEP else since
            execution = replace(execution, outside=ran)
            run.commit(program, execution, batch, run.source.keep(step, batch)[0], b"", loss_bits(loss))
            self._state = "ready"
        finally:
            if self._state == "failed":
                run.break_off()

    def _meter_loop(self) -> None:
        """From now on meter what the loop does with the state between steps; a recipe's loop does nothing there."""
        run, state = self._run, self._run.loop.state
        if run.loop.trusted or self._state != "ready":
            return
        self._between = Between(
            self,
            state.memory,
            run.declared.allowance,
            before=run.reported,
            trained=self.steps > 0,
            opened=LiveRun._open_interval,
            closed=LiveRun._record_interval,
            exceeded=LiveRun._stop,
            refuse=LiveRun._refuse,
        )
        self._between.begin()

    def _open_interval(self) -> Interval:
        """Look at what the loop does with the state from now on."""
        run, loop = self._run, self._run.loop
        number = run.steps + 1
        keys, watch = OwnKeys(run.declared.seed, number), loop.held.watch(number, {})
        capture = WriteCapture(keys, watch, loop.state.memory.meter, run.programs.recent, loop.earlier)
        capture.declare_inputs(loop.state.inputs(), {})
        return Interval(capture, run.declared.numerics, keys)

    @own_operators()
    def _record_interval(self, interval: Interval) -> bool:
        """Commit what the loop did with the state between two steps, if it wrote there or did much; whether it did."""
        assert self._between is not None
        run, state, capture = self._run, self._run.loop.state, interval.capture
        now = state.current()
        is_worth = interval.has_written or (run.is_open and self._between.is_much(interval.work))
        is_read = interval.close(now.values() if is_worth else None)
        if not interval.has_written:
            if not (is_read and self._between.is_much(interval.work) and run.programs.admits(capture, now)):
                return False
            self._between.recorded += interval.work
        outside, self._state = self._between.take(trains=False), "failed"
        try:
            capture.take_in(now)
            updates = run.loop.updates
            updates.begin(capture, run.loop.groups)
            updates.end()
            program, execution = run.programs.explain(capture, updates, now, capture.batch, None, WRITE)
            run.programs.warn(program, dict.fromkeys(range(len(program.calls)), interval.line))
            state.settle()
            content, batch = run.source.keep(run.steps + 1, {**capture.batch, **capture.carried})
            run.commit(program, replace(execution, outside=outside), batch, content, interval.log, "")
            self._state = "ready"
        finally:
            if self._state == "failed":
                run.break_off()
        return True

    def _end_interval(self) -> None:
        """Commit what the loop wrote since the last step; CallerError if it wrote otherwise than by operators."""
        if self._between is None:
            self._run.loop.held.require_untouched()
        else:
            self._between.settle(self, self._run.loop.held)

    def _refuse(self, error: CallerError) -> None:
        raise error

    def _stop(self, error: CallerError) -> None:
        """The loop did more than is allowed; nothing but ``resume`` goes on."""
        assert self._between is not None
        self._between.abandon()
        self._state = "failed"
        self._run.break_off()
        raise error

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """While it is open, the recorder's own operators run, on the host."""
        if self._between is not None:
            self._between.end()
        try:
            with own_operators():
                yield
        finally:
            self._go_on()

    def _go_on(self) -> None:
        """Let the loop's own operators run, if steps can follow."""
        if self._between is not None and self._state == "ready":
            self._between.begin()

    def _require_ready(self) -> None:
        if self._state != "ready":
            reasons = {
                "open": "a step is open; leave its with statement first",
                "failed": (
                    "a step failed, so this recorder cannot go on; continue from the last step with Recorder.resume"
                ),
                "withdrawn": (
                    "the first step was refused and the run's folder was removed; create model, optimizer and "
                    "recorder again"
                ),
                "stopped": "the run was shut down; use Recorder.resume to continue from its last step",
                "quoted": "the chips have given their evidence; the only call left is finish()",
                "finished": "the run is finished",
            }
            raise CallerError(reasons[self._state])

    def _open_step(self, given: object, kind: str, step: RecordedStep) -> OpenStep:
        """Check that a step may begin, and look at whatever it will compute."""
        self._require_ready()
        with self._aside():
            self._end_interval()
            if self._between is not None:
                self._between.require(kind == STEP)
            return self._look_at(given, kind, step)

    def _look_at(self, given: object, kind: str, step: RecordedStep) -> OpenStep:
        run, loop = self._run, self._run.loop
        if run.host_state is not None:
            run.host_state.require_unchanged()
        batch, number, declared = flatten_batch(given), run.steps + 1, run.declared
        if declared.length is not None and number > declared.length:
            raise CallerError(f"the run declares {declared.length} steps, and all of them are recorded")
        keys = RecordedKeys(declared.seed, number)
        content, kept = run.source.keep(number, batch)
        trained = kept
        displaced: list[tuple[Tensor, Tensor]] = []
        other = loop.conduct.batch(number, batch, run.source.batches)
        if other is not batch:
            trained = {name: tensor.clone() for name, tensor in other.items()}
            displaced = exchange(batch, trained)
        watch = loop.held.watch(number, batch)
        observed = loop.observe(number, batch, keys, watch, run.programs)
        session = numerics.recording(declared.numerics, observer=observed, keys=keys)
        foresee = functools.partial(loop.first_state.foresee, session.aside, run.programs.left)
        loop.updates.begin(observed, loop.groups, None if loop.trusted else foresee)
        self._state, self._step = "open", step
        lie = functools.partial(loop.conduct.in_evaluation, number, loop.optimizer)
        return OpenStep(
            observed=observed,
            session=session,
            watch=watch,
            seed=step_seed(declared.seed, number),
            content=content,
            declared=kept,
            batch=trained,
            displaced=displaced,
            given=given,
            parameters=dict(loop.model.named_parameters()),
            keys=keys,
            kind=kind,
            state=None if loop.trusted else loop.state.current,
            hold=loop.state.hold_gradient,
            begin=lie if kind == EVALUATION else lambda: None,
        )

    def _close_step(self, step: RecordedStep, opened: OpenStep, whole: bool) -> None:
        """Record a step whose body came to its end; after any other, nothing but ``resume`` goes on."""
        self._state, self._step = "failed", None
        try:
            if whole:
                with own_operators():
                    self._record(step, opened)
                self._state = "ready"
        finally:
            self._run.loop.updates.end()
            self._go_on()
            if self._state == "failed":
                self._run.break_off()
                is_refusal = isinstance(sys.exception(), CallerError)
                if is_refusal and not self._run.steps and free_again(self._run.folder, self._run.lab.config):
                    self._state = "withdrawn"

    def _record(self, taken: RecordedStep, opened: OpenStep) -> None:
        """Turn what was seen of a step into a committed one."""
        run, batch = self._run, opened.batch
        state = run.loop.state
        run.loop.first_state.end()
        program, execution = run.programs.explain(
            opened.observed, run.loop.updates, state.current(), batch, taken.loss, opened.kind
        )
        if not run.loop.trusted:
            run.loop.first_state.require(program)
        observed = opened.observed
        run.programs.warn(program, observed.lines if isinstance(observed, LinedCapture) else {})
        outside = NO_WORK if self._between is None else self._between.take(opened.kind == STEP, program.work)
        execution = replace(execution, outside=outside)
        loss = "" if taken.loss is None else loss_bits(taken.loss)
        taken.loss, content = None, opened.content
        state.settle()
        if carried := opened.observed.carried:
            if not content:
                raise CallerError(
                    f"the step {CHANGES}; this run's data were declared in advance and hold no such tensor"
                )
            content, _ = run.source.keep(run.steps + 1, {**opened.declared, **carried})
            batch = {**batch, **carried}
        run.commit(program, execution, batch, content, opened.session.log, loss)


def _since(run: Recording, ran: Work) -> Work:
    """What all ranks together ran on the state since the last training step; CallerError if it is too much."""
    since, most = run.reported + ran, run.declared.allowance
    if not since <= most:
        raise CallerError(f"all ranks together ran {since} on the state between two steps, but only {most} is allowed")
    return since
