"""What a cluster signs is a statement about a lab's head; whose word it is, the key says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import SHA256, Digest, SignatureError, VerifyingKey, open_statement, statement
from inspector.inspection.trust import Trust

__all__ = ["head_and_predicate", "of_cluster", "statement_about"]

_SUBJECT = "head"

_Result = TypeVar("_Result")


def of_cluster(
    content: bytes, trust: Trust, read: Callable[[bytes, VerifyingKey], _Result], what: str
) -> tuple[VerifyingKey, _Result]:
    """A result as one of the known clusters signed it, and that cluster's key; EvidenceError if none did."""
    for key in trust.clusters:
        try:
            return key, read(content, key)
        except SignatureError:
            continue
    raise EvidenceError(f"{what} is not signed by any cluster in the trust file")


def statement_about(head: str, kind: str, predicate: Mapping[str, Any]) -> Mapping[str, object]:
    """The statement with this predicate about a head (SHA-256, in hex)."""
    return statement(kind, [(_SUBJECT, Digest(SHA256, bytes.fromhex(head)))], predicate)


def head_and_predicate(payload: object, kind: str, what: str) -> tuple[str, Mapping[str, Any]]:
    """What ``statement_about`` was given; EvidenceError on any other form."""
    subjects, data = open_statement(payload, kind)
    if len(subjects) != 1 or subjects[0][0] != _SUBJECT or subjects[0][1].algorithm != SHA256:
        raise EvidenceError(f"{what} does not have a head as its subject")
    return subjects[0][1].value.hex(), data
