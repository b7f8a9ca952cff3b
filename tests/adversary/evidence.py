"""A run folder in the hands of the lab that signs it: everything can be written, and signed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from firmware_sim.evidence import MerkleTree, SignedHead, SigningKey, canonical, digest_bytes
from monitor.transcript import Leaf, Manifest
from monitor.transcript.layout import MANIFEST, METADATA, step_path
from monitor.transcript.leaf import decode_step, encode_step
from monitor.transcript.manifest import Entry

__all__ = ["Evidence", "contents"]


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


class Evidence:
    """Files of a run, read and written by its lab; ``sign`` makes the manifest agree with them."""

    def __init__(self, folder: Path, key: SigningKey) -> None:
        self.folder = folder
        self.key = key
        self.manifest = Manifest.open((folder / MANIFEST).read_bytes(), key.verifying)

    @property
    def paths(self) -> list[str]:
        """Every listed file."""
        return sorted(self.manifest.files)

    def read(self, path: str) -> bytes:
        """A file's bytes."""
        return (self.folder / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        """Put a file there and into the manifest."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        self.manifest = replace(self.manifest, files={**self.manifest.files, path: Entry.of(data)})

    def drop(self, path: str) -> None:
        """Remove a file from the folder and from the manifest."""
        target = self.folder / path
        target.unlink()
        if not any(target.parent.iterdir()):
            target.parent.rmdir()
        self.manifest = replace(
            self.manifest, files={name: entry for name, entry in self.manifest.files.items() if name != path}
        )

    def sign(self, key: SigningKey | None = None) -> None:
        """Sign the manifest again."""
        (self.folder / MANIFEST).write_bytes(self.manifest.seal(key or self.key))

    def metadata(self) -> dict[str, Any]:
        """M as it is."""
        found: dict[str, Any] = canonical.decode(self.read(METADATA))
        return found

    def leaves(self) -> list[Leaf]:
        """All committed leaves."""
        shards = len(self.metadata()["chips"])
        return [decode_step(self.read(step_path(step)), shards)[0] for step in range(self.manifest.steps + 1)]

    def rewrite(self, leaves: Sequence[Leaf], *, run: str | None = None) -> None:
        """Commit to other leaves: every head and the manifest are signed again."""
        if run is not None:
            self.manifest = replace(self.manifest, run=run)
        tree = MerkleTree()
        for leaf in leaves:
            tree.append(leaf.encoded())
            head = SignedHead(origin=self.manifest.run, size=tree.size, root=tree.root()).sign(self.key)
            self.write(step_path(leaf.step), encode_step(leaf, head))
        self.sign()

    def change_metadata(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Declare something else and sign everything again under the run's new name."""
        data = self.metadata()
        leaves = self.leaves()
        change(data)
        encoded = canonical.encode(data)
        self.write(METADATA, encoded)
        self.rewrite(leaves, run=digest_bytes("run", encoded).value.hex())
