"""Which program this is: a digest of its source files, its interpreter and what is installed beside it."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["STALE", "is_same_program", "program_digest"]

STALE = "the pool runs another version of this program: end it and start it again"

_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("firmware_sim", "monitor", "inspector", "analysis")
_MEASURED = os.path.join("analysis", "data")  # no code reads these to decide anything
_KINDS = (".py", ".json")


def program_digest(root: Path = _ROOT) -> str:
    """SHA-256, in hex, of the sources as they are now, of the interpreter's version and of installed releases' names.

    A process that goes on after its sources were changed has another digest than one that starts now.
    """
    hasher = hashlib.sha256(f"{sys.version}\n{_releases()}\n".encode())
    for package in _PACKAGES:
        for path in sorted(_sources(str(root), package)):
            content = Path(root, path).read_bytes()
            hasher.update(f"{path}\n{len(content)}\n".encode() + content)
    return hasher.hexdigest()


def is_same_program(asked: object, own: str) -> bool:
    """Whether who asks runs the program of this digest."""
    return asked == own


def _sources(root: str, folder: str) -> Iterator[str]:
    """Paths below the root; a package that is not there has none."""
    place = os.path.join(root, folder)
    if not os.path.isdir(place) or folder == _MEASURED:
        return
    with os.scandir(place) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _sources(root, os.path.join(folder, entry.name))
            elif entry.name.endswith(_KINDS):
                yield os.path.join(folder, entry.name)


def _releases() -> list[str]:
    """Name and version of each distribution on the path."""
    found = {name for place in sys.path if os.path.isdir(place) for name in os.listdir(place)}
    return sorted(name for name in found if name.endswith(".dist-info"))
