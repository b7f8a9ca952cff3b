"""A lab's side of a dispute: opens its commitments, and runs one step again to commit to its operators (PAPERS V)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import MerkleTree
from monitor import numerics
from monitor._conduct import Conduct
from monitor.conduct import conduct
from monitor.recorder import make_leaf
from monitor.site import Site, site_path
from monitor.trace import Node, Tracer
from monitor.training import Training
from monitor.transcript import Leaf, RunFolder

__all__ = ["LabProver", "Opening", "Prover", "TraceHead"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """A leaf of a tree with its inclusion proof."""

    leaf: bytes
    proof: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHead:
    """Commitment to the operators of one step: their number and RFC 9162 root."""

    size: int
    root: bytes


class Prover(ABC):
    """What a referee can ask of a party. Whoever does not answer, or answers with anything malformed, has lost."""

    @abstractmethod
    def step(self, number: int) -> Opening:
        """Open the leaf of a step in the log of steps."""

    @abstractmethod
    def trace(self, step: int) -> TraceHead:
        """Run a step again and commit to its operators."""

    @abstractmethod
    def trace_prefix(self, step: int, size: int) -> tuple[bytes, tuple[bytes, ...]]:
        """Root over the first ``size`` operators, with the proof that the committed list extends them."""

    @abstractmethod
    def node(self, step: int, index: int) -> Opening:
        """Open one operator."""

    @abstractmethod
    def tensors(self, step: int, index: int) -> tuple[list[Tensor], list[Tensor]]:
        """Input and output tensors of one operator."""

    @abstractmethod
    def state(self, step: int) -> dict[str, Tensor]:
        """Full state after a step."""

    @abstractmethod
    def rounding_entries(self, step: int, index: int) -> bytes:
        """Rounding-log entries of one operator."""


class LabProver(Prover):
    """A lab in this process: its run folder, and its private side for running steps again as it did."""

    def __init__(self, folder: Path) -> None:
        config = Site.read_config(site_path(folder))
        self.folder = folder
        self._run = RunFolder(folder, Site.lab_key(config).verifying)
        self._leaves, self._tree = self._run.load_steps()
        self._data = self._run.data()
        self._conduct = conduct(config.lie, config.lie_step)
        self._traces: dict[int, tuple[list[Node], MerkleTree]] = {}

    def step(self, number: int) -> Opening:
        proof = self._tree.inclusion_proof(number, self._tree.size)
        return Opening(leaf=self._leaves[number].encoded(), proof=tuple(proof))

    def trace(self, step: int) -> TraceHead:
        _, tree = self._trace(step)
        return TraceHead(size=tree.size, root=tree.root())

    def trace_prefix(self, step: int, size: int) -> tuple[bytes, tuple[bytes, ...]]:
        _, tree = self._trace(step)
        return tree.root(size), tuple(tree.consistency_proof(size, tree.size))

    def node(self, step: int, index: int) -> Opening:
        nodes, tree = self._trace(step)
        return Opening(leaf=nodes[index].encoded(), proof=tuple(tree.inclusion_proof(index, tree.size)))

    def tensors(self, step: int, index: int) -> tuple[list[Tensor], list[Tensor]]:
        tracer, _, _ = self._execute(step, capture=index)
        return [x.cpu() for x in tracer.captured_inputs], [x.cpu() for x in tracer.captured_outputs]

    def state(self, step: int) -> dict[str, Tensor]:
        training = self._training_at(step)
        return {name: tensor.to("cpu", copy=True) for name, tensor in training.memory.export().items()}

    def rounding_entries(self, step: int, index: int) -> bytes:
        _, session, _ = self._execute(step, capture=None)
        return session.entries_of(index)

    def _trace(self, step: int) -> tuple[list[Node], MerkleTree]:
        if step not in self._traces:
            tracer, _, _ = self._execute(step, capture=None)
            self._traces[step] = (tracer.nodes, MerkleTree(node.encoded() for node in tracer.nodes))
        return self._traces[step]

    def _execute(self, step: int, *, capture: int | None) -> tuple[Tracer, numerics.Session, Leaf]:
        training = self._training_at(step - 1)
        behaviour = self._conduct
        log = self._run.rounding_log(step)
        rate = behaviour.learning_rate(step, training.task.learning_rate_at(step))
        batch = self._batch(step)
        tracer = Tracer(capture=capture, inner=behaviour.observer(step))
        tracer.declare_inputs(training.memory.export(), batch)
        with numerics_of(training, log, tracer, behaviour) as session:
            loss = training.take_step(batch, learning_rate=rate)
        behaviour.before_commit(step, training)
        tracer.commit_state(training.memory.export(), str(training.memory.digest().root))
        leaf = make_leaf(training, batch_root=self._data.batch_root(step), log=log, loss=loss)
        leaf = behaviour.declare(leaf)
        if leaf != self._leaves[step]:
            raise EvidenceError(f"step {step} does not run again to its committed state")
        return tracer, session, leaf

    def _batch(self, step: int) -> Mapping[str, Tensor]:
        declared = self._data.batch(self._conduct.order(step, self._run.task.steps))
        return self._conduct.batch(step, declared)

    def _training_at(self, step: int) -> Training:
        """The lab's own state after a step, from its last checkpoint before it."""
        task = self._run.task
        start = step // task.checkpoint_every * task.checkpoint_every
        training = Training(task)
        training.memory.load(self._run.checkpoint(start))
        training.step = start
        for number in range(start + 1, step + 1):
            behaviour = self._conduct
            rate = behaviour.learning_rate(number, task.learning_rate_at(number))
            batch = self._batch(number)
            with numerics_of(training, self._run.rounding_log(number), behaviour.observer(number), behaviour):
                training.take_step(batch, learning_rate=rate)
            behaviour.before_commit(number, training)
        return training


def numerics_of(
    training: Training, log: bytes, observer: numerics.Observer | None, behaviour: Conduct
) -> numerics.Session:
    """The session in which a recorded step runs again; a native run has no log to follow."""
    name = training.task.numerics
    if name == "native":
        raise CallerError("a run with native numerics cannot be disputed: no two devices reach the same bits")
    return numerics.replaying(name, log, bound=behaviour.bound, observer=observer)
