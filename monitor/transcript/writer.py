"""Writes a run folder so that it is a valid unfinished run at every moment."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import MerkleTree, SigningKey, canonical
from monitor.files import Files, Replaced
from monitor.transcript.journal import Journal
from monitor.transcript.layout import (
    JOURNAL,
    MANIFEST,
    METADATA,
    ORDER,
    SALT,
    SAMPLES,
    program_of,
    record_of,
    step_record,
)
from monitor.transcript.leaf import Leaf
from monitor.transcript.manifest import Entry, Extent, Manifest, Record
from monitor.transcript.write_ahead import Ahead, Staged

__all__ = ["TranscriptWriter"]


class TranscriptWriter:
    """Appends steps to a run folder, each at the same cost.

    Files are first written under ``staging`` (outside the run folder, same file system), then announced by a manifest
    that holds the pending record, which is then added to the journal; at last the files are moved in. Whatever the
    manifest announced can be added and moved in again after a crash.

    With ``files.sync``, each of these is on the medium before the next begins: then the same is true of a power loss,
    but that it may leave anything in the place of the pending record, which is added anew.

    Attributes:
        tree: RFC 9162 log of all leaves so far.
    """

    def __init__(
        self,
        folder: Path,
        staging: Path,
        key: SigningKey,
        manifest: Manifest,
        journal: Journal,
        tree: MerkleTree,
        files: Files,
    ) -> None:
        self.folder = folder
        self.tree = tree
        self._staging = staging
        self._files = files
        self._heads = Replaced(folder / MANIFEST, staging, files)
        self._key = key
        self._manifest = manifest
        self._next = manifest.next
        self._hasher = journal.hasher.copy()
        self._programs = {path for index in journal.find(b'"programs/') for path in _programs(journal.record(index))}
        if self._next is not None:
            self._programs |= _programs(self._next)

    @classmethod
    def create(
        cls,
        folder: Path,
        staging: Path,
        key: SigningKey,
        *,
        run: str,
        metadata: object,
        data: Mapping[str, bytes],
        files: Files | None = None,
    ) -> TranscriptWriter:
        """Make the run folder with M and D in one atomic step; CallerError if the folder exists already."""
        disk = files or Files()
        if folder.exists():
            raise CallerError(f"{folder} exists already; choose another --out or resume it")
        if set(data) not in ({SAMPLES, ORDER, SALT}, {SALT}):
            raise ValueError("data must hold samples, order and salt, or the salt of the batches to come")
        first = {METADATA: canonical.encode(metadata), **data}
        line = Record(files={path: Entry.of(content) for path, content in first.items()}).line()
        extent = Extent(records=1, files=len(first), bytes=len(line), sha256=Entry.of(line).sha256)
        manifest = Manifest(run=run, journal=extent)
        draft = staging / "new-run"
        shutil.rmtree(draft, ignore_errors=True)
        for path, content in {**first, JOURNAL: line, MANIFEST: manifest.seal(key)}.items():
            disk.write(str(draft / path), content)
        disk.flush(draft, first)
        disk.move(str(draft), str(folder))
        disk.flush(folder.absolute().parent)
        return cls(folder, staging, key, manifest, Journal(folder, manifest), MerkleTree(), disk)

    @classmethod
    def reopen(cls, folder: Path, staging: Path, key: SigningKey, *, files: Files | None = None) -> TranscriptWriter:
        """Open an unfinished run after a crash, adding and moving in what the manifest had announced.

        The caller appends the leaves of the committed steps to ``tree``.

        Raises:
            CallerError: the run is finished.
            EvidenceError: the manifest, the journal or a file that was announced is not there.
        """
        try:
            manifest = Manifest.open((folder / MANIFEST).read_bytes(), key.verifying)
        except (OSError, EvidenceError) as error:
            what = error.strerror if isinstance(error, OSError) else error
            raise EvidenceError(f"cannot read the manifest of {folder}: {what}") from None
        if manifest.finished:
            raise CallerError(f"{folder} is finished; there is nothing to resume")
        _cut_pending(folder / JOURNAL, manifest)
        disk = files or Files()
        writer = cls(folder, staging, key, manifest, Journal(folder, manifest), MerkleTree(), disk)
        writer._append()
        listed = {} if writer._next is None else writer._next.files
        stored = {path: entry for path, entry in listed.items() if entry.length}
        for path, entry in stored.items():
            if not (folder / path).exists():
                staged = staging / path
                if not staged.exists() or Entry.of(staged.read_bytes()) != entry:
                    raise EvidenceError(f"{path} was announced but is neither in the run nor staged")
                writer._move(path)
        disk.flush(folder, stored)
        return writer

    @property
    def steps(self) -> int:
        """Number of the last committed step; -1 before the initial state."""
        return self._manifest.steps

    @property
    def holds_chip_evidence(self) -> bool:
        """Tell whether the chips have been quoted already: then the run only needs to be closed."""
        return self._manifest.is_closing

    def ahead(self, path: str, pieces: Callable[[], Sequence[memoryview]]) -> Ahead:
        """Begin to write a file that comes with the next step; ``append`` takes what its ``staged`` returns."""
        return Ahead(self._files, f"{self._staging}/{path}", pieces)

    def append(self, leaf: Leaf, files: Mapping[str, bytes | Staged], *, heard: bytes | None = None) -> bytes:
        """Commit a step with its files and the checkpoint before it; return the root of the log with it, 32 bytes.

        Args:
            heard: what that root has to be, where chips have heard of the step. Otherwise nothing is written.

        Raises:
            CallerError: it is another one; the writer is of no more use then.
        """
        if leaf.step != self.steps + 1 or self.tree.size != leaf.step:
            raise ValueError(f"step {leaf.step} does not follow step {self.steps}")
        for path in files:
            if record_of(path) != step_record(leaf.step) and program_of(path) is None:
                raise ValueError(f"{path} does not come with step {leaf.step}")
            if path in self._programs:
                raise ValueError(f"{path} is written already")
        encoded = leaf.encoded()
        self.tree.append(encoded)
        root = self.tree.root()
        if heard is not None and root != heard:
            raise CallerError(
                f"step {leaf.step} is not the one that the chips heard of before the crash; a run that lost steps can "
                "only go on by taking the same steps again"
            )
        self._publish(encoded, files, steps=leaf.step, root=root)
        self._programs.update(path for path in files if program_of(path) is not None)
        return root

    def finish(self, files: Mapping[str, bytes | Staged]) -> None:
        """Add the chips' evidence and close the run.

        Args:
            files: nothing, if ``holds_chip_evidence``.
        """
        if not self.holds_chip_evidence:
            self._publish(b"", files, steps=self.steps, root=self._manifest.root)
        elif files:
            raise ValueError("the chips' evidence is in the run already")
        self._announce(None, steps=self.steps, root=self._manifest.root)
        shutil.rmtree(self._staging, ignore_errors=True)

    def _publish(self, leaf: bytes, files: Mapping[str, bytes | Staged], *, steps: int, root: bytes) -> None:
        entries = {path: each.entry if isinstance(each, Staged) else Entry.of(each) for path, each in files.items()}
        record = Record(leaf=leaf, files=entries)
        stored = {path: content for path, content in files.items() if entries[path].length}
        for path, content in stored.items():
            if isinstance(content, Staged):
                self._files.move(content.path, f"{self._staging}/{path}")
            else:
                self._files.write(f"{self._staging}/{path}", content)
        self._files.flush(self._staging, stored)
        self._announce(record, steps=steps, root=root)
        self._append()
        for path in stored:
            self._move(path)
        self._files.flush(self.folder, stored)

    def _announce(self, record: Record | None, *, steps: int, root: bytes) -> None:
        """Count what was pending, and announce a record; the run is finished if there is none."""
        before, extent = self._manifest.pending, self._manifest.journal
        if self._next is not None:
            self._hasher.update(before)
            extent = Extent(
                records=extent.records + 1,
                files=extent.files + len(self._next.files),
                bytes=extent.bytes + len(before),
                sha256=self._hasher.hexdigest(),
            )
        self._next = record
        self._manifest = Manifest(
            run=self._manifest.run,
            finished=record is None,
            steps=steps,
            root=root,
            journal=extent,
            pending=b"" if record is None else record.line(),
        )
        self._heads.replace(self._manifest.seal(self._key))

    def _append(self) -> None:
        self._files.append(f"{self.folder}/{JOURNAL}", self._manifest.pending)

    def _move(self, path: str) -> None:
        self._files.move(f"{self._staging}/{path}", f"{self.folder}/{path}")


def _cut_pending(journal: Path, manifest: Manifest) -> None:
    """Take away what a process that died left in the place of the pending record; a power loss leaves anything."""
    signed = manifest.journal.bytes
    with suppress(FileNotFoundError):
        if signed < journal.stat().st_size <= signed + len(manifest.pending):
            os.truncate(journal, signed)


def _programs(record: Record) -> set[str]:
    return {path for path in record.files if program_of(path) is not None}
