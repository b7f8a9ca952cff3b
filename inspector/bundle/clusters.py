"""Whose word a cluster's result is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import SignatureError, VerifyingKey
from inspector.inspection.trust import Trust

__all__ = ["of_cluster"]

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
    raise EvidenceError(f"{what} is signed by no cluster that the trust file names")
