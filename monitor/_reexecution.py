"""A lab executes its committed steps again as it took them then, lies included: what a dispute asks of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from firmware_sim.errors import CallerError
from monitor import numerics
from monitor._conduct import Conduct
from monitor.loops.steps import ProgramSteps, execution_of
from monitor.loops.task import LoopTask
from monitor.loops.tracing import ProgramTracer, specification
from monitor.recorder import make_leaf
from monitor.sharding import ShardedMemory
from monitor.trace import Node, Tracer
from monitor.training import Training
from monitor.transcript import Leaf, RunFolder

__all__ = ["Reexecution", "TracedStep", "reexecution_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One step taken again.

    Attributes:
        inputs, outputs: tensors of the node that was to be captured.
        session: with the rounding log's entries of each operator.
        leaf: what the step leads to.
    """

    nodes: list[Node]
    inputs: list[Tensor]
    outputs: list[Tensor]
    session: numerics.Session
    leaf: Leaf


class Reexecution(ABC):
    """Executes steps of one run again."""

    @abstractmethod
    def state(self, step: int) -> ShardedMemory:
        """The lab's own state after a step, from its last checkpoint before it."""

    @abstractmethod
    def trace(self, step: int, capture: int | None) -> TracedStep:
        """Take a step with all its operators noted, and the tensors of one of them kept."""


class _PresetReexecution(Reexecution):
    """A preset's run: its program is built and run."""

    def __init__(self, run: RunFolder, behaviour: Conduct) -> None:
        self._run, self._behaviour = run, behaviour
        self._data = run.data()
        if run.task.numerics == "native":
            raise CallerError("a run with native numerics cannot be disputed: no two devices reach the same bits")

    def state(self, step: int) -> ShardedMemory:
        return self._training_at(step).memory

    def trace(self, step: int, capture: int | None) -> TracedStep:
        training = self._training_at(step - 1)
        batch = self._batch(step)
        tracer = Tracer(capture=capture, inner=self._behaviour.observer(step))
        tracer.declare_inputs(training.memory.export(), batch)
        with self._session(step, tracer) as session:
            loss = training.take_step(batch, learning_rate=self._rate(step))
        self._behaviour.before_commit(step, training)
        tracer.commit_state(training.memory.export(), str(training.memory.digest().root))
        leaf = make_leaf(training, batch_root=self._data.batch_root(step), log=self._run.rounding_log(step), loss=loss)
        return TracedStep(
            nodes=tracer.nodes,
            inputs=tracer.captured_inputs,
            outputs=tracer.captured_outputs,
            session=session,
            leaf=self._behaviour.declare(leaf),
        )

    def _training_at(self, step: int) -> Training:
        task = self._run.task
        training = Training(task)
        training.step = step // task.checkpoint_every * task.checkpoint_every
        training.memory.load(self._run.checkpoint(training.step))
        for number in range(training.step + 1, step + 1):
            batch = self._batch(number)  # before the session, which would count what makes it
            with self._session(number, self._behaviour.observer(number)):
                training.take_step(batch, learning_rate=self._rate(number))
            self._behaviour.before_commit(number, training)
        return training

    def _session(self, step: int, observer: numerics.Observer | None) -> numerics.Session:
        log, bound = self._run.rounding_log(step), self._behaviour.bound
        return numerics.replaying(self._run.task.numerics, log, bound=bound, observer=observer)

    def _rate(self, step: int) -> float:
        return self._behaviour.learning_rate(step, self._run.task.learning_rate_at(step))

    def _batch(self, step: int) -> Mapping[str, Tensor]:
        declared = self._data.batch(self._behaviour.order(step, self._run.task.steps))
        return self._behaviour.batch(step, declared)


class _LoopReexecution(Reexecution):
    """A loop's run: its programs are interpreted, so that the loop's own Python is not needed."""

    def __init__(self, run: RunFolder, behaviour: Conduct) -> None:
        self._run, self._behaviour = run, behaviour

    def state(self, step: int) -> ShardedMemory:
        return self._steps_to(step).training.memory

    def trace(self, step: int, capture: int | None) -> TracedStep:
        steps = self._steps_to(step - 1)
        execution = execution_of(self._run.leaf(step))
        tracer = ProgramTracer(specification(steps.program(step), self._run.loop, execution), capture=capture)
        leaf, session = steps.take(observer=self._behaviour.observer(step), watch=tracer)
        memory = steps.training.memory
        tracer.commit_state(memory.export(), str(memory.digest().root))
        return TracedStep(
            nodes=tracer.nodes,
            inputs=tracer.captured_inputs,
            outputs=tracer.captured_outputs,
            session=session,
            leaf=leaf,
        )

    def _steps_to(self, step: int) -> ProgramSteps:
        every = self._run.loop.checkpoint_every
        steps = ProgramSteps(self._run, step // every * every, bound=self._behaviour.bound)
        while steps.training.step < step:
            steps.take(observer=self._behaviour.observer(steps.training.step + 1))
        return steps


def reexecution_of(run: RunFolder, behaviour: Conduct) -> Reexecution:
    """Whatever takes this run's steps again; CallerError if its numerics are not controlled."""
    kind = _LoopReexecution if isinstance(run.declared, LoopTask) else _PresetReexecution
    return kind(run, behaviour)
