"""The signed manifest: length and digest of every file of a run folder.

Every other file is written once. The manifest is replaced atomically: first it announces the next files as *pending*,
then they are moved in, and the next manifest lists them for good. So at any moment a killed run is a valid, unfinished
run: each listed file is whole, and a pending one is whole or absent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from firmware_sim import bounds
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import SigningKey, VerifyingKey, open_sealed, seal
from monitor.transcript.layout import MAXIMUM_STEP, is_allowed

__all__ = ["Entry", "Manifest", "check_steps"]

PAYLOAD_TYPE = "application/vnd.chipwitness.manifest+json"
_SHA256 = re.compile("[0-9a-f]{64}")
_KEYS = {"run", "finished", "steps", "files", "pending"}


@dataclass(frozen=True, slots=True)
class Entry:
    """Length in bytes and SHA-256 (lower-case hex) of one file."""

    length: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Entry:
        """Return the entry of a file with that content."""
        return cls(len(data), hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a run folder holds after ``steps`` committed steps (-1 before the initial state)."""

    run: str
    finished: bool = False
    steps: int = -1
    files: Mapping[str, Entry] = field(default_factory=dict)
    pending: Mapping[str, Entry] = field(default_factory=dict)

    def announce(self, new: Mapping[str, Entry], *, steps: int) -> Manifest:
        """Return the next manifest: what was pending is firm, and ``new`` is pending."""
        return replace(self, steps=steps, files={**self.files, **self.pending}, pending=dict(new))

    def close(self) -> Manifest:
        """Return the final manifest, with nothing pending."""
        return replace(self, finished=True, files={**self.files, **self.pending}, pending={})

    def seal(self, key: SigningKey) -> bytes:
        """Sign the manifest with the lab's key."""
        payload = {
            "run": self.run,
            "finished": self.finished,
            "steps": self.steps,
            "files": {path: [entry.length, entry.sha256] for path, entry in self.files.items()},
            "pending": {path: [entry.length, entry.sha256] for path, entry in self.pending.items()},
        }
        return seal(PAYLOAD_TYPE, payload, key)

    @classmethod
    def open(cls, data: bytes, key: VerifyingKey) -> Manifest:
        """Verify and parse; EvidenceError on a wrong signature, an unknown path or any other form."""
        payload = open_sealed(data, PAYLOAD_TYPE, key, most=bounds.MANIFEST_BYTES)
        if not isinstance(payload, dict) or set(payload) != _KEYS:
            raise EvidenceError("the manifest has missing or extra keys")
        if not isinstance(payload["run"], str) or type(payload["finished"]) is not bool:
            raise EvidenceError("the manifest's run or finished field is malformed")
        if type(payload["steps"]) is not int or not -1 <= payload["steps"] <= MAXIMUM_STEP:
            raise EvidenceError("the manifest's number of steps is malformed")
        files, pending = _entries(payload["files"]), _entries(payload["pending"])
        if set(files) & set(pending) or (payload["finished"] and pending):
            raise EvidenceError("the manifest lists a file twice, or a finished run with pending files")
        check_steps(payload["steps"], len(files) + len(pending))
        return cls(
            run=payload["run"], finished=payload["finished"], steps=payload["steps"], files=files, pending=pending
        )


def check_steps(steps: int, files: int) -> None:
    """EvidenceError unless each of the steps can have a file; readers take one turn for each step."""
    if steps > files:
        raise EvidenceError(f"the manifest counts {steps} steps and lists {files} files")


def _entries(data: object) -> dict[str, Entry]:
    if not isinstance(data, dict):
        raise EvidenceError("the manifest's list of files is malformed")
    entries = {}
    for path, value in data.items():
        if not is_allowed(path):
            raise EvidenceError(f"the manifest lists {path!r:.200}, which no run folder holds")
        if not isinstance(value, list) or len(value) != 2:
            raise EvidenceError(f"the manifest's entry of {path} is malformed")
        length, sha256 = value
        if type(length) is not int or length < 0 or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
            raise EvidenceError(f"the manifest's entry of {path} is malformed")
        entries[path] = Entry(length, sha256)
    return entries
