"""Takes committed steps again as a party does, a simulated lie included: to resume a run, or in a dispute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from firmware_sim.errors import CallerError, EvidenceError
from monitor import numerics
from monitor.programs.interpreter import Watch
from monitor.programs.trace import Node
from monitor.replay.moment import Moment
from monitor.replay.steps import ProgramSteps, execution_of
from monitor.replay.tracing import ProgramTracer, specification
from monitor.sharding import ShardedMemory
from monitor.transcript import Batches, Leaf, RunFolder

__all__ = ["HONEST", "Behaviour", "OwnSteps", "Reexecution", "TracedStep"]


class Behaviour:
    """Takes steps as they were recorded; what a lab did otherwise overrides the moment at which it did.

    Attributes:
        bound: by which a party obeys the rounding logs of the steps that it takes again.
        needs_before: whether it looks at the state before a step.
    """

    bound = numerics.Bound()
    needs_before = False

    def batch(self, step: int, declared: Mapping[str, Tensor], batches: Batches) -> Mapping[str, Tensor]:
        """Return the batch that is really trained on; ``batches`` has those of other steps, as far as they came."""
        return declared

    def observer(self, step: int) -> numerics.Observer | None:
        """Return an observer that may alter operator results."""
        return None

    def before_commit(self, moment: Moment) -> None:
        """Called after a step was taken and before its state is committed."""

    def declare(self, leaf: Leaf) -> Leaf:
        """Return the leaf that the lab commits to."""
        return leaf


HONEST = Behaviour()


class OwnSteps:
    """A party's own state after one of a run's checkpoints, and the next steps as it takes them.

    Attributes:
        memory: the state.
        step: how far it came.
    """

    def __init__(
        self, run: RunFolder, start: int, behaviour: Behaviour, *, memory: ShardedMemory | None = None
    ) -> None:
        """Load the checkpoint of step ``start`` to ``memory``, by default to some where this process trains."""
        self._run = run
        self._behaviour = behaviour
        self._batches = run.batches()
        self._steps = ProgramSteps(run, start, bound=behaviour.bound, memory=memory)
        self.memory = self._steps.training.memory

    @property
    def step(self) -> int:
        """The last step taken."""
        return self._steps.training.step

    def take(self, watch: Watch | None = None) -> tuple[Leaf, numerics.Session]:
        """Take the next step and return the leaf that the party states."""
        step, behaviour = self.step + 1, self._behaviour
        before = None
        if behaviour.needs_before:
            before = {name: tensor.clone() for name, tensor in self.memory.export().items()}
        batch = behaviour.batch(step, self._batches.batch(step), self._batches)
        leaf, session = self._steps.take(batch=batch, observer=behaviour.observer(step), watch=watch)
        moment = Moment(
            step=step,
            declared=self._run.declared,
            program=self._steps.program(step),
            execution=execution_of(leaf),
            batch=batch,
            memory=self.memory,
            before=before,
            log=self._run.rounding_log(step),
            loss=leaf.loss,
        )
        behaviour.before_commit(moment)
        return behaviour.declare(replace(leaf, state=self.memory.digest())), session


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """One step taken again.

    Attributes:
        inputs, outputs: tensors of the node that was to be captured.
        session: with the rounding log's entries of each operator; None where the step could not be taken.
        leaf: what the step leads to; None where it could not be taken. Then the last node is the operator whose part of
            the log does not let it go on, and there are no nodes where something else stopped it.
    """

    nodes: list[Node]
    inputs: list[Tensor]
    outputs: list[Tensor]
    session: numerics.Session | None
    leaf: Leaf | None


class Reexecution:
    """Executes any step of one run again.

    Raises:
        CallerError: the run's numerics are not controlled.
    """

    def __init__(self, run: RunFolder, behaviour: Behaviour) -> None:
        if run.declared.numerics == "native":
            raise CallerError("a run with native numerics cannot be disputed: no two devices reach the same bits")
        self._run, self._behaviour = run, behaviour

    def state(self, step: int) -> ShardedMemory:
        """The party's own state after a step, from the last checkpoint before it."""
        return self._steps_to(step).memory

    def trace(self, step: int, capture: int | None) -> TracedStep:
        """Take a step with all its operators noted, and the tensors of one of them kept."""
        steps = self._steps_to(step - 1)
        execution = execution_of(self._run.leaf(step))
        program = self._run.program(execution.program)
        tracer = ProgramTracer(specification(program, self._run.declared, execution), capture=capture)
        leaf: Leaf | None = None
        session: numerics.Session | None = None
        try:
            leaf, session = steps.take(tracer)
            tracer.commit_state(steps.memory.export(), str(steps.memory.digest().root))
        except numerics.LogContradiction as error:
            if error.call < len(program.calls):
                tracer.stop(error.call, error.part, error.element, error.size)
        except (EvidenceError, IndexError, ValueError):  # whatever else stops a replay
            tracer.nodes.clear()
        return TracedStep(
            nodes=tracer.nodes,
            inputs=tracer.captured_inputs,
            outputs=tracer.captured_outputs,
            session=session,
            leaf=leaf,
        )

    def _steps_to(self, step: int) -> OwnSteps:
        steps = OwnSteps(self._run, self._run.checkpoint_before(step), self._behaviour)
        while steps.step < step:
            steps.take()
        return steps
