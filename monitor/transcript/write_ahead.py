"""A file of a step to come, written ahead of it in another thread, while training goes on."""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from monitor.files import Files
from monitor.transcript.manifest import Entry

__all__ = ["Ahead", "Staged"]

_number = itertools.count()


@dataclass(frozen=True, slots=True)
class Staged:
    """A file that is written already, under a temporary name, until the step that it comes with gives it its place."""

    path: str
    entry: Entry


class Ahead:
    """Writes and hashes one file in a separate thread.

    Args:
        files: with ``sync``, the content is on the medium before ``staged`` returns.
        path: where no other file is ever written: a number is added to it.
        pieces: called on the thread; gives the content. What it reads must stay as it is until ``staged`` returns.
    """

    def __init__(self, files: Files, path: str, pieces: Callable[[], Sequence[memoryview]]) -> None:
        self._files, self._pieces = files, pieces
        self._path = f"{path}.{os.getpid()}-{next(_number)}"
        self._entry: Entry | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="chipwitness-ahead")
        self._thread.start()

    def staged(self) -> Staged:
        """Wait until the file is there; raises what writing it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._entry is not None
        return Staged(self._path, self._entry)

    def forget(self) -> None:
        """Wait until nothing is written any more, and remove the file."""
        self._thread.join()
        if os.path.exists(self._path):
            os.unlink(self._path)

    def _run(self) -> None:
        try:
            pieces, hasher = self._pieces(), hashlib.sha256()
            self._files.write(self._path, *pieces)
            for piece in pieces:
                hasher.update(piece)
            self._entry = Entry(sum(piece.nbytes for piece in pieces), hasher.hexdigest())
        except BaseException as error:  # the caller's to raise
            self._error = error
