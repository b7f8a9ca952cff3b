"""How the writer's files come to be: whole, longer, or in the place of another."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

__all__ = ["Replaced", "append", "move", "write"]


def write(path: str, content: bytes) -> None:
    """Write a file, with the folders that it lies in."""
    try:
        _put(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, content)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _put(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, content)


def append(path: str, content: bytes) -> None:
    """Add to the end of a file that is there."""
    _put(path, os.O_WRONLY | os.O_APPEND, content)


def move(source: str, target: str) -> None:
    """Give a file its place, in a folder that may have to be made."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.replace(source, target)


class Replaced:
    """A file that is replaced again and again, each time at once.

    Two files take turns: the one that is not in place is overwritten, and linked into the other's place. To make a new
    file each time costs twenty times as much on journaling file systems, which write a file out that replaces another.

    Args:
        target: the file.
        staging: folder on the same file system where the two lie; nobody else writes there.
    """

    def __init__(self, target: Path, staging: Path) -> None:
        self._target = str(target)
        self._next = str(staging / f"{target.name}.next")
        self._turns = [str(staging / f"{target.name}.{turn}") for turn in range(2)]
        for path in (self._next, *self._turns):  # one of them may be in place, under a process that died
            if os.path.lexists(path):
                os.unlink(path)

    def replace(self, content: bytes) -> None:
        """Put a content in the place of the last one."""
        turn, flags = self._turns[0], os.O_WRONLY | os.O_CREAT
        try:
            _put(turn, flags, content)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(turn), exist_ok=True)
            _put(turn, flags, content)
        with suppress(FileNotFoundError):
            os.unlink(self._next)
        try:
            os.link(turn, self._next)
        except OSError:  # a file system without links
            write(self._next, content)
        os.replace(self._next, self._target)
        self._turns.reverse()


def _put(path: str, flags: int, content: bytes) -> None:
    file = os.open(path, flags, 0o666)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(file, left) :]
        if not flags & (os.O_TRUNC | os.O_APPEND):
            os.ftruncate(file, len(content))
    finally:
        os.close(file)
