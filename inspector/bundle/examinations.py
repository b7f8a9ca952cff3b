"""What a replay cluster signs of samples and weights: counts and scores, without free text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firmware_sim.errors import CallerError, DeviceError, EvidenceError
from firmware_sim.evidence import SigningKey, VerifyingKey, open_sealed, seal
from inspector.bundle.clusters import head_and_predicate, of_cluster, statement_about
from inspector.inspection.guards import Settings
from inspector.inspection.trust import Trust
from inspector.replay.result import MALFORMED
from inspector.rules.judgement import required_of
from inspector.rules.observations import Examined, examined_finding
from inspector.rules.quantities import Finding
from inspector.rules.rule_files import Rules
from inspector.rules.truth import Truth

__all__ = ["EXAMINATION", "SignedExamination", "check_rules", "sign_examination", "signed_examination"]

EXAMINATION = "application/vnd.chipwitness.examination.v2+json"
"""DSSE payload type of what a cluster found of a run's samples and weights."""
_PREDICATE = "https://chipwitness.org/examination/v2"
_KEYS = {"device", "readable", "examined"}
_SEEN = ("data", "score")
"""Kinds of rules that rest on the cluster's word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedExamination:
    """A cluster's result for one run on one device.

    Attributes:
        head: SHA-256, in hex, of the head that the lab signed.
        examined: None where the cluster could not read what it was handed.
    """

    head: str
    device: str
    examined: Examined | None

    def sign(self, key: SigningKey) -> bytes:
        """The envelope under the cluster's key."""
        found = None if self.examined is None else self.examined.to_json()
        predicate = {"device": self.device, "readable": found is not None, "examined": found}
        return seal(EXAMINATION, statement_about(self.head, _PREDICATE, predicate), key)

    @classmethod
    def open(cls, envelope: bytes, key: VerifyingKey) -> SignedExamination:
        """Verify and parse; EvidenceError on another signature or form."""
        head, data = head_and_predicate(open_sealed(envelope, EXAMINATION, key), _PREDICATE, "an examination")
        if set(data) != _KEYS or not isinstance(data["device"], str):
            raise EvidenceError("an examination has missing or extra keys")
        if data["readable"] is not (data["examined"] is not None):
            raise EvidenceError("an examination contradicts itself")
        examined = None if data["examined"] is None else Examined.from_json(data["examined"])
        return cls(head=head, device=data["device"], examined=examined)


def sign_examination(name: str, job: Mapping[str, Any], result: Mapping[str, Any], key: SigningKey) -> bytes:
    """Sign what a device returned for a job ``examine``; DeviceError if it returned something of another form."""
    try:
        found = None if "evidence_error" in result else Examined.from_json(result.get("examined"))
        return SignedExamination(head=job["manifest"], device=name, examined=found).sign(key)
    except (CallerError, *MALFORMED) as error:
        raise DeviceError(f"device {name} gave a malformed answer: {error}") from None


def signed_examination(content: bytes, trust: Trust) -> tuple[VerifyingKey, SignedExamination]:
    """An examination, and the known cluster that signed it; EvidenceError if none did."""
    return of_cluster(content, trust, SignedExamination.open, "an examination")


def check_rules(
    stated: Mapping[str, Any],
    runs: Sequence[tuple[str, str, str]],
    examinations: Sequence[tuple[VerifyingKey, SignedExamination]],
    settings: Settings,
    *,
    accepts: bool,
) -> list[str]:
    """Judge the rules of a verdict again: what a cluster signed counts, and of all others the inspectorate's word.

    Args:
        stated: the verdict's evidence ``rules``.
        runs: id, lab and digest of the head of each run.
        accepts: the verdict is an ACCEPT.

    Returns:
        Grounds to reject that rest on a cluster's word alone.

    Raises:
        EvidenceError: the verdict accepts, and what the cluster signed does not meet the rules.
    """
    rules = Rules.from_json(stated)
    if rules.digest != stated["digest"]:
        raise EvidenceError("the rules that the verdict states do not have the digest that it gives")
    known = {(each.head, each.device): each.examined for _, each in examinations}
    seen: dict[str, list[Finding]] = {}
    labs = {lab for _, lab, _ in runs}
    for name, rule in rules.rules.items():
        devices = settings.devices if rule.kind == "score" else settings.devices[:1]
        for run, lab, head in runs if rule.kind in _SEEN else ():
            where = {"run": f"{run[:16]}…", "run_id": run, "lab": lab}
            for device in devices:
                found = known.get((head, device)) or "no cluster has examined it"
                seen.setdefault(name, []).append(examined_finding(rule, where, device, found))
    words = {name: [_as_stated(each) for each in found] for name, found in stated["found"].items()}
    unknown = [Finding(labs=tuple(labs), truth=Truth.UNDECIDED, text="", value=None, where={})]
    grounds = []
    for lab in sorted(labs):
        if accepts and required_of(rules.require, words | seen, lab) is not Truth.PASS:
            raise EvidenceError(f"the verdict accepts, although lab {lab} does not meet the rules")
        if required_of(rules.require, dict.fromkeys(rules.rules, unknown) | seen, lab) is Truth.FAIL:
            said = [each.text for found in seen.values() for each in found if lab in each.labs]
            by = ", ".join(sorted({key.key_id for key, _ in examinations}))
            text = f"lab {lab} does not meet the inspectorate's rules ({'; '.join(said)})"
            grounds.append(f"{text}: contested, rests on cluster key {by}")
    return grounds


def _as_stated(entry: Mapping[str, Any]) -> Finding:
    """A finding of the verdict's."""
    return Finding(labs=tuple(entry["labs"]), truth=Truth(entry["result"]), text="", value=None, where={})
