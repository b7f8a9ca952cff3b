"""A party's side of a dispute: opens its commitments, and runs one step again to commit to its operators (Verde)."""

from __future__ import annotations

from firmware_sim.errors import ChipwitnessError, EvidenceError
from firmware_sim.evidence import CHUNK_BYTES, MerkleTree, block_elements, chunk_hash, merge
from monitor.numerics.operators.partial_sums import Part
from monitor.programs.trace import Node, content_of
from monitor.protocol.dispute import SUBTREES, Opening, TraceHead
from monitor.replay.parted import parts_of
from monitor.replay.reexecution import HONEST, Behaviour, OwnSteps, Reexecution, TracedStep
from monitor.replay.steps import execution_of
from monitor.sharding import ShardedMemory
from monitor.transcript import Leaf, RunFolder
from monitor.transcript.data import BatchOpening

__all__ = ["RunProver"]

_CAPTURED = 3
"""Operators whose tensors are kept for the next question: the disputed one, and two that made its inputs."""


class RunProver:
    """Whoever can run the steps of a run again: a lab, or a cluster to which they were opened.

    Args:
        run: its states, batches and logs are there as far as they are asked for.
        behaviour: how this party runs them.
    """

    def __init__(self, run: RunFolder, behaviour: Behaviour = HONEST) -> None:
        self._run, self._behaviour = run, behaviour
        self._leaves, self._tree = run.load_steps()
        if self._tree.size <= run.manifest.steps:  # the head commits to the announced step, too
            self._tree.append(run.leaf(run.manifest.steps).encoded())
        self._reexecution = Reexecution(run, behaviour)
        self._traces: dict[int, tuple[list[Node], MerkleTree]] = {}
        self._captured: dict[tuple[int, int], dict[str, list[memoryview]]] = {}
        self._kept: tuple[int, ShardedMemory] | None = None

    def outcome(self, step: int) -> bytes:
        leaf = self._execute(step, capture=None).leaf
        return b"" if leaf is None else leaf.encoded()

    def departure(self, last: int) -> tuple[int, Leaf | None] | None:
        """The first step, up to ``last``, that leads elsewhere than its leaf says, and where; None where none does.

        Of a step that cannot be taken as it was recorded the leaf is None.

        Raises:
            EvidenceError: this machine cannot take the steps.
        """
        try:
            steps = OwnSteps(self._run, 0, self._behaviour)
            for step in range(1, last + 1):
                try:
                    leaf, _ = steps.take()
                except (EvidenceError, IndexError, ValueError):  # what stops a replay
                    return step, None
                if leaf != self._leaves[step]:
                    return step, leaf
        except (ChipwitnessError, LookupError, RuntimeError, TypeError, MemoryError) as error:
            raise EvidenceError(f"the run cannot be followed here: {type(error).__name__}: {error!s:.200}") from None
        return None

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

    def hashes(self, step: int, index: int, side: str, slot: int) -> tuple[bytes, ...]:
        data = self._content(step, index, side, slot)
        return tuple(chunk_hash(data[at : at + CHUNK_BYTES]) for at in range(0, len(data), CHUNK_BYTES))

    def chunk(self, step: int, index: int, side: str, slot: int, number: int) -> bytes:
        return bytes(self._content(step, index, side, slot)[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES])

    def parts(self, step: int, index: int, slot: int, place: int, count: int) -> tuple[Part, ...]:
        contents, node = self._contents(step, index)["in"], self._trace(step)[0][index]
        return parts_of(node, slot, place, count, contents, self._run.declared.numerics)

    def block(self, step: int, number: int, name: str) -> tuple[bytes, tuple[bytes, ...]]:
        memory = self._state(step)
        value = memory.export()[name]
        length = block_elements(str(value.dtype).removeprefix("torch."), tuple(value.shape))
        part = value.reshape(-1)[number * length : (number + 1) * length]
        kind, _, rest = name.partition("/")
        trees = memory.layout.around((kind, rest), number)
        proof = tuple(merge(memory.leaves[start : start + size])[0].hash for start, size in trees)
        return bytes(content_of(part)), proof

    def blocks(self, step: int, start: int, size: int) -> tuple[bytes, ...]:
        leaves, width = self._state(step).leaves[start : start + size], max(size // SUBTREES, 1)
        return tuple(merge(leaves[at : at + width])[0].hash for at in range(0, len(leaves), width))

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

    def _content(self, step: int, index: int, side: str, slot: int) -> memoryview:
        """Bytes of a tensor of one operator."""
        return self._contents(step, index)[side][slot]

    def _contents(self, step: int, index: int) -> dict[str, list[memoryview]]:
        """Bytes of the tensors of one operator; those of the last few operators are kept."""
        if (step, index) not in self._captured:
            while len(self._captured) >= _CAPTURED:
                del self._captured[next(iter(self._captured))]
            self._kept = None
            traced = self._execute(step, capture=index)
            if index >= len(traced.nodes):
                raise EvidenceError(f"step {step} has no operator {index}")
            self._captured[step, index] = {
                "in": list(map(content_of, traced.inputs)),
                "out": list(map(content_of, traced.outputs)),
            }
        return self._captured[step, index]

    def _state(self, step: int) -> ShardedMemory:
        if self._kept is None or self._kept[0] != step:
            memory = self._reexecution.state(step)
            memory.digest()
            self._kept = (step, memory)
        return self._kept[1]

    def _execute(self, step: int, *, capture: int | None) -> TracedStep:
        return self._reexecution.trace(step, capture)
