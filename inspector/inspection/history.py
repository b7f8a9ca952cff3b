"""A run has one history: what a lab signs later goes on from what it signed before, and nothing contradicts either.

An inspection holds all leaves of a run. Who checks its bundle holds those that the bundle opens. Both ask the same
questions of them; what is not shown contradicts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from firmware_sim import LogRecord
from firmware_sim.errors import CallerError, EvidenceError
from inspector.inspection.transcripts import Transcript
from inspector.inspection.trust import Trust, signer_of
from inspector.inspection.verdict import Findings, Reason
from monitor.transcript.manifest import Manifest

__all__ = ["History", "are_forked", "check_equivocation", "check_goes_on", "other_root", "other_state"]


class History(Protocol):
    """The leaves and heads that a lab signed of a run."""

    def has_root(self, size: int, root: bytes) -> bool | None:
        """Whether its first ``size`` leaves have this root; None where that is not shown."""

    def has_state(self, step: int, shard: int, digest: bytes) -> bool | None:
        """Whether a step left a state whose shard of this number has this digest; None where that is not shown."""


def are_forked(history: History, head: Manifest, other: Manifest) -> bool:
    """Whether another head cannot be one of the same run, whichever of the two was signed first.

    A finished run goes on no more, and has one last head. The same head again is no other.

    Args:
        head: of ``history``.
    """
    if head == other:
        return False
    ends = [each.steps for each in (head, other) if each.finished]
    if len(ends) == 2 or (ends and max(head.steps, other.steps) > ends[0]):
        return True
    return history.has_root(other.steps + 1, other.root) is False


def other_root(chip: str, record: LogRecord, history: History) -> str:
    """In words, that a chip heard of a step with another head than the lab's; empty where nothing shows that."""
    if history.has_root(record.step + 1, record.digest) is not False:
        return ""
    return f"chip {chip}, record {record.counter}: step {record.step} was committed with another log head"


def other_state(chip: str, record: LogRecord, step: int, shard: int, history: History) -> str:
    """In words, that a chip's snapshot is not of the state after a step; empty where nothing shows that."""
    if history.has_state(step, shard, record.digest) is not False:
        return ""
    text = f"chip {chip}, record {record.counter}: the snapshot claimed for step {step} is not shard {shard} of any "
    return f"{text}declared state at that step"


def check_goes_on(
    transcripts: Sequence[Transcript], heads: Sequence[bytes], trust: Trust, findings: Findings
) -> list[dict[str, str]]:
    """Each run goes on from every head of its id that its lab signed; otherwise both heads convict the lab.

    After a finished head nothing may change.

    Returns:
        For each contradiction: ``run_id``, and both heads as their envelopes' text.

    Raises:
        CallerError: a head is none that a registered lab signed.
    """
    forks = []
    for head in heads:
        try:
            lab, earlier = signer_of(head, trust)
        except EvidenceError as error:
            raise CallerError(f"an earlier head cannot be used: {error}") from None
        for transcript in transcripts:
            run = transcript.run
            if (run.manifest.run, run.metadata.lab) != (earlier.run, lab):
                continue
            again = run.manifest_bytes == head
            if not again and (earlier.finished or are_forked(transcript, run.manifest, earlier)):
                text = f"{run.name} does not continue from step {earlier.steps} as {lab} signed it earlier: one run"
                text += " has two histories"
                where = {**run.where, "step": earlier.steps}
                findings.found.append(Reason(guard="evidence", text=text, where=where))
                forks.append({"run_id": earlier.run, "earlier": head.decode(), "now": run.manifest_bytes.decode()})
    return forks


def check_equivocation(transcripts: Sequence[Transcript], findings: Findings) -> None:
    """One run has one transcript: two logs of one run id that differ prove by themselves that the lab lied."""
    seen: dict[str, Transcript] = {}
    for transcript in transcripts:
        run = transcript.run
        other = seen.setdefault(run.manifest.run, transcript)
        if other is transcript:
            continue
        if other.run.manifest_bytes == run.manifest_bytes:
            raise CallerError(f"{run.folder} was given twice")
        text = f"{other.run.name} and {run.name} are two transcripts of one run"
        findings.found.append(Reason(guard="evidence", text=text, where=run.where))
