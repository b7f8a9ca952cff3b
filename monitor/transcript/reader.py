"""Reads a run folder, trusting nothing in it but what the lab's registered key signed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from firmware_sim import bounds
from firmware_sim.bounds import Bound
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import MerkleTree, SignedHead, VerifyingKey, canonical
from monitor.loops.declaration import Declaration
from monitor.loops.program import MAXIMUM_PROGRAMS, Program
from monitor.task import Task
from monitor.transcript import lengths
from monitor.transcript.batches import Batches, RecordedBatches, salt_commitment
from monitor.transcript.data import RunData
from monitor.transcript.layout import (
    CHIP_FILES,
    MANIFEST,
    METADATA,
    ORDER,
    SALT,
    SAMPLES,
    batch_path,
    checkpoint_path,
    chip_path,
    log_path,
    program_path,
    step_path,
)
from monitor.transcript.leaf import Leaf, decode_step
from monitor.transcript.manifest import Entry, Manifest
from monitor.transcript.metadata import Metadata
from monitor.transcript.state import decode_state, encode_state

__all__ = ["RunFolder", "decode_state", "encode_state"]


class RunFolder:
    """A run folder whose manifest is signed by the lab; every read checks length and digest.

    Nothing is parsed before its digest was checked, and no file runs code.
    """

    def __init__(self, folder: Path, key: VerifyingKey, *, manifest: str | None = None) -> None:
        """Open the folder.

        Args:
            manifest: SHA-256 in hex of the manifest that was verified before, if one was: what is read now must be it.

        Raises:
            CallerError: it is no folder.
            EvidenceError: anything wrong with its manifest.
        """
        if not folder.is_dir():
            raise CallerError(f"there is no run folder {folder}")
        self.folder = folder
        path = folder / MANIFEST
        if path.is_symlink() or not path.is_file():
            raise EvidenceError(f"{folder} holds no manifest")
        self.manifest_bytes = _read(path, bounds.MANIFEST_BYTES.check(path.stat().st_size))
        if manifest is not None:
            _require_same(self.manifest_bytes, manifest, folder)
        self.manifest = Manifest.open(self.manifest_bytes, key)
        self._key = key
        present = {name: entry for name, entry in self.manifest.pending.items() if (folder / name).exists()}
        self.files: dict[str, Entry] = {**self.manifest.files, **present}
        self._programs: dict[str, Program] = {}
        self.metadata = Metadata.from_json(
            canonical.decode(self.read(METADATA, bounds.METADATA_BYTES), most=bounds.METADATA_BYTES)
        )
        declared = self.metadata.task
        steps = max(self.manifest.steps, 0) if declared.length is None else declared.length
        if self.manifest.steps > steps:
            raise EvidenceError(f"the manifest counts {self.manifest.steps} steps of {steps}")
        if self.metadata.run_id.hex() != self.manifest.run:
            raise EvidenceError("the manifest belongs to another run than the metadata")
        lengths.check_lengths(declared, {**self.manifest.files, **self.manifest.pending})
        self.declared: Declaration = replace(declared, steps=steps)
        self.finished = self.manifest.finished

    @property
    def task(self) -> Task:
        """The preset's task that the run declares as its recipe; CallerError where it has none."""
        if self.declared.recipe is None:
            raise CallerError(f"{self.folder.name} records a loop of its own; this works on runs of presets")
        return self.declared.recipe

    @property
    def manifest_digest(self) -> str:
        """SHA-256 of the manifest in hex: it fixes every byte of the run."""
        return hashlib.sha256(self.manifest_bytes).hexdigest()

    def read(self, path: str, most: Bound | None = None) -> bytes:
        """Return a file's content; EvidenceError unless it is listed and has the listed length and digest.

        Args:
            most: bytes that it may have, where ``lengths`` has not checked that yet.
        """
        entry = self.files.get(path)
        if entry is None:
            raise EvidenceError(f"{path} is missing from the manifest")
        self._check_length(path, entry)
        if most is not None:
            most.check(entry.length)
        data = _read(self.folder / path, entry.length)
        if Entry.of(data) != entry:
            raise EvidenceError(f"{path} was altered: its digest is not the signed one")
        return data

    def _check_length(self, path: str, entry: Entry) -> None:
        target = self.folder / path
        if target.is_symlink() or not target.is_file():
            raise EvidenceError(f"{path} is missing")
        if target.stat().st_size != entry.length:
            raise EvidenceError(f"{path} has {target.stat().st_size} bytes, not {entry.length} as signed")

    def check_listing(self) -> int:
        """Check that the manifest lists what this run may hold, and that nothing else is there: no link, no device.

        Returns the number of files.
        """
        known = [*self.files, *self.manifest.pending]
        folders = {str(parent) for path in known for parent in PurePosixPath(path).parents}
        for path, is_folder in _walk(self.folder, ""):
            if is_folder:
                if path not in folders:
                    raise EvidenceError(f"folder {path!r} is not part of the run")
            elif path != MANIFEST and path not in self.files:
                raise EvidenceError(f"{path!r} is not listed in the manifest")
        expected = self._expected_files()
        for path in sorted(self.files):
            if path not in expected:
                raise EvidenceError(f"{path} is listed in the manifest, but is no part of this run")
        return len(self.files)

    def check_contents(self, unread: Collection[str] = ()) -> int:
        """Check length and digest of every listed file; return their number.

        Args:
            unread: files whose length is checked, but not their content, since nothing explains how long they are.
        """
        for path in sorted(self.files):
            if path in unread:
                self._check_length(path, self.files[path])
            else:
                self.read(path)
        return len(self.files)

    def _expected_files(self) -> set[str]:
        """Every path that a run of this declaration and these chips may hold after its last announced step."""
        last, every = self.manifest.steps, self.declared.checkpoint_every
        expected = {METADATA, SALT} | set(self.programs().values())
        if self.declared.recipe is None:
            expected |= {batch_path(step) for step in range(1, last + 1)}
        else:
            expected |= {SAMPLES, ORDER}
        expected |= {step_path(step) for step in range(last + 1)} | {log_path(step) for step in range(1, last + 1)}
        expected |= {checkpoint_path(step) for step in range(0, last + 1, every)}
        if last == self.declared.steps:
            expected.add(checkpoint_path(last))
            expected |= {chip_path(chip, name) for chip in self.metadata.chips for name in CHIP_FILES}
        return expected

    def programs(self) -> dict[str, str]:
        """Path of each program by its digest; EvidenceError if there are too many."""
        paths = {path.removeprefix("programs/").removesuffix(".json"): path for path in self.files}
        found = {digest: path for digest, path in paths.items() if path == program_path(digest)}
        if len(found) > MAXIMUM_PROGRAMS:
            raise EvidenceError(f"a run has at most {MAXIMUM_PROGRAMS} programs, not {len(found)}")
        return found

    def program(self, digest: str) -> Program:
        """Return a program; EvidenceError unless it is there and has that digest."""
        if digest not in self._programs:
            program = Program.decode(self.read(program_path(digest)))
            if program.digest != digest:
                raise EvidenceError(f"{program_path(digest)} holds another program")
            self._programs[digest] = program
        return self._programs[digest]

    @property
    def committed(self) -> int:
        """Number of the last step whose leaf is in the folder; -1 if not even the initial state is."""
        return self.manifest.steps if step_path(max(self.manifest.steps, 0)) in self.files else self.manifest.steps - 1

    def leaf(self, step: int) -> Leaf:
        """Return the leaf of a step, checked to be that step's."""
        leaf, _ = decode_step(self.read(step_path(step)), self.declared.shards)
        if leaf.step != step:
            raise EvidenceError(f"{step_path(step)} holds step {leaf.step}")
        return leaf

    def load_steps(self) -> tuple[list[Leaf], MerkleTree]:
        """Return all leaves 0 … committed and their log; EvidenceError unless each signed head matches."""
        tree = MerkleTree()
        leaves = []
        for step in range(self.committed + 1):
            leaf, head = decode_step(self.read(step_path(step)), self.declared.shards)
            if leaf.step != step:
                raise EvidenceError(f"{step_path(step)} holds step {leaf.step}")
            tree.append(leaf.encoded())
            signed = SignedHead.open(head, self._key, self.manifest.run)
            if signed.size != step + 1 or signed.root != tree.root():
                raise EvidenceError(f"the signed head of step {step} does not match the log of steps")
            leaves.append(leaf)
        return leaves, tree

    def batches(self) -> Batches:
        """Return D; EvidenceError unless it opens the commitment in M."""
        if self.declared.recipe is not None:
            return self.data()
        salt = self.read(SALT)
        if salt_commitment(salt) != self.metadata.data:
            raise EvidenceError("the salt key does not open the data commitment in the metadata")
        return RecordedBatches(self.read, salt)

    def data(self) -> RunData:
        """Return D of a preset's run; EvidenceError unless it opens the commitment in M."""
        data = RunData.from_files(self.read(SAMPLES), self.read(ORDER), self.read(SALT))
        if data.order.shape != (self.task.steps, self.task.batch_size):
            raise EvidenceError(f"{ORDER} does not hold {self.task.steps} batches of {self.task.batch_size}")
        if {**data.commitment(), "set": self.metadata.data.get("set")} != self.metadata.data:
            raise EvidenceError("the samples do not open the data commitment in the metadata")
        return data

    def rounding_log(self, step: int) -> bytes:
        """Return the rounding log of a step; EvidenceError unless its leaf commits to it."""
        return self.read(log_path(step))

    def checkpoint(self, step: int) -> dict[str, Tensor]:
        """Return the full state W_step."""
        path = checkpoint_path(step)
        with torch.no_grad():
            return decode_state(self.read(path), path)


def _require_same(found: bytes, verified: str, folder: Path) -> None:
    if hashlib.sha256(found).hexdigest() != verified:
        raise EvidenceError(f"{folder.name} holds another run than the one that was verified")


def _read(path: Path, length: int) -> bytes:
    """Content of a file of that length; of one that has grown, one byte more."""
    try:
        with path.open("rb") as file:
            return file.read(length + 1)
    except OSError as error:
        raise EvidenceError(f"cannot read {path}: {error.strerror}") from None


def _walk(folder: Path, prefix: str) -> Iterator[tuple[str, bool]]:
    """Paths below a folder, each before what is in it, so that an unknown folder is never entered."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda item: item.name):
            path = f"{prefix}{entry.name}"
            if entry.is_symlink() or not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
                raise EvidenceError(f"{path!r} is neither a file nor a folder")
            is_folder = entry.is_dir(follow_symlinks=False)
            yield path, is_folder
            if is_folder:
                yield from _walk(Path(entry.path), f"{path}/")
