"""The runs of a bundle: what their labs signed, and the steps that are opened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from firmware_sim import limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import canonical
from inspector.bundle.contents import Bundle
from inspector.bundle.steps import Opened
from inspector.inspection.history import are_forked
from inspector.inspection.trust import Trust, signer_of
from monitor.declaration.statement import Declaration
from monitor.transcript import Leaf
from monitor.transcript.manifest import Manifest
from monitor.transcript.metadata import Metadata

__all__ = ["HeldRun", "digest_in", "forks", "named", "runs_in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRun:
    """A run of the bundle: what its lab signed, and the steps that are opened (``inspection.history.History``).

    Attributes:
        head_digest: SHA-256, in hex, of the lab's head.
    """

    run_id: str
    lab: str
    head: Manifest
    head_digest: str
    metadata: Metadata
    declared: Declaration
    opened: Opened

    @property
    def name(self) -> str:
        """The run in words, whatever its folder was called."""
        return f"run {self.run_id[:16]}…"

    def leaf(self, step: int) -> Leaf:
        """The leaf of a step; EvidenceError where the bundle does not open it."""
        if step not in self.opened.leaves:
            raise EvidenceError(f"the bundle does not open step {step}")
        return self.opened.leaves[step]

    def has_root(self, size: int, root: bytes) -> bool | None:
        """Whether its first ``size`` leaves have this root; None where no proof shows theirs."""
        return self.opened.roots[size] == root if size in self.opened.roots else None

    def has_state(self, step: int, shard: int, digest: bytes) -> bool | None:
        """Whether a step left a state whose shard of this number has this digest; None where it is not opened."""
        leaf = self.opened.leaves.get(step)
        return None if leaf is None else leaf.state.shard(shard).value == digest


def named(bundle: Bundle, prefix: str) -> frozenset[bytes]:
    return frozenset(content for path, content in bundle.items.items() if path.startswith(prefix))


def runs_in(bundle: Bundle, trust: Trust) -> list[HeldRun]:
    """The runs whose steps are opened, each under the head that its lab signed."""
    found = []
    for path, content in bundle.items.items():
        if not path.endswith("/head.json"):
            continue
        run_id = path.split("/")[1]
        lab, head = signer_of(content, trust)
        if head.run != run_id:
            raise EvidenceError("a head belongs to another run")
        parts = [bundle.items.get(f"runs/{run_id}/{name}.json") for name in ("metadata", "steps")]
        if parts[0] is None or parts[1] is None:
            continue  # a run that could not be read
        metadata = Metadata.from_json(canonical.decode(parts[0], most=limits.METADATA_BYTES))
        if metadata.run_id.hex() != run_id or metadata.lab != lab:
            raise EvidenceError("a declaration belongs to another run, or another lab")
        length = max(head.steps, 0) if metadata.task.length is None else metadata.task.length
        declared = replace(metadata.task, steps=length)
        found.append(
            HeldRun(
                run_id=run_id,
                lab=lab,
                head=head,
                head_digest=digest_in(bundle, path),
                metadata=metadata,
                declared=declared,
                opened=Opened.read(parts[1], head, declared.layout),
            )
        )
    return found


def digest_in(bundle: Bundle, path: str) -> str:
    return str(bundle.predicate["items"][path])


def forks(bundle: Bundle, runs: Iterable[HeldRun], trust: Trust) -> list[str]:
    """Heads of one run that the lab signed and that contradict each other."""
    found = []
    known = {run.run_id: run for run in runs}
    for content in sorted(named(bundle, "heads/")):
        lab, other = signer_of(content, trust)
        run = known.get(other.run)
        if run is None or run.lab != lab:
            continue
        if are_forked(run, run.head, other):
            found.append(f"{lab} signed two heads of run {other.run} that contradict each other")
    return found
