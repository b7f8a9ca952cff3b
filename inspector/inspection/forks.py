"""A run has one history: whatever a lab hands over later must go on from the heads that it signed before."""

from __future__ import annotations

from collections.abc import Sequence

from firmware_sim.errors import CallerError, EvidenceError
from inspector.inspection.transcripts import Transcript
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Findings, Reason
from monitor.transcript.manifest import Manifest

__all__ = ["check_equivocation", "check_goes_on", "signer_of"]


def signer_of(head: bytes, trust: Trust) -> tuple[str, Manifest]:
    """The lab that signed a run's head, and the head opened; EvidenceError if no registered lab did."""
    for lab, key in trust.signers(head):
        try:
            return lab, Manifest.open(head, key)
        except EvidenceError:
            continue
    raise EvidenceError("one of the given heads is not signed by a registered lab")


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
            if not again and (earlier.finished or not transcript.has_root(earlier.steps + 1, earlier.root)):
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
