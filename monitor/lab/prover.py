"""A party's side of a dispute: opens its commitments, and runs one step again to commit to its operators (Verde)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import MerkleTree
from monitor.lab.conduct import Conduct
from monitor.lab.lies import conduct
from monitor.lab.reexecution import Reexecution, TracedStep
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.programs.trace import Node
from monitor.replay.steps import execution_of
from monitor.transcript import Leaf, RunFolder
from monitor.transcript.data import BatchOpening

__all__ = ["LabProver", "Opening", "Prover", "RunProver", "TraceHead"]


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
    """A party's interface to the referee. A party that gives no answer, or a malformed one, has lost."""

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
    def batch(self, step: int) -> BatchOpening:
        """The batch of a step, with the salts of its commitment."""

    @abstractmethod
    def constant(self, step: int, number: int) -> bytes:
        """Bytes of a constant of the step's program."""

    @abstractmethod
    def rounding_entries(self, step: int, index: int) -> bytes:
        """Rounding-log entries of one operator."""

    @abstractmethod
    def log(self, step: int) -> bytes:
        """The rounding log that the leaf of a step commits to."""


class RunProver(Prover):
    """A party that can run the steps of a run again: a lab, or a cluster to which they were opened.

    Args:
        run: its states, batches and logs are there as far as they are asked for.
        behaviour: how this party runs them.
    """

    def __init__(self, run: RunFolder, behaviour: Conduct) -> None:
        self._run = run
        self._leaves, self._tree = run.load_steps()
        self._reexecution = Reexecution(run, behaviour)
        self._traces: dict[int, tuple[list[Node], MerkleTree]] = {}

    def reached(self, step: int) -> Leaf | None:
        """What a step leads to as this party runs it; None where it cannot be taken as it was recorded."""
        return self._execute(step, capture=None).leaf

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
        traced = self._execute(step, capture=index)
        return [x.cpu() for x in traced.inputs], [x.cpu() for x in traced.outputs]

    def state(self, step: int) -> dict[str, Tensor]:
        return {name: tensor.to("cpu", copy=True) for name, tensor in self._reexecution.state(step).export().items()}

    def batch(self, step: int) -> BatchOpening:
        return self._run.batches().opening(step)

    def constant(self, step: int, number: int) -> bytes:
        return self._run.program(execution_of(self._leaves[step]).program).constants[number].content

    def rounding_entries(self, step: int, index: int) -> bytes:
        session = self._execute(step, capture=None).session
        return b"" if session is None else session.entries_of(index)

    def log(self, step: int) -> bytes:
        return self._run.rounding_log(step)

    def _trace(self, step: int) -> tuple[list[Node], MerkleTree]:
        if step not in self._traces:
            nodes = self._execute(step, capture=None).nodes
            self._traces[step] = (nodes, MerkleTree(node.encoded() for node in nodes))
        return self._traces[step]

    def _execute(self, step: int, *, capture: int | None) -> TracedStep:
        return self._reexecution.trace(step, capture)


class LabProver(RunProver):
    """A lab in this process: its run folder, and its private side for running steps again as it did."""

    def __init__(self, folder: Path) -> None:
        config = SimulatedLab.read_config(lab_path(folder))
        self.folder = folder
        run = RunFolder(folder, SimulatedLab.lab_key(config).verifying)
        super().__init__(run, conduct(config.lie, config.lie_step))

    def _execute(self, step: int, *, capture: int | None) -> TracedStep:
        traced = super()._execute(step, capture=capture)
        if traced.leaf not in (None, self._leaves[step]):
            raise EvidenceError(f"step {step} does not run again to its committed state")
        return traced
