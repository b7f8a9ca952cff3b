"""Reads the journal of a run: hashed once, then record by record, and never other bytes than those that were hashed."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from firmware_sim import limits
from firmware_sim.errors import Damaged, EvidenceError, foreign
from monitor.transcript.layout import JOURNAL
from monitor.transcript.manifest import Manifest, Record, decode_line

__all__ = ["Journal", "file_size", "is_within"]

_PAGE = 1 << 16
_KEPT = 4
"""Pages and records that are kept: those of a step and of its neighbours."""


class Journal:
    """The records that a manifest signed, the pending one last.

    Memory is 8 bytes a record and 32 a page of 64 KiB. A record is parsed when it is asked for, from pages that are
    hashed again: a write to the file meanwhile is noticed.

    Attributes:
        pending: the pending record, if there is one.
        hasher: SHA-256 over the journal without the pending record.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Hash it.

        Raises:
            Damaged: it is not what was signed, with perhaps a beginning of the pending record.
            EvidenceError: what was signed contradicts itself.
        """
        self._path, self._name = folder / JOURNAL, f"{folder.name}/{JOURNAL}"
        self.pending = manifest.next
        self._extent = manifest.journal
        self.hasher = hashlib.sha256()
        self._digests: list[bytes] = []
        self._pages: dict[int, bytes] = {}
        self._records: dict[int, Record] = {}
        self._ends = self._hash(manifest.pending)

    def __len__(self) -> int:
        """Number of records, the pending one among them."""
        return len(self._ends) + (self.pending is not None)

    def __iter__(self) -> Iterator[Record]:
        """All records, in the order of their commits."""
        return (self.record(index) for index in range(len(self)))

    def record(self, index: int) -> Record:
        """Parse a record; EvidenceError if the journal has none of that number."""
        if not 0 <= index < len(self):
            raise EvidenceError(f"{JOURNAL} has no record {index}")
        if self.pending is not None and index == len(self._ends):
            return self.pending
        if index not in self._records:
            self._records[index] = decode_line(self._line(index))
            _keep_newest(self._records)
        return self._records[index]

    def find(self, text: bytes) -> list[int]:
        """Numbers of the records that hold a text shorter than a page, in order; the pending one is left out."""
        found: set[int] = set()
        before = b""
        for number in range(len(self._digests)):
            seen = before + self._page(number)
            start, at = number * _PAGE - len(before), seen.find(text)
            while at >= 0:
                record = int(np.searchsorted(self._ends, start + at, side="right"))
                found.add(record)
                at = seen.find(text, max(at + 1, int(self._ends[record]) - start))
            before = seen[len(seen) - len(text) + 1 :]
        return sorted(found)

    def _hash(self, pending: bytes) -> npt.NDArray[np.int64]:
        """Offsets at which the records end."""
        extent = self._extent
        ends = []
        found = offset = 0
        size = file_size(self._path.parent, JOURNAL)
        if size is None:
            raise Damaged(f"{JOURNAL} is missing")
        if not extent.bytes <= size <= extent.bytes + len(pending):
            raise Damaged(f"{JOURNAL} has {size} bytes, not {extent.bytes} as signed")
        with foreign(self._name, Damaged), self._path.open("rb") as file:
            while offset < extent.bytes:
                page = file.read(min(_PAGE, extent.bytes - offset))
                if not page:
                    raise Damaged(f"{JOURNAL} was altered while it was read")
                self.hasher.update(page)
                self._digests.append(hashlib.sha256(page).digest())
                lines = np.flatnonzero(np.frombuffer(page, np.uint8) == ord("\n")) + (offset + 1)
                found += len(lines)
                if found <= extent.records:  # of more, no more is kept
                    ends.append(lines)
                offset += len(page)
            tail = file.read(len(pending) + 1)
        if self.hasher.hexdigest() != extent.sha256:
            raise Damaged(f"{JOURNAL} was altered: its digest is not the signed one")
        if tail != pending[: len(tail)]:
            raise Damaged(f"the next record of {JOURNAL} is not the announced one")
        whole = np.concatenate([np.zeros(0, np.int64), *ends])
        if found != extent.records or (found and whole[-1] != extent.bytes):
            raise EvidenceError(f"{JOURNAL} has {found} records, not {extent.records} as signed")
        return whole

    def _line(self, index: int) -> bytes:
        start, end = int(self._ends[index - 1]) if index else 0, int(self._ends[index])
        limits.RECORD_BYTES.check(end - start)
        first, last = start // _PAGE, (end - 1) // _PAGE
        data = b"".join(self._page(number) for number in range(first, last + 1))
        return data[start - first * _PAGE : end - first * _PAGE]

    def _page(self, number: int) -> bytes:
        if number not in self._pages:
            offset = number * _PAGE
            with foreign(self._name, Damaged), self._path.open("rb") as file:
                file.seek(offset)
                page = file.read(min(_PAGE, self._extent.bytes - offset))
            if hashlib.sha256(page).digest() != self._digests[number]:
                raise Damaged(f"{JOURNAL} was altered while it was read")
            self._pages[number] = page
            _keep_newest(self._pages)
        return self._pages[number]


def file_size(folder: Path, path: str) -> int | None:
    """Bytes of a file of a folder; None where there is none, or a link out of the folder.

    Raises:
        Unreadable: it cannot be determined.
    """
    try:
        with foreign(f"{folder.name}/{path}"):
            found = os.lstat(folder / path)
            if stat.S_ISLNK(found.st_mode) and is_within(folder, path):
                found = os.stat(folder / path)
    except EvidenceError:
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def is_within(folder: Path, path: str) -> bool:
    """Whether what a path leads to lies in the folder, whatever links are on the way."""
    return Path(os.path.realpath(folder / path)).is_relative_to(os.path.realpath(folder))


def _keep_newest(cache: dict[int, Any]) -> None:
    while len(cache) > _KEPT:
        del cache[next(iter(cache))]
