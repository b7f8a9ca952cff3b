"""The signed manifest: the head of a run's journal, which holds length and digest of every other file.

The manifest is replaced atomically by each commit. It says how long the journal is and what its digest is, and holds,
as *pending*, the record that comes next. That record is then added to the journal and its files are moved in; the next
manifest counts it. So at any moment a killed run is a valid, unfinished run: the journal is what was signed, and
perhaps a beginning of the pending record; each listed file is whole, and a pending one is whole or absent.

One record of a run's journal: what one commit added to the run.

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
from firmware_sim.evidence import EMPTY_ROOT, SigningKey, VerifyingKey, canonical, open_sealed, seal
from firmware_sim.evidence.envelope import is_sealed
from monitor.transcript.layout import MAXIMUM_STEP, is_allowed

__all__ = ["PAYLOAD_TYPE", "Entry", "Extent", "Manifest", "Record", "decode_line", "read_entry"]


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


PAYLOAD_TYPE = "application/vnd.chipwitness.manifest+json"
_SHA256 = re.compile("[0-9a-f]{64}")
_KEYS = {"run", "finished", "steps", "root", "journal", "pending"}
_JOURNAL_KEYS = {"records", "files", "bytes", "sha256"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How far the journal goes: its records, the files that they list, its bytes and their SHA-256 in hex."""

    records: int
    files: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The signed head of a run folder after ``steps`` committed steps (-1 before the initial state).

    Attributes:
        root: RFC 9162 root of the log of all steps, the pending one among them.
        journal: the journal without the pending record.
        pending: line of the record that comes next; empty if none does.
    """

    run: str
    finished: bool = False
    steps: int = -1
    root: bytes = EMPTY_ROOT
    journal: Extent
    pending: bytes = b""

    @property
    def next(self) -> Record | None:
        """The pending record; EvidenceError if it is malformed."""
        return decode_line(self.pending) if self.pending else None

    @property
    def is_closing(self) -> bool:
        """Tell whether the chips have been quoted: then the run is closed, or only needs to be."""
        return self.finished or self.pending.startswith(b"\t")

    def seal(self, key: SigningKey) -> bytes:
        """Sign the manifest with the lab's key."""
        journal = self.journal
        payload = {
            "run": self.run,
            "finished": self.finished,
            "steps": self.steps,
            "root": self.root.hex(),
            "journal": {
                "records": journal.records,
                "files": journal.files,
                "bytes": journal.bytes,
                "sha256": journal.sha256,
            },
            "pending": self.pending.decode().removesuffix("\n"),
        }
        return seal(PAYLOAD_TYPE, payload, key)

    @staticmethod
    def is_signed(data: bytes, key: VerifyingKey) -> bool:
        """Tell whether that key has signed this, whatever it says."""
        return is_sealed(data, PAYLOAD_TYPE, key, most=limits.MANIFEST_BYTES)

    @classmethod
    def open(cls, data: bytes, key: VerifyingKey) -> Manifest:
        """Verify and parse; EvidenceError on a wrong signature or any other form."""
        payload = open_sealed(data, PAYLOAD_TYPE, key, most=limits.MANIFEST_BYTES)
        if not isinstance(payload, dict) or set(payload) != _KEYS:
            raise EvidenceError("the manifest has missing or extra keys")
        if not isinstance(payload["run"], str) or type(payload["finished"]) is not bool:
            raise EvidenceError("the manifest's run or finished field is malformed")
        if type(payload["steps"]) is not int or not -1 <= payload["steps"] <= MAXIMUM_STEP:
            raise EvidenceError("the manifest's number of steps is malformed")
        root, pending = payload["root"], payload["pending"]
        if not _is_sha256(root) or not isinstance(pending, str) or (payload["finished"] and pending):
            raise EvidenceError("the manifest's root or pending record is malformed")
        manifest = cls(
            run=payload["run"],
            finished=payload["finished"],
            steps=payload["steps"],
            root=bytes.fromhex(root),
            journal=_extent(payload["journal"]),
            pending=pending.encode() + b"\n" if pending else b"",
        )
        _check_records(manifest)
        return manifest


def _check_records(manifest: Manifest) -> None:
    """EvidenceError unless each step has its record; readers take one turn for each step."""
    announced = bool(manifest.pending) and not manifest.is_closing
    needed = manifest.steps + 2 + manifest.finished - announced
    if manifest.journal.records != needed:
        raise EvidenceError(
            f"the manifest gives {manifest.steps} steps, which take {needed} records, but its journal has "
            f"{manifest.journal.records}"
        )


def _extent(data: object) -> Extent:
    if not isinstance(data, dict) or set(data) != _JOURNAL_KEYS or not _is_sha256(data["sha256"]):
        raise EvidenceError("the manifest's account of the journal is malformed")
    for name in ("records", "files", "bytes"):
        if type(data[name]) is not int or data[name] < 0:
            raise EvidenceError(f"the manifest's {name} of the journal is not a count")
    limits.JOURNAL_BYTES.check(data["bytes"])
    limits.JOURNAL_RECORDS.check(data["records"])
    limits.JOURNAL_FILES.check(data["files"])
    return Extent(records=data["records"], files=data["files"], bytes=data["bytes"], sha256=data["sha256"])


def _is_sha256(text: object) -> bool:
    return isinstance(text, str) and _SHA256.fullmatch(text) is not None
