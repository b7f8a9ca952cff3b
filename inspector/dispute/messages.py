"""Checks what comes from one prover to a referee; nonsense loses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from firmware_sim import limits
from firmware_sim.errors import ChipwitnessError, EvidenceError
from firmware_sim.evidence import (
    BlockSlice,
    canonical,
    digest_bytes,
    hash_blocks,
    merge,
    root_digest,
    verify_consistency,
    verify_inclusion,
)
from firmware_sim.evidence import Node as Tree
from inspector.dispute.prover import Prover
from inspector.wire.messages import Silence
from monitor.numerics.operators.partial_sums import Part
from monitor.programs.constants import Constant
from monitor.programs.program import Program
from monitor.programs.trace import Node
from monitor.protocol.dispute import SUBTREES, Opening, TraceHead
from monitor.sharding import Layout
from monitor.transcript import Leaf

__all__ = [
    "Absent",
    "CheckedProver",
    "Contradiction",
    "Failure",
    "Traffic",
    "absence",
    "checked_leaf",
    "constant_of",
    "shown",
]

Result = TypeVar("Result")


class Failure(EvidenceError):
    """A party gave no valid answer, and has lost for that."""

    def __init__(self, party: str, why: str, text: str = "gave no valid answer") -> None:
        self.party = party
        super().__init__(f"{party} {text}: {why}")


class Contradiction(Failure):
    """A party opens something else than it has committed to."""


class Absent(Failure):
    """No answer of a party came that it has signed: only who asked it can say so, or a witness."""

    def __init__(self, party: str, silence: Silence) -> None:
        self.silence = silence
        super().__init__(party, str(silence), "is absent")


def absence(party: str, silence: Silence, referee: str) -> str:
    """That a party is absent, and who says so."""
    who = f"witnessed by {silence.witness}" if silence.witness else f"says {referee}"
    return f"{party} is absent, {who}: {silence}"


@dataclass(slots=True)
class Traffic:
    """Rounds (one question to each party), bytes of all answers as they came, and where the search asked.

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
        self.traffic = traffic
        self._trace: dict[int, TraceHead] = {}

    def leaf(self, step: int) -> Leaf:
        """The committed leaf of a step."""
        opening = self._opening(lambda: self._prover.step(step))
        self._check_inclusion(opening, step, self._size, self._root)
        return self._parsed(lambda: checked_leaf(opening.leaf, step, self._layout))

    def trace(self, step: int) -> TraceHead:
        """The commitment to the operators of a step; asked for once, and binding from then on."""
        if step not in self._trace:
            head = self.asked(lambda: self._prover.trace(step))
            if not 1 <= head.size <= 1 << 24 or len(head.root) != 32:
                raise Failure(self.name, "its trace has an impossible size")
            self._trace[step] = head
        return self._trace[step]

    def prefix(self, step: int, size: int) -> bytes:
        """Root over the first operators of a step, shown to be a prefix of the committed list."""
        head = self.trace(step)
        root, proof = self.asked(lambda: self._prover.trace_prefix(step, size))
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
            raise Failure(self.name, f"operator {index} of its trace gives its own number as {node.index}")
        return node

    def hashes(self, step: int, index: int, side: str, slot: int) -> tuple[bytes, ...]:
        """Chunks' hashes of an operator's tensor; the caller compares them with the committed digest."""
        return self.asked(lambda: self._prover.hashes(step, index, side, slot))

    def chunk(self, step: int, index: int, side: str, slot: int, number: int) -> bytes:
        """A chunk of such a tensor; the caller compares it with its hash."""
        return self.asked(lambda: self._prover.chunk(step, index, side, slot, number))

    def parts(
        self, step: int, index: int, slot: int, place: int, widths: Sequence[tuple[int, int]]
    ) -> tuple[Part, ...]:
        """Numbers of equal parts of an element, as many of each kind as ``widths`` says."""

        def opened() -> tuple[Part, ...]:
            parts = self._prover.parts(step, index, slot, place, len(widths))
            if [tuple(map(len, part)) for part in parts] != list(widths):
                raise EvidenceError("it gave the wrong number of parts, or parts of the wrong size")
            if any(not 0 <= number < 1 << 31 for part in parts for number in part.most):
                raise EvidenceError("its parts hold an impossible magnitude")
            return parts

        return self.asked(opened)

    def contradicts(self, what: str) -> Contradiction:
        """What to raise where an answer is not what this party has committed to."""
        return Contradiction(self.name, f"the {what} that it opens is not the one that it committed to")

    def block(self, step: int, number: int, name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
        """A block of a tensor, of this type and shape, of the state to which the leaf of a step commits."""
        kind, _, rest = name.partition("/")

        def opened() -> bytes:
            content, proof = self._prover.block(step, number, name)
            trees, place = self._layout.around((kind, rest), number), self._layout.blocks[kind, rest].start
            self._check_state(step, BlockSlice(kind, rest, dtype, shape, place, number, content), trees, proof)
            return content

        return self.asked(opened)

    def blocks(self, step: int, start: int, size: int, committed: bytes) -> tuple[bytes, ...]:
        """Hashes of equal subtrees of one of the tree of a state, which have the hash that was committed to."""

        def opened() -> tuple[bytes, ...]:
            hashes, count = self._prover.blocks(step, start, size), min(size, SUBTREES)
            if len(hashes) != count:
                raise EvidenceError(
                    f"it opens a tree of {size} blocks with {len(hashes)} hashes, but {count} are needed"
                )
            width = size // count
            parts = [Tree(start + number * width, width, value) for number, value in enumerate(hashes)]
            if merge(parts) != [Tree(start, size, committed)]:
                raise self.contradicts(f"state after step {step}")
            return hashes

        return self.asked(opened)

    def _check_state(self, step: int, part: BlockSlice, trees: list[tuple[int, int]], proof: tuple[bytes, ...]) -> None:
        others = [Tree(*tree, value) for tree, value in zip(trees, proof, strict=True)]
        if root_digest(sorted([*hash_blocks([part]), *others])) != self.leaf(step).state.root:
            raise self.contradicts(f"{part.kind}/{part.name} of the state after step {step}")

    def batch(self, step: int) -> dict[str, Tensor]:
        """The batch that the leaf of a step commits to."""

        def opened() -> dict[str, Tensor]:
            opening = self._prover.batch(step)
            if opening.root().hex() != self.leaf(step).batch:
                raise EvidenceError(f"the batch that it opens is not that of step {step}")
            return opening.tensors()

        return self.asked(opened)

    def constant(self, step: int, number: int, known: Constant) -> Constant:
        """A constant of the step's program, of which this knows the digest."""
        return self.asked(lambda: known.filled(self._prover.constant(step, number)))

    def rounding_entries(self, step: int, index: int) -> bytes:
        """Rounding-log entries of one operator."""
        return self.asked(lambda: self._prover.rounding_entries(step, index))

    def log(self, step: int) -> bytes:
        """The rounding log to which the leaf of a step commits."""

        def opened() -> bytes:
            log = self._prover.log(step)
            limits.ROUNDING_LOG_BYTES.check(len(log))
            check_log(log, self.leaf(step))
            return log

        return self.asked(opened)

    def asked(self, question: Callable[[], Result]) -> Result:
        """The party's answer; Absent where none came, Failure where it is none."""
        try:
            return question()
        except Silence as silence:
            raise Absent(self.name, silence) from None
        except Failure:  # of another question that the answer is compared with
            raise
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
        opening = self.asked(question)
        self._parsed(lambda: limits.PROOF_NODES.check(len(opening.proof)))
        return opening

    def _check_inclusion(self, opening: Opening, index: int, size: int, root: bytes) -> None:
        self._parsed(
            lambda: verify_inclusion(leaf=opening.leaf, index=index, size=size, proof=opening.proof, root=root)
        )


def check_log(log: bytes, leaf: Leaf) -> None:
    """EvidenceError unless that is the rounding log to which a leaf commits."""
    if str(digest_bytes("rounding-log", log)) != leaf.log:
        raise EvidenceError(f"the log that it opens is not that of step {leaf.step}")


def checked_leaf(data: bytes, step: int, layout: Layout) -> Leaf:
    """The leaf of a step; EvidenceError where that is none."""
    leaf = Leaf.from_json(canonical.decode(data, most=limits.STEP_BYTES), layout)
    if leaf.step != step:
        raise EvidenceError(f"the leaf of step {step} gives its own step as {leaf.step}")
    return leaf


def constant_of(parties: Iterable[CheckedProver], step: int, program: Program, number: int) -> Constant:
    """A constant of the program, from a party that shows it where the program has its digest alone."""
    known = program.constants[number]
    if known.unit is not None:
        return known
    return shown(parties, f"constant {number} of step {step}", lambda party: party.constant(step, number, known))


def shown(parties: Iterable[CheckedProver], what: str, ask: Callable[[CheckedProver], Result]) -> Result:
    """What both are committed to, from the first party that shows it; EvidenceError where neither does.

    Contradiction where a party has signed something else in its place, and has lost; of one party alone any Failure.
    """
    asked = list(parties)
    for party in asked:
        try:
            return ask(party)
        except Contradiction:
            raise
        except EvidenceError:
            if len(asked) == 1:
                raise
    raise EvidenceError(f"neither party opens the {what}")
