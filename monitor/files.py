"""How files come to be: whole, longer, or in the place of another; and whether they outlive a power loss."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

__all__ = ["Files", "Replaced", "locked", "remove", "write_whole"]

_WHOLE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
_IN_PLACE = os.O_WRONLY | os.O_CREAT


def write_whole(path: Path, content: bytes | memoryview, *, new: bool = False, mode: int = 0o666) -> None:
    """Write a file next to its place and then give it its name: a reader finds all of it, or none.

    A device or pipe at that place, which keeps nothing, is written to; a link is followed.

    Args:
        new: FileExistsError if the name is taken.
        mode: of a file that was not there.
    """
    target = os.path.realpath(path)
    try:
        found = os.stat(target).st_mode
    except FileNotFoundError:
        found = None
    if found is not None and new:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    if found is not None and not stat.S_ISREG(found):
        with open(target, "wb") as device:  # OSError of a folder
            device.write(content)
        return
    draft = f"{target}.{threading.get_native_id()}.new"
    with suppress(FileNotFoundError):
        os.unlink(draft)
    try:
        descriptor = os.open(draft, _WHOLE | os.O_EXCL, mode if found is None else stat.S_IMODE(found))
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        if new:
            _link_new(draft, target)
        else:
            os.replace(draft, target)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(draft)


def remove(path: Path) -> None:
    """Delete a file, pipe or link, or a folder with all that it holds; nothing where nothing is."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, waits: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Have a file alone from before it is read until after it is written, among those who ask for it by this.

    A file ``.NAME.lock`` next to it is the lock; a process lets go of it however it ends.

    Args:
        waits: is called before waiting for another process.

    Raises:
        OSError: nothing can be written next to it.
    """
    with path.with_name(f".{path.name}.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _link_new(draft: str, target: str) -> None:
    """Give a file a name that is free; OSError if it is not."""
    try:
        os.link(draft, target)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.replace(draft, target)


class Files:
    """Writes files.

    What is written outlives the process at once, since the operating system holds it. With ``sync`` a method also
    waits until the content is on the medium (``fsync``), and ``flush`` until the names are, which makes it outlive a
    power loss.

    Attributes:
        sync: whether anything is waited for.
    """

    def __init__(self, *, sync: bool = False) -> None:
        self.sync = sync

    def write(self, path: str, *pieces: bytes | memoryview) -> None:
        """Write a file, with the folders that it lies in; its name is the caller's to ``flush``."""
        self._put(path, _WHOLE, *pieces)

    def overwrite(self, path: str, content: bytes) -> None:
        """Write a file over what it holds: to make it empty first costs ten times as much."""
        self._put(path, _IN_PLACE, content)

    def append(self, path: str, content: bytes) -> None:
        """Add to the end of a file that is there."""
        self._put(path, os.O_WRONLY | os.O_APPEND, content)

    def move(self, source: str, target: str) -> None:
        """Give a file or folder its place, in a folder that may have to be made; the name is the caller's to flush."""
        self._make(os.path.dirname(target))
        os.replace(source, target)

    def replace(self, path: Path, content: bytes) -> None:
        """Put a content in the place of a file's, at once: a reader finds one or the other."""
        draft = path.with_name(f"{path.name}.new")
        self.write(str(draft), content)
        os.replace(draft, path)
        self.flush(path.parent)

    def flush(self, root: str | Path, paths: Iterable[str] = ()) -> None:
        """Wait for the names in a folder, and in those below it in which some paths lie."""
        if not self.sync:
            return
        below = {str(parent) for path in paths for parent in PurePosixPath(path).parents} - {"."}
        for folder in (*sorted(below, reverse=True), ""):
            _flush(os.path.join(root, folder))

    def settle(self, root: Path) -> None:
        """Wait for everything below a folder, by whatever process, and for its own name."""
        if not self.sync:
            return
        for folder, _, names in os.walk(root):
            for path in (*(os.path.join(folder, name) for name in names), folder):
                _flush(path)
        _flush(root.absolute().parent)

    def _make(self, folder: str) -> None:
        """Make a folder, and those that it lies in: the name of each is flushed before anything is in it."""
        if folder and not os.path.isdir(folder):
            parent = os.path.dirname(folder)
            self._make(parent)
            os.makedirs(folder, exist_ok=True)
            self.flush(parent or ".")

    def _put(self, path: str, flags: int, *pieces: bytes | memoryview) -> None:
        try:
            file = os.open(path, flags, 0o666)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            self._make(os.path.dirname(path))
            file = os.open(path, flags, 0o666)
        try:
            for piece in pieces:
                left = memoryview(piece)
                while left:
                    left = left[os.write(file, left) :]
            if flags == _IN_PLACE:
                os.ftruncate(file, sum(map(len, pieces)))
            if self.sync:
                os.fsync(file)
        except OSError as error:
            raise OSError(error.errno, error.strerror, path) from None
        finally:
            os.close(file)


class Replaced:
    """A file that is replaced again and again, each time at once.

    Two files take turns: the one that is not in place is overwritten, and linked into the other's place. To make a new
    file each time costs twenty times as much on journaling file systems, which write a file out that replaces another.

    Args:
        target: the file.
        staging: folder on the same file system where the two lie; nothing else writes there.
        files: with ``sync``, each replacement is on the medium before the file is overwritten that was in place.
    """

    def __init__(self, target: Path, staging: Path, files: Files) -> None:
        self._target, self._files = str(target), files
        self._next = str(staging / f"{target.name}.next")
        self._turns = [str(staging / f"{target.name}.{turn}") for turn in range(2)]
        for path in (self._next, *self._turns):  # one of them may be in place, under a process that died
            if os.path.lexists(path):
                os.unlink(path)

    def replace(self, content: bytes) -> None:
        """Put a content in the place of the last one."""
        turn = self._turns[0]
        self._files.overwrite(turn, content)
        with suppress(FileNotFoundError):
            os.unlink(self._next)
        try:
            os.link(turn, self._next)
        except OSError:  # a file system without links
            self._files.write(self._next, content)
        os.replace(self._next, self._target)
        self._turns.reverse()
        self._files.flush(os.path.dirname(self._target))


def _flush(path: str | Path) -> None:
    """Wait for what a file or folder holds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
