"""What a replay cluster signs of the files that an inspectorate is not shown: guards and steps, without free text."""

from __future__ import annotations

from dataclasses import dataclass

from firmware_sim.evidence import SigningKey, VerifyingKey, open_sealed, seal
from inspector.bundle.clusters import head_and_predicate, of_cluster, statement_about
from inspector.inspection.disclosure import Checked
from inspector.inspection.trust import Trust

__all__ = ["CHECK", "SignedCheck", "signed_check"]

CHECK = "application/vnd.chipwitness.check.v1+json"
"""DSSE payload type of what a cluster finds of a run's states, samples and rounding logs."""
_PREDICATE = "https://chipwitness.org/check/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedCheck:
    """What a cluster says of the run with this head (SHA-256, in hex)."""

    head: str
    checked: Checked

    def sign(self, key: SigningKey) -> bytes:
        """The envelope under the cluster's key."""
        return seal(CHECK, statement_about(self.head, _PREDICATE, self.checked.to_json()), key)

    @classmethod
    def open(cls, envelope: bytes, key: VerifyingKey) -> SignedCheck:
        """Verify and parse; EvidenceError on another signature or form."""
        head, data = head_and_predicate(open_sealed(envelope, CHECK, key), _PREDICATE, "a cluster's check")
        return cls(head=head, checked=Checked.from_json(dict(data)))

    @property
    def text(self) -> str:
        """What fails, in words; empty where nothing does."""
        parts = [f"{guard}" + ("" if step is None else f" at step {step}") for guard, step in self.checked.found]
        return f"what the lab opened of its run fails the checks {', '.join(parts)}" if parts else ""


def signed_check(content: bytes, trust: Trust) -> tuple[VerifyingKey, SignedCheck]:
    """A check, and the known cluster that signed it; EvidenceError if none did."""
    return of_cluster(content, trust, SignedCheck.open, "a check")
