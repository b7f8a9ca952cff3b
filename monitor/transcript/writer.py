"""Writes a run folder so that it is a valid unfinished run at every moment."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import MerkleTree, SignedHead, SigningKey, canonical
from monitor.transcript.layout import MANIFEST, METADATA, ORDER, SALT, SAMPLES, step_path
from monitor.transcript.leaf import Leaf, encode_step
from monitor.transcript.manifest import Entry, Manifest

__all__ = ["TranscriptWriter"]


class TranscriptWriter:
    """Appends steps to a run folder.

    Files are first written under ``staging`` (outside the run folder, same file system), then announced as pending by
    the manifest, then moved in. Whatever the manifest announced can be moved in again after a crash.

    Attributes:
        tree: RFC 9162 log of all leaves so far.
    """

    def __init__(self, folder: Path, staging: Path, key: SigningKey, manifest: Manifest, tree: MerkleTree) -> None:
        self.folder = folder
        self.tree = tree
        self._staging = staging
        self._key = key
        self._manifest = manifest

    @classmethod
    def create(
        cls, folder: Path, staging: Path, key: SigningKey, *, run: str, metadata: object, data: Mapping[str, bytes]
    ) -> TranscriptWriter:
        """Make the run folder with M and D in one atomic step; CallerError if the folder exists already."""
        if folder.exists():
            raise CallerError(f"{folder} exists already; choose another --out or resume it")
        if set(data) not in ({SAMPLES, ORDER, SALT}, {SALT}):
            raise ValueError("data must hold samples, order and salt, or the salt of the batches to come")
        files = {METADATA: canonical.encode(metadata), **data}
        manifest = Manifest(run=run, files={path: Entry.of(content) for path, content in files.items()})
        draft = staging / "new-run"
        shutil.rmtree(draft, ignore_errors=True)
        for path, content in files.items():
            _write(draft / path, content)
        _write(draft / MANIFEST, manifest.seal(key))
        os.replace(draft, folder)
        return cls(folder, staging, key, manifest, MerkleTree())

    @classmethod
    def reopen(cls, folder: Path, staging: Path, key: SigningKey) -> TranscriptWriter:
        """Open an unfinished run after a crash, moving in what the manifest had announced.

        Raises:
            CallerError: the run is finished.
            EvidenceError: the manifest, or a file that it announced, is not there.
        """
        try:
            sealed = (folder / MANIFEST).read_bytes()
        except OSError as error:
            raise EvidenceError(f"cannot read the manifest of {folder}: {error.strerror}") from None
        manifest = Manifest.open(sealed, key.verifying)
        if manifest.finished:
            raise CallerError(f"{folder} is finished; there is nothing to resume")
        writer = cls(folder, staging, key, manifest, MerkleTree())
        for path, entry in manifest.pending.items():
            if not (folder / path).exists():
                staged = staging / path
                if not staged.exists() or Entry.of(staged.read_bytes()) != entry:
                    raise EvidenceError(f"{path} was announced but is neither in the run nor staged")
                writer._move(path)
        return writer

    @property
    def steps(self) -> int:
        """Number of the last committed step; -1 before the initial state."""
        return self._manifest.steps

    @property
    def holds_chip_evidence(self) -> bool:
        """Tell whether the chips have been quoted already: then the run only needs to be closed."""
        return any(path.startswith("chips/") for path in (*self._manifest.files, *self._manifest.pending))

    def append(self, leaf: Leaf, files: Mapping[str, bytes]) -> bytes:
        """Commit a step with its rounding log and checkpoint; return the root of the log with it, 32 bytes."""
        if leaf.step != self.steps + 1 or self.tree.size != leaf.step:
            raise ValueError(f"step {leaf.step} does not follow step {self.steps}")
        self.tree.append(leaf.encoded())
        root = self.tree.root()
        head = SignedHead(origin=self._manifest.run, size=self.tree.size, root=root).sign(self._key)
        self._publish({**files, step_path(leaf.step): encode_step(leaf, head)}, steps=leaf.step)
        return root

    def finish(self, files: Mapping[str, bytes]) -> None:
        """Add the chips' evidence and close the run."""
        self._publish(files, steps=self.steps)
        self._manifest = self._manifest.close()
        self._replace_manifest()
        shutil.rmtree(self._staging, ignore_errors=True)

    def _publish(self, files: Mapping[str, bytes], *, steps: int) -> None:
        known = {**self._manifest.files, **self._manifest.pending}
        for path, content in files.items():
            if path in known and known[path] != Entry.of(content):
                raise ValueError(f"{path} is written already, with other content")
        new = {path: content for path, content in files.items() if path not in known}
        for path, content in new.items():
            _write(self._staging / path, content)
        self._manifest = self._manifest.announce(
            {path: Entry.of(content) for path, content in new.items()}, steps=steps
        )
        self._replace_manifest()
        for path in new:
            self._move(path)

    def _move(self, path: str) -> None:
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(self._staging / path, target)

    def _replace_manifest(self) -> None:
        staged = self._staging / MANIFEST
        _write(staged, self._manifest.seal(self._key))
        os.replace(staged, self.folder / MANIFEST)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
