"""A run's journal and manifest as its lab may write and sign them anew: for simulated labs that lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from firmware_sim.evidence import MerkleTree, SigningKey
from monitor.transcript.journal import Journal
from monitor.transcript.layout import CREATION, JOURNAL, MANIFEST, closing_record, program_of, record_of, step_record
from monitor.transcript.manifest import Entry, Extent, Manifest, Record

__all__ = ["Draft"]


@dataclass(slots=True, kw_only=True)
class Draft:
    """An unsigned transcript; anything of it can be set before ``sign``.

    Attributes:
        steps: what the manifest counts; what there are leaves of, if None.
        leaves: canonical bytes of the leaf of each step.
        files: entry of each listed file.
        places: the record in which a file is listed; if that is not said, a program is in the first step's.
    """

    run: str
    finished: bool
    leaves: list[bytes]
    files: dict[str, Entry]
    places: dict[str, int]
    steps: int | None = None

    @classmethod
    def read(cls, folder: Path, key: SigningKey) -> Self:
        """Read the signed transcript as a draft."""
        manifest = Manifest.open((folder / MANIFEST).read_bytes(), key.verifying)
        records = list(Journal(folder, manifest))
        return cls(
            run=manifest.run,
            finished=manifest.finished,
            leaves=[record.leaf for record in records[step_record(0) : step_record(manifest.steps) + 1]],
            files={path: entry for record in records for path, entry in record.files.items()},
            places={path: index for index, record in enumerate(records) for path in record.files},
        )

    def put(self, folder: Path, path: str, content: bytes) -> None:
        """Write a file and list it."""
        if content:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        else:
            (folder / path).unlink(missing_ok=True)
        self.files[path] = Entry.of(content)

    def drop(self, folder: Path, path: str) -> None:
        """Remove a file, the folders that are empty then, and its entry."""
        if self.files.pop(path).length:
            (folder / path).unlink()
            for parent in (folder / path).parents:
                if parent == folder or any(parent.iterdir()):
                    break
                parent.rmdir()

    def cut(self, folder: Path, last: int) -> None:
        """Forget all steps after one, and what the chips said after the last."""
        for path in list(self.files):
            if self._record_of(path, last) > step_record(last):
                self.drop(folder, path)
        del self.leaves[last + 1 :]
        self.finished = False

    def sign(self, folder: Path, key: SigningKey) -> None:
        """Write journal and manifest anew."""
        steps = len(self.leaves) - 1
        records = [Record(files={})] + [Record(leaf=leaf, files={}) for leaf in self.leaves]
        if self.finished:
            records.append(Record(files={}))
        files: list[dict[str, Entry]] = [{} for _ in records]
        for path, entry in self.files.items():
            files[min(self._record_of(path, steps), len(records) - 1)][path] = entry
        lines = [replace(record, files=listed).line() for record, listed in zip(records, files, strict=True)]
        journal = b"".join(lines)
        manifest = Manifest(
            run=self.run,
            finished=self.finished,
            steps=steps if self.steps is None else self.steps,
            root=MerkleTree(self.leaves).root(),
            journal=Extent(
                records=len(lines), files=len(self.files), bytes=len(journal), sha256=Entry.of(journal).sha256
            ),
        )
        (folder / JOURNAL).write_bytes(journal)
        (folder / MANIFEST).write_bytes(manifest.seal(key))

    def _record_of(self, path: str, steps: int) -> int:
        if path in self.places:
            return self.places[path]
        if program_of(path) is not None:
            return step_record(1)
        index = closing_record(steps) if path.startswith("chips/") else record_of(path)
        return CREATION if index is None else index
