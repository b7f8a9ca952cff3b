"""Counts and checks what goes between a referee and one prover; silence and nonsense lose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from firmware_sim import limits
from firmware_sim.errors import ChipwitnessError, EvidenceError
from firmware_sim.evidence import canonical, digest_bytes, verify_consistency, verify_inclusion
from inspector.dispute.prover import Prover
from monitor.programs.constants import Constant
from monitor.programs.trace import Node
from monitor.protocol.dispute import Opening, TraceHead
from monitor.sharding import Layout
from monitor.transcript import Leaf
from monitor.transcript.data import BatchOpening

__all__ = ["CheckedProver", "Failure", "Traffic"]

Result = TypeVar("Result")


class Failure(EvidenceError):
    """A party gave no valid answer, and has lost for that."""

    def __init__(self, party: str, why: str) -> None:
        self.party = party
        super().__init__(f"{party} gave no valid answer: {why}")


@dataclass(slots=True)
class Traffic:
    """Rounds (one question to each party), bytes of all answers, and where the search asked.

    ``search`` has for each place that was compared: "step" or "operator", the place, how many there are, and whether
    the parties agreed there.
    """

    rounds: int = 0
    bytes: int = 0
    search: list[tuple[str, int, int, bool]] = field(default_factory=list)


class CheckedProver:
    """One prover as the referee sees it: every answer is checked against what it has committed to before.

    Args:
        size, root: the log of steps, from a head that the lab signed.
    """

    def __init__(self, name: str, prover: Prover, *, size: int, root: bytes, layout: Layout, traffic: Traffic) -> None:
        self.name = name
        self._prover = prover
        self._size = size
        self._root = root
        self._layout = layout
        self._traffic = traffic
        self._trace: dict[int, TraceHead] = {}

    def leaf(self, step: int) -> Leaf:
        """The committed leaf of a step."""
        opening = self._opening(lambda: self._prover.step(step))
        self._check_inclusion(opening, step, self._size, self._root)
        return self._parsed(lambda: _leaf(opening.leaf, step, self._layout))

    def trace(self, step: int) -> TraceHead:
        """The commitment to the operators of a step; asked for once, and binding from then on."""
        if step not in self._trace:
            head = self._ask(lambda: self._prover.trace(step))
            if type(head) is not TraceHead or type(head.size) is not int or type(head.root) is not bytes:
                raise Failure(self.name, "its trace has no head")
            if not 1 <= head.size <= 1 << 24 or len(head.root) != 32:
                raise Failure(self.name, "its trace has an impossible size")
            self._traffic.bytes += 40
            self._trace[step] = head
        return self._trace[step]

    def prefix(self, step: int, size: int) -> bytes:
        """Root over the first operators of a step, shown to be a prefix of the committed list."""
        head = self.trace(step)
        root, proof = self._ask(lambda: _checked_prefix(self._prover.trace_prefix(step, size)))
        self._traffic.bytes += 32 * (1 + len(proof))
        self._parsed(
            lambda: verify_consistency(old=size, new=head.size, proof=proof, old_root=root, new_root=head.root)
        )
        return root

    def node(self, step: int, index: int) -> Node:
        """One committed operator."""
        head = self.trace(step)
        opening = self._opening(lambda: self._prover.node(step, index))
        self._check_inclusion(opening, index, head.size, head.root)
        node = self._parsed(lambda: Node.from_json(canonical.decode(opening.leaf, most=limits.STEP_BYTES)))
        if node.index != index:
            raise Failure(self.name, f"operator {index} of its trace calls itself {node.index}")
        return node

    def tensors(self, step: int, index: int) -> tuple[list[Tensor], list[Tensor]]:
        """Tensors of an operator; the caller compares them with the committed digests."""
        inputs, outputs = self._ask(lambda: [_checked_tensors(group) for group in self._prover.tensors(step, index)])
        self._count(inputs, outputs)
        return inputs, outputs

    def state(self, step: int) -> dict[str, Tensor]:
        """Full state after a step; the caller compares it with the committed digest."""
        state = self._ask(lambda: _checked_state(self._prover.state(step)))
        self._count(list(state.values()))
        return state

    def batch(self, step: int) -> dict[str, Tensor]:
        """The batch that the leaf of a step commits to."""

        def opened() -> dict[str, Tensor]:
            opening = self._prover.batch(step)
            if type(opening) is not BatchOpening or opening.root().hex() != self.leaf(step).batch:
                raise EvidenceError(f"it opens another batch than that of step {step}")
            return opening.tensors()

        batch = self._ask(opened)
        self._count(list(batch.values()))
        return batch

    def constant(self, step: int, number: int, known: Constant) -> Constant:
        """A constant of the step's program, of which this knows the digest."""
        found = self._ask(lambda: known.filled(_checked_bytes(self._prover.constant(step, number))))
        self._traffic.bytes += found.length
        return found

    def rounding_entries(self, step: int, index: int) -> bytes:
        """Rounding-log entries of one operator."""
        entries = self._ask(lambda: _checked_bytes(self._prover.rounding_entries(step, index)))
        self._traffic.bytes += len(entries)
        return entries

    def log(self, step: int) -> bytes:
        """The rounding log to which the leaf of a step commits."""

        def opened() -> bytes:
            log = _checked_bytes(self._prover.log(step))
            limits.ROUNDING_LOG_BYTES.check(len(log))
            check_log(log, self.leaf(step))
            return log

        log = self._ask(opened)
        self._traffic.bytes += len(log)
        return log

    def _ask(self, question: Callable[[], Result]) -> Result:
        try:
            return question()
        except ChipwitnessError as error:
            raise Failure(self.name, str(error)) from None
        except Exception as error:  # whatever goes wrong in a party's answer is that party's fault
            raise Failure(self.name, f"{type(error).__name__}: {error}") from None

    def _parsed(self, function: Callable[[], Result]) -> Result:
        try:
            return function()
        except (ChipwitnessError, LookupError, TypeError, ValueError) as error:
            raise Failure(self.name, str(error)) from None

    def _opening(self, question: Callable[[], Opening]) -> Opening:
        opening = self._ask(question)
        if type(opening) is not Opening or type(opening.leaf) is not bytes:
            raise Failure(self.name, "its opening has no leaf")
        self._ask(lambda: _checked_proof(opening.proof))
        return opening

    def _check_inclusion(self, opening: Opening, index: int, size: int, root: bytes) -> None:
        self._traffic.bytes += len(opening.leaf) + 32 * len(opening.proof)
        self._parsed(
            lambda: verify_inclusion(leaf=opening.leaf, index=index, size=size, proof=opening.proof, root=root)
        )

    def _count(self, *groups: list[Tensor]) -> None:
        self._traffic.bytes += sum(tensor.numel() * tensor.element_size() for group in groups for tensor in group)


def check_log(log: bytes, leaf: Leaf) -> None:
    """EvidenceError unless that is the rounding log to which a leaf commits."""
    if str(digest_bytes("rounding-log", log)) != leaf.log:
        raise EvidenceError(f"it opens another log than that of step {leaf.step}")


def _checked_bytes(value: object) -> bytes:
    if type(value) is not bytes:
        raise EvidenceError(f"an answer holds {type(value).__name__} where bytes belong")
    return value


def _checked_prefix(value: object) -> tuple[bytes, tuple[bytes, ...]]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise EvidenceError("an answer is not a root with its proof")
    return _checked_bytes(value[0]), _checked_proof(value[1])


def _checked_proof(value: object) -> tuple[bytes, ...]:
    if type(value) is not tuple:
        raise EvidenceError("an answer's proof is not a tuple")
    limits.PROOF_NODES.check(len(value))
    return tuple(_checked_bytes(item) for item in value)


def _checked_state(value: object) -> dict[str, Tensor]:
    if type(value) is not dict or not all(type(name) is str for name in value):
        raise EvidenceError("an answer is not a state of named tensors")
    _checked_tensors(list(value.values()))
    return value


def _checked_tensors(values: object) -> list[Tensor]:
    """Dense tensors of exactly that type on the CPU, so that no code of the party runs when they are used."""
    if type(values) is not list:
        raise EvidenceError("an answer is not a list of tensors")
    limits.TENSORS.check(len(values))
    for value in values:
        if type(value) is not Tensor or value.layout is not torch.strided or value.device.type != "cpu":
            raise EvidenceError("an answer holds something that is not a dense tensor on the CPU")
        check_materialised(value)
    return values


def check_materialised(value: Tensor) -> None:
    """EvidenceError unless each element has its own memory: an expanded tensor grows when it is copied or hashed."""
    held = value.untyped_storage().nbytes()
    if value.numel() * value.element_size() > held:
        raise EvidenceError(f"an answer holds a tensor of {value.numel()} elements in {held} bytes")


def _leaf(data: bytes, step: int, layout: Layout) -> Leaf:
    leaf = Leaf.from_json(canonical.decode(data, most=limits.STEP_BYTES), layout)
    if leaf.step != step:
        raise EvidenceError(f"the leaf of step {step} calls itself {leaf.step}")
    return leaf
