"""What a run led to, step by step, as one list that its party commits to: two honest parties have the same list.

The log of steps that a head signs holds what honest parties do not share, such as salts and rounding logs. A referee
therefore compares these lists. A root over the first entries is shown to be a prefix of the committed list, so the
first entry about which two parties differ is found with O(log steps) hashes. Each leaf that the referee takes is
compared with its entry. A party that commits to another list than its log gives has contradicted itself there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import MerkleTree, canonical, verify_consistency, verify_inclusion
from monitor.transcript import Leaf

if TYPE_CHECKING:
    from inspector.dispute.messages import CheckedProver
    from inspector.dispute.provider import Remote

__all__ = ["Results", "result_of", "results_of"]


def result_of(leaf: Leaf) -> bytes:
    """The entry of a step: its state, loss, FLOP, program and the values that it read."""
    ran = None if leaf.execution is None else [leaf.execution.program, leaf.execution.reads]
    return canonical.encode([leaf.step, str(leaf.state.root), leaf.loss, leaf.flop, ran])


def results_of(leaves: Iterable[Leaf]) -> MerkleTree:
    """The list of a run."""
    return MerkleTree(map(result_of, leaves))


class Results:
    """A party's list as the referee sees it.

    Args:
        size: entries that its head calls for.
    """

    def __init__(self, party: CheckedProver, remote: Remote, size: int) -> None:
        self._party, self._remote, self._size = party, remote, size
        self._known: dict[int, bytes] = {}

    def root(self) -> bytes:
        """The commitment to the whole list; asked for once, and binding from then on."""

        def opened() -> bytes:
            size, root = self._remote.results()
            if size != self._size:
                raise EvidenceError(f"the list of results covers {size} steps, but the signed head covers {self._size}")
            return root

        if self._size not in self._known:
            self._known[self._size] = self._party.asked(opened)
        return self._known[self._size]

    def roots(self, sizes: Sequence[int]) -> list[bytes]:
        """Roots over so many first entries each, shown to be prefixes of the committed list."""
        root = self.root()
        asked = [size for size in sizes if size not in self._known]

        def opened() -> dict[int, bytes]:
            found = dict(zip(asked, self._remote.results_at(asked), strict=True))
            for size, (old, proof) in found.items():
                verify_consistency(old=size, new=self._size, proof=proof, old_root=old, new_root=root)
            return {size: old for size, (old, _) in found.items()}

        if asked:
            self._known |= self._party.asked(opened)
        return [self._known[size] for size in sizes]

    def check(self, leaf: Leaf) -> None:
        """Failure unless the list has this leaf's entry."""

        def opened() -> None:
            proof = self._remote.result(leaf.step)
            entry, size = result_of(leaf), self._size
            verify_inclusion(leaf=entry, index=leaf.step, size=size, proof=proof, root=self.root())

        self._party.asked(opened)
