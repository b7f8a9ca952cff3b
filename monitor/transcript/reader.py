"""Reads a run folder, trusting nothing in it but what the lab's registered key signed."""

from __future__ import annotations

import hashlib
import heapq
import os
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from firmware_sim import limits
from firmware_sim.errors import CallerError, Damaged, EvidenceError, Unreadable, foreign
from firmware_sim.evidence import MerkleTree, VerifyingKey, canonical
from firmware_sim.limits import Limit
from monitor.declaration.statement import Declaration
from monitor.presets.task import Task
from monitor.programs.program import Program, read_program
from monitor.sharding import Layout
from monitor.transcript.batches import Batches, RecordedBatches, salt_commitment
from monitor.transcript.data import RunData
from monitor.transcript.journal import Journal, file_size, is_within
from monitor.transcript.layout import (
    CHIP_CHECKPOINT,
    CHIP_FILES,
    CREATION,
    JOURNAL,
    MANIFEST,
    METADATA,
    ORDER,
    SALT,
    SAMPLES,
    batch_path,
    checkpoint_path,
    chip_path,
    constants_path,
    log_path,
    program_of,
    program_path,
    step_of,
    step_record,
)
from monitor.transcript.leaf import Leaf
from monitor.transcript.listing import Leaves, Listing, check_lengths
from monitor.transcript.manifest import Entry, Manifest
from monitor.transcript.metadata import Metadata
from monitor.transcript.state import decode_state, encode_state

__all__ = ["RunFolder", "decode_state", "encode_state", "entry_of", "read_manifest"]


_PIECE = 1 << 20
"""Bytes of a file that are read and hashed at a time."""
_SHOWN = 20
"""Names of ignored files that a verdict shows."""


class RunFolder:
    """A run folder whose manifest is signed by the lab; every read checks length and digest.

    Nothing is parsed before its digest was checked, and no file runs code.

    Attributes:
        name: by which messages call the run, its folder's; an inspection tells two equal ones apart. A run is known by
            its id and its lab (``where``).
        ignored: ``count`` of the files and folders there that are no part of the run and are not read, and the first
            ``names``, once ``check_listing`` has looked.
    """

    def __init__(
        self,
        folder: Path,
        key: VerifyingKey,
        *,
        manifest: str | None = None,
        opened: Collection[str] | None = None,
        handed: Mapping[str, Entry] | None = None,
    ) -> None:
        """Open the folder.

        Args:
            manifest: SHA-256 in hex of the manifest that was verified before, if one was: what is read now must be it.
            opened: files that are there, where the lab hands over a part of its run; None for all.
            handed: every file that the lab signed for when it handed over the run (``export``); None if it did not.

        Raises:
            CallerError: it is no folder.
            Damaged: manifest, journal or metadata are not there, or are not what was signed.
            EvidenceError: anything wrong with what was signed, or with what the lab signed that it handed over.
            Unreadable: it may not be read here, or is not finished: it changed while it was read.
        """
        if not folder.is_dir():
            raise CallerError(f"there is no run folder {folder}")
        self.folder = folder
        self.name = folder.name
        self.handed = handed
        self.ignored: dict[str, Any] = {"count": 0, "names": []}
        self.manifest_bytes = read_manifest(folder)
        if manifest is not None and hashlib.sha256(self.manifest_bytes).hexdigest() != manifest:
            raise Unreadable(
                f"{folder.name} has changed since it was verified: it holds a different run, or more of it"
            )
        self.manifest = Manifest.open(self.manifest_bytes, key)
        try:
            self.journal = Journal(folder, self.manifest)
        except Damaged as damage:
            raise self._whose(JOURNAL, damage.found) from None
        self._pending = {} if self.journal.pending is None else self.journal.pending.files
        self.opened = opened
        self._absent = frozenset(self._not_there() if opened is None else ())
        if gone := sorted(self._absent & (handed or {}).keys()):
            raise Damaged(f"{gone[0]} is missing")
        self._declared: Declaration | None = None
        self.files = Listing(self.journal, self.manifest.steps, self._is_absent, self._check_entry)
        self._programs: dict[str, Program] = {}
        self.metadata = Metadata.from_json(
            canonical.decode(self.read(METADATA, limits.METADATA_BYTES), most=limits.METADATA_BYTES)
        )
        self.declared = self._declared = self._of_manifest(self.metadata)
        self.finished = self.manifest.finished

    def _not_there(self) -> Iterator[str]:
        """Files of the pending record that have not come yet."""
        for path, entry in self._pending.items():
            if entry.length and not _is_there(self.folder, path):
                yield path

    def _of_manifest(self, metadata: Metadata) -> Declaration:
        """The declaration, with its number of steps; EvidenceError where manifest and metadata contradict."""
        declared, counted = metadata.task, self.manifest.steps
        steps = max(counted, 0) if declared.length is None else declared.length
        if counted > steps:
            raise EvidenceError(f"the manifest gives {counted} steps, but the run has {steps}")
        if metadata.run_id.hex() != self.manifest.run:
            raise EvidenceError("the manifest and the metadata belong to different runs")
        return replace(declared, steps=steps)

    def _check_entry(self, path: str, entry: Entry) -> None:
        """EvidenceError if a signed length is more than the declared task, once it is known, can explain."""
        if self._declared is not None:
            check_lengths(self._declared, {path: entry})

    @property
    def task(self) -> Task:
        """The preset's task that the run declares as its recipe; CallerError where it has none."""
        if self.declared.recipe is None:
            raise CallerError(f"{self.folder.name} is not a run of a preset, and only such a run can be used here")
        return self.declared.recipe

    @property
    def where(self) -> dict[str, str]:
        """What a finding about it is about: ``run`` for the eye, and by what it is known, ``run_id`` and ``lab``."""
        return {"run": self.name, "run_id": self.manifest.run, "lab": self.metadata.lab}

    @cached_property
    def layout(self) -> Layout:
        """Which blocks of the declared state lie on which chips."""
        return self.declared.layout

    @property
    def manifest_digest(self) -> str:
        """SHA-256 of the manifest in hex: through the journal, it fixes every byte of the run."""
        return hashlib.sha256(self.manifest_bytes).hexdigest()

    def read(self, path: str, most: Limit | None = None) -> bytes:
        """Return a file's content.

        Args:
            most: bytes that it may have, where ``check_lengths`` has not yet checked that.

        Raises:
            Damaged: it is not there, or has another length or digest than the listed one.
            EvidenceError: it is not listed, or its lab has signed that it handed it over like that.
            Unreadable: it may not be read here.
        """
        return b"".join(self._pieces(path, most))

    def _pieces(self, path: str, most: Limit | None = None) -> Iterator[bytes]:
        """A listed file in pieces; Damaged after the last unless length and digest are the listed ones."""
        entry = self.files.get(path)
        if entry is None:
            raise EvidenceError(f"{path} is missing from the journal")
        if most is not None:
            most.check(entry.length)
        self._check_length(path, entry)
        hasher, left = hashlib.sha256(), entry.length + 1
        if entry.length:
            with foreign(f"{self.folder.name}/{path}", Damaged), (self.folder / path).open("rb") as file:
                while piece := file.read(min(left, _PIECE)):
                    hasher.update(piece)
                    left -= len(piece)
                    yield piece
        if Entry(entry.length + 1 - left, hasher.hexdigest()) != entry:
            raise self._whose(path, f"{path} was altered: its digest is not the signed one")

    def _whose(self, path: str, found: str) -> EvidenceError | Unreadable:
        """What to raise of a file that is not as signed: its lab's fault only where that signed what lies here."""
        if read_manifest(self.folder) != self.manifest_bytes:
            return Unreadable(f"{self.name} is not finished: it changed while it was read; have its lab export it")
        if self.handed is not None and self.handed.get(path) == entry_of(self.folder, path):
            return EvidenceError(f"{found}, and its lab has signed that it handed it over so")
        return Damaged(found)

    def _check_length(self, path: str, entry: Entry) -> None:
        if not entry.length:
            return  # listed, and not stored
        size = file_size(self.folder, path)
        if size is None:
            raise self._whose(path, f"{path} is missing")
        if size != entry.length:
            raise self._whose(path, f"{path} has {size} bytes, not {entry.length} as signed")

    def _is_absent(self, path: str) -> bool:
        """A listed file that is announced and not there yet, or a checkpoint that was released."""
        return path in self._absent or self.is_released(path)

    def is_withheld(self, path: str) -> bool:
        """Tell whether that is a file which the lab was not asked for, and which is not read here."""
        return self.opened is not None and path not in self.opened

    def is_released(self, path: str) -> bool:
        """Tell whether that is a listed checkpoint which the declaration does not ask to keep, and which is gone."""
        step = step_of(path)
        if step is None or self._declared is None or path != checkpoint_path(step):
            return False
        is_due = self._declared.retains(step, self.committed)
        return not (is_due or _is_there(self.folder, path) or self.files.listed(path) is None)

    @cached_property
    def checkpoints(self) -> Sequence[int]:
        """Steps before the last committed one whose checkpoints have to be there, in order; 0 is always among them."""
        every = range(0, max(self.committed, 1), self.declared.checkpoint_every)
        return [step for step in every if self.declared.retains(step, self.committed)]

    def checkpoint_before(self, step: int) -> int:
        """The newest step before this one whose checkpoint has to be there; of the initial state, that step itself."""
        return self.checkpoints[max(bisect_left(self.checkpoints, step) - 1, 0)]

    def check_listing(self) -> int:
        """Check that the journal lists what this run may hold; what else is there is ``ignored``, and never opened.

        Returns the number of files.

        Raises:
            Damaged: a link leads out of the folder.
            EvidenceError: the journal lists something else, or the lab has signed for files that it does not list.
        """
        folders, count, firm = set(), 0, 0
        for index, record in enumerate(self.journal):
            check_lengths(self.declared, record.files)
            for path, entry in record.files.items():
                if self.files.record_of(path) != index or not self._is_expected(path, index):
                    raise EvidenceError(f"{path} is listed in the journal, but is not a file of this run")
                if entry.length:
                    folders |= {str(parent) for parent in PurePosixPath(path).parents}
            count += sum(not self._is_absent(path) for path in record.files)
            firm += 0 if record is self.journal.pending else len(record.files)
        if firm != self.manifest.journal.files:
            raise EvidenceError(f"the journal lists {firm} files, not {self.manifest.journal.files} as signed")
        folders.discard(".")
        for path in self.handed or ():
            if path not in (MANIFEST, JOURNAL) and self.files.listed(path) is None:
                raise EvidenceError(f"{path!a:.200} is not listed in the journal, although its lab has signed for it")
        for path in heapq.nsmallest(_SHOWN, self._unlisted(folders)):
            self.ignored["names"].append(f"{path!a:.100}")
        return count

    def _unlisted(self, folders: Collection[str]) -> Iterator[str]:
        """What lies in the run's folders and is no part of it; of another folder, no more than its name."""
        self.ignored = {"count": 0, "names": []}
        for place in ("", *sorted(folders)):
            if not is_within(self.folder, place):
                raise Damaged(f"{place} is a link that leads out of the run")
            if not (self.folder / place).is_dir():
                continue  # whose files are missing
            with foreign(f"{self.folder.name}/{place}".rstrip("/"), Damaged), os.scandir(self.folder / place) as found:
                for entry in found:
                    path = f"{place}/{entry.name}".lstrip("/")
                    if path not in folders and path not in (MANIFEST, JOURNAL):
                        listed = self.files.get(path)
                        if listed is None or not listed.length:
                            self.ignored["count"] += 1
                            yield path

    def check_contents(self, unread: Collection[str] = ()) -> int:
        """Check length and digest of every listed file that is not withheld; return their number.

        Args:
            unread: files whose length is checked, but not their content, since nothing explains how long they are.
        """
        count = 0
        for path in self.files:
            if self.is_withheld(path):
                continue
            if path in unread:
                self._check_length(path, self.files[path])
            else:
                deque(self._pieces(path), maxlen=0)
            count += 1
        return count

    def _is_expected(self, path: str, index: int) -> bool:
        """Tell whether a run of this declaration and these chips may hold a path in that record of its journal."""
        last, has_recipe = self.manifest.steps, self.declared.recipe is not None
        if index == CREATION:
            return path in ((METADATA, SALT, SAMPLES, ORDER) if has_recipe else (METADATA, SALT))
        step, at = index - step_record(0), step_of(path)
        if step > last:  # the run was closed
            return last == self.declared.steps and (path in self._chip_paths or path == checkpoint_path(last))
        if at is not None and path == checkpoint_path(at):
            return at % self.declared.checkpoint_every == 0
        begun = self.declared.origin.initialisation
        if (program := program_of(path)) is not None:
            return step > 0 or (begun is not None and program == begun.program)
        if step and path == log_path(step):
            return True
        return not has_recipe and step > 0 and path == batch_path(step)

    @cached_property
    def _chip_paths(self) -> frozenset[str]:
        names = (*CHIP_FILES, CHIP_CHECKPOINT)
        return frozenset(chip_path(chip, name) for chip in self.metadata.chips for name in names)

    def programs(self) -> dict[str, str]:
        """Path of each program by its digest; EvidenceError if there are too many, or too many bytes."""
        every = {str(program_of(path)): path for path in self.files.programs}
        programs = {digest: path for digest, path in every.items() if not self._absent & {path, constants_path(digest)}}
        both = [*programs.values(), *self.constants(programs).values()]
        check_lengths(self.declared, {path: self.files[path] for path in both})
        return programs

    def constants(self, programs: Iterable[str]) -> dict[str, str]:
        """Path of the constants of those of these programs, by their digests, of which the journal lists any."""
        paths = {digest: constants_path(digest) for digest in programs}
        return {digest: path for digest, path in paths.items() if path in self.files}

    @property
    def initialisation(self) -> Program | None:
        """The program that makes the initial state, if one is declared; EvidenceError if it is not there."""
        begun = self.declared.origin.initialisation
        return None if begun is None else self.program(begun.program)

    def is_pending(self, path: str) -> bool:
        """Tell whether a file came with the record that was announced last."""
        return path in self._pending

    def program(self, digest: str) -> Program:
        """Return a program; EvidenceError unless it is there with all its constants, and has that digest."""
        if digest not in self._programs:
            program = read_program(self.read(program_path(digest)))
            if program.digest != digest:
                raise EvidenceError(f"{program_path(digest)} holds another program")
            self._check_constants(program)
            self._programs[digest] = self._complete(program)
        return self._programs[digest]

    def _check_constants(self, program: Program) -> None:
        """EvidenceError unless the run lists as many bytes of constants as the program does not hold itself."""
        entry = self.files.get(constants_path(program.digest))
        listed = 0 if entry is None else entry.length
        if listed != program.apart_bytes or (entry is not None and not listed):
            raise EvidenceError(
                f"{constants_path(program.digest)} has {listed} bytes; its program keeps "
                f"{program.apart_bytes} bytes of constants there"
            )

    def _complete(self, program: Program) -> Program:
        """A program with its constants; EvidenceError unless these are there and have its digests."""
        apart = self.read(constants_path(program.digest)) if program.apart_bytes else b""
        return read_program(program.encoded, apart)

    @property
    def committed(self) -> int:
        """Number of the last step all of whose files are in the folder; -1 if not even the initial state's are."""
        return self.manifest.steps - (bool(self._absent) and not self.manifest.is_closing)

    def leaf(self, step: int) -> Leaf:
        """Return the leaf of a step, checked to be that step's."""
        leaf = Leaf.decode(self.journal.record(step_record(step)).leaf, self.layout)
        if leaf.step != step:
            raise EvidenceError(f"the record of step {step} holds step {leaf.step}")
        return leaf

    def load_steps(self) -> tuple[Leaves, MerkleTree]:
        """Return all leaves 0 … committed and their log; EvidenceError unless all leaves have the signed root."""
        tree = MerkleTree()
        leaves = Leaves(self.leaf, self.manifest.steps + 1)
        for step in range(len(leaves)):
            tree.append(self.journal.record(step_record(step)).leaf)
            _ = leaves[step]  # a record that holds none, or another step's, is refused here
        if tree.root() != self.manifest.root:
            raise EvidenceError("the signed root is not that of the log of steps")
        if self.committed < self.manifest.steps:  # the last one is announced, and not there yet
            tree = MerkleTree(leaf.encoded() for leaf in leaves[:-1])
        return leaves[: self.committed + 1], tree

    def batches(self) -> Batches:
        """Return D; EvidenceError unless it opens the commitment in M."""
        if self.declared.recipe is not None:
            return self.data()
        salt = self.read(SALT)
        if salt_commitment(salt) != self.metadata.data:
            raise EvidenceError("the salt key does not match the data commitment in the metadata")
        return RecordedBatches(self.read, salt)

    def data(self) -> RunData:
        """Return D of a preset's run; EvidenceError unless it opens the commitment in M."""
        data = RunData.from_files(self.read(SAMPLES), self.read(ORDER), self.read(SALT))
        if data.order.shape != (self.task.steps, self.task.batch_size):
            raise EvidenceError(f"{ORDER} does not hold {self.task.steps} batches of {self.task.batch_size}")
        if {**data.commitment(), "set": self.metadata.data.get("set")} != self.metadata.data:
            raise EvidenceError("the samples do not match the data commitment in the metadata")
        return data

    def rounding_log(self, step: int) -> bytes:
        """Return the rounding log of a step; EvidenceError unless its leaf commits to it."""
        return self.read(log_path(step))

    def checkpoint(self, step: int) -> dict[str, Tensor]:
        """Return the state W_step, without what the next step overwrites (``ShardedMemory.trimmed``).

        ``checkpoints`` says which have to be there.
        """
        path = checkpoint_path(step)
        held = bytearray()
        for piece in self._pieces(path):
            held += piece
        with torch.no_grad():
            return decode_state(held, path)


def read_manifest(folder: Path) -> bytes:
    """The head of the run in a folder; Damaged where there is none."""
    size = file_size(folder, MANIFEST)
    if size is None or size > limits.MANIFEST_BYTES.most:
        raise Damaged(f"{folder.name}/{MANIFEST} {'is missing' if size is None else f'has {size} bytes'}")
    with foreign(f"{folder.name}/{MANIFEST}", Damaged), (folder / MANIFEST).open("rb") as file:
        return file.read(size)


def entry_of(folder: Path, path: str) -> Entry | None:
    """Length and digest of what lies at a path of a folder; None where there is no file."""
    length = file_size(folder, path)
    if length is None:
        return None
    with foreign(f"{folder.name}/{path}", Damaged), (folder / path).open("rb") as file:
        return Entry(length, hashlib.file_digest(file, "sha256").hexdigest())


def _is_there(folder: Path, path: str) -> bool:
    """Whether a path of a run is taken, by whatever; Unreadable where that cannot be determined."""
    try:
        with foreign(f"{folder.name}/{path}"):
            os.lstat(folder / path)
    except EvidenceError:
        return False
    return True
