"""A party's run as a referee knows it: signed head, declaration, and what the party opens of the rest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import MerkleTree, VerifyingKey, canonical, verify_consistency, verify_inclusion
from inspector.dispute.messages import CheckedProver, Failure, Traffic, checked_leaf
from inspector.dispute.openings import Allowance, state_tensor
from inspector.dispute.provider import Remote, result_of
from inspector.inspection.disclosure import Checked, ThinRun, counter_text, single_values
from monitor.programs.program import Program
from monitor.transcript import Leaf, Manifest
from monitor.transcript.data import agreement_digest
from monitor.transcript.layout import ORDER, SAMPLES
from monitor.transcript.listing import Leaves, batch_bytes
from monitor.transcript.metadata import Metadata

__all__ = ["Claim", "batch_most"]

_SHA256 = re.compile("[0-9a-f]{64}")
_SAMPLE_BYTES = 1 << 10
"""Of an opened sample, without its content: salt, header, and what base64 adds to them."""


class Results:
    """A party's list of what its run led to, step by step, as the referee sees it: two honest parties have the same.

    The log of steps that a head signs holds what honest parties do not share, such as salts and rounding logs. A
    referee therefore compares these lists. A root over the first entries is shown to be a prefix of the committed list,
    so the first entry about which two parties differ is found with O(log steps) hashes. Each leaf that the referee
    takes is compared with its entry. A party that commits to another list than its log gives has contradicted itself
    there.

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


class Claim(ThinRun):
    """Nothing of the run lies here.

    Attributes:
        party: who opens it, each answer checked against the head.
        data_digest: of its samples and their order (``agreement_digest``), where they are declared; else empty.
        finished: whether its head says that the run is over.
        last: the last step that is whole, so that the party can take it again; -1 where it has none.
        results: what all its steps led to.

    Args:
        name: of the party.
        key: under which the head is signed.

    Raises:
        EvidenceError: head or metadata are malformed, or contradict each other.
    """

    def __init__(self, name: str, remote: Remote, key: VerifyingKey, traffic: Traffic) -> None:
        self.name = name
        self.manifest_bytes, metadata, data = remote.claim()
        self.manifest = Manifest.open(self.manifest_bytes, key)
        self.metadata = Metadata.from_json(canonical.decode(metadata, most=limits.METADATA_BYTES))
        steps = self.manifest.steps
        declared = self.metadata.task
        self.declared = replace(declared, steps=max(steps, 0) if declared.length is None else declared.length)
        if self.metadata.run_id.hex() != self.manifest.run:
            raise EvidenceError("its head and its metadata belong to different runs")
        self.finished = self.manifest.finished
        if steps > self.declared.steps or (self.finished and steps != self.declared.steps):
            kind = "finished" if self.finished else "unfinished"
            raise EvidenceError(f"its {kind} run commits to {steps} steps, but {self.declared.steps} are declared")
        self.data_digest = _data_digest(data)
        self.last = steps if self.manifest.is_closing or not self.manifest.pending else max(steps - 1, -1)
        self._remote = remote
        self._absent: frozenset[str] = frozenset()
        self._programs: dict[str, Program] = {}
        self._opened: tuple[int, Mapping[str, Tensor]] = (-1, {})
        self.party = CheckedProver(
            name, remote, size=steps + 1, root=self.manifest.root, layout=self.layout, traffic=traffic
        )
        self.results = Results(self.party, remote, steps + 1)

    @property
    def data_set(self) -> str | None:
        """Which data it says that these are."""
        return self.metadata.data.get("set")

    def following(self, other: Claim) -> Remote:
        """This party, asked about another's run, which it takes again under that run's rounding logs."""
        return self._remote.following(hashlib.sha256(other.manifest_bytes).hexdigest())

    def leaf(self, step: int) -> Leaf:
        """The committed leaf of a step, which the list of results agrees with."""
        leaf = self.party.leaf(step)
        self.results.check(leaf)
        return leaf

    def load_steps(self) -> tuple[Leaves, MerkleTree]:
        """All leaves, which must have the root that the head signs; memory grows with their number."""
        every: list[bytes] = []
        while len(every) <= self.manifest.steps:
            every += self.party.asked(partial(self._remote.leaves, len(every)))
        tree = MerkleTree(every)
        if len(every) != self.manifest.steps + 1 or tree.root() != self.manifest.root:
            raise Failure(self.name, "its leaves do not have the root that it signed")
        return Leaves(lambda step: checked_leaf(every[step], step, self.layout), len(every)), tree

    def program(self, digest: str) -> Program:
        """A program, which has that digest; its large constants are known by theirs."""
        if digest not in self._programs:
            self._programs[digest] = self.party.asked(lambda: self._remote.program(digest))
        return self._programs[digest]

    def batch(self, step: int) -> Mapping[str, Tensor]:
        """The batch of a step, no longer than its program reads."""
        if self._opened[0] != step:
            execution = self.leaf(step).execution
            if execution is None:
                raise EvidenceError(f"step {step} has no batch")
            self._remote.most["batch"] = batch_most(self.program(execution.program))
            self._opened = (step, self.party.batch(step))
        return self._opened[1]

    def checkpoint(self, step: int) -> dict[str, Tensor]:
        """The initial state with zeros but for the optimizer's single values, each with its proof."""
        if step:
            raise CallerError(f"the state of step {step} is not asked for")
        if self.checked is None:
            opened = (
                (name, state_tensor([self.party], Allowance(), self.declared, 0, name))
                for name in single_values(self.declared)
            )
            self.checked = Checked(counters={name: counter_text(each.whole()) for name, each in opened})
        return super().checkpoint(step)


def batch_most(program: Program) -> int:
    """Bytes that an answer may have which opens a batch of a program, sample by sample or as one file."""
    rows = max((int(each["shape"][0]) for each in program.batch.values() if each["shape"]), default=1)
    return 2 * batch_bytes(program.batch) + rows * len(program.batch) * _SAMPLE_BYTES + (1 << 16)


def _data_digest(stated: object) -> str:
    """What a claim's digests of samples and order come to; EvidenceError where they are none."""
    digests: list[Any] = stated if isinstance(stated, list) else [None]
    if len(digests) not in (0, 2) or not all(isinstance(x, str) and _SHA256.fullmatch(x) for x in digests):
        raise EvidenceError("a claim's data are not two digests")
    return agreement_digest(dict(zip((SAMPLES, ORDER), digests, strict=True))) if digests else ""
