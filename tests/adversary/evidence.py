"""A run folder in the hands of the lab that signs it: everything can be written, and signed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from firmware_sim.evidence import SigningKey, canonical, digest_bytes
from monitor.declaration.statement import Declaration
from monitor.transcript import Leaf
from monitor.transcript.draft import Draft
from monitor.transcript.layout import METADATA

__all__ = ["Evidence", "contents"]


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


class Evidence:
    """Files of a run, read and written by its lab; ``sign`` makes journal and manifest agree with them."""

    def __init__(self, folder: Path, key: SigningKey) -> None:
        self.folder = folder
        self.key = key
        self.draft = Draft.read(folder, key)

    @property
    def paths(self) -> list[str]:
        """Every listed file that is stored."""
        return sorted(path for path, entry in self.draft.files.items() if entry.length)

    @property
    def steps(self) -> int:
        """Number of the last committed step."""
        return len(self.draft.leaves) - 1

    def read(self, path: str) -> bytes:
        """A file's bytes."""
        entry = self.draft.files.get(path)
        return b"" if entry is not None and not entry.length else (self.folder / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        """Put a file there and into the journal."""
        self.draft.put(self.folder, path, data)

    def drop(self, path: str) -> None:
        """Remove a file from the folder and from the journal."""
        self.draft.drop(self.folder, path)

    def sign(self, key: SigningKey | None = None) -> None:
        """Sign journal and manifest again."""
        self.draft.sign(self.folder, key or self.key)

    def metadata(self) -> dict[str, Any]:
        """M as it is."""
        found = canonical.decode(self.read(METADATA))
        if not isinstance(found, dict):
            raise LookupError("another file lies where the declaration was")
        return found

    def leaves(self) -> list[Leaf]:
        """All committed leaves."""
        layout = Declaration.from_json(self.metadata()["task"]).layout
        return [Leaf.decode(leaf, layout) for leaf in self.draft.leaves]

    def rewrite(self, leaves: Sequence[Leaf], *, run: str | None = None) -> None:
        """Commit to other leaves: journal and manifest are signed again."""
        self.draft.run = run or self.draft.run
        self.draft.leaves = [leaf.encoded() for leaf in leaves]
        self.sign()

    def change_metadata(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Declare something else and sign everything again under the run's new name."""
        data = self.metadata()
        leaves = self.leaves()
        change(data)
        encoded = canonical.encode(data)
        self.write(METADATA, encoded)
        self.rewrite(leaves, run=digest_bytes("run", encoded).value.hex())
