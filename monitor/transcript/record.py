"""One record of a run's journal: what one commit added to the run.

A record is a line: the leaf of its step (nothing where it is no step's), a tab, an object of the files, a newline. Both
are canonical JSON, which holds neither tabs nor newlines.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from firmware_sim import limits
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import canonical
from monitor.transcript.layout import is_allowed

__all__ = ["Entry", "Record", "decode_line", "read_entry"]

_SHA256 = re.compile("[0-9a-f]{64}")


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
class Record:
    """A step's leaf as its canonical bytes, empty where the record is no step's, and the files that came with it."""

    leaf: bytes = b""
    files: Mapping[str, Entry]

    def line(self) -> bytes:
        """The record's line in the journal; ``decode_line`` is the inverse."""
        files = canonical.encode({path: [entry.length, entry.sha256] for path, entry in self.files.items()})
        return b"%b\t%b\n" % (self.leaf, files)


def decode_line(line: bytes) -> Record:
    """Parse a record but for its leaf; EvidenceError on an unknown path or any other form."""
    limits.RECORD_BYTES.check(len(line))
    leaf, tab, rest = line.partition(b"\t")
    if not tab or not rest.endswith(b"\n"):
        raise EvidenceError("a record of the journal is malformed")
    data = canonical.decode(rest[:-1], most=limits.RECORD_BYTES)
    if not isinstance(data, dict):
        raise EvidenceError("a record's list of files is malformed")
    for path in data:
        if not is_allowed(path):
            raise EvidenceError(f"the journal lists {path!r:.200}, which no run folder holds")
    return Record(leaf=leaf, files={path: read_entry(path, value) for path, value in data.items()})


def read_entry(path: str, value: object) -> Entry:
    """Parse length and digest of a file; EvidenceError on any other form."""
    if not isinstance(value, list) or len(value) != 2:
        raise EvidenceError(f"the entry of {path!a:.200} is malformed")
    length, sha256 = value
    if type(length) is not int or length < 0 or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise EvidenceError(f"the entry of {path!a:.200} is malformed")
    return Entry(length, sha256)
