"""Folders that hold nothing of anybody else's: an empty one to work in, and one that is the user's alone."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["in_empty_folder", "own_folder"]


@contextlib.contextmanager
def in_empty_folder() -> Iterator[None]:
    """Work in a new empty folder meanwhile: what is loaded there finds no settings in a run's folder."""
    try:
        here = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # it is gone, or may not be read: nothing is found in it
        yield
        return
    try:
        with tempfile.TemporaryDirectory(prefix="chipwitness-") as folder:
            os.chdir(folder)
            try:
                yield
            finally:
                os.fchdir(here)
    finally:
        os.close(here)


def own_folder(name: str) -> str | None:
    """A folder of that name for what can be made again, where the user alone can write; None where there cannot be one.

    It lies in the user's cache or, where others may change that, among temporary files. It is made where there is none.
    What another user put into it is taken away.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    caches = base if os.path.isabs(base) else os.path.join(os.path.expanduser("~"), ".cache")
    places = [os.path.join(caches, "chipwitness"), os.path.join(tempfile.gettempdir(), f"chipwitness-{os.geteuid()}")]
    return next((found for place in places if (found := _made(place, name)) is not None), None)


def _made(place: str, name: str) -> str | None:
    try:
        os.makedirs(os.path.dirname(place), mode=0o700, exist_ok=True)
        above = os.path.realpath(os.path.dirname(place))
        top = os.path.join(above, os.path.basename(place))
        folder = os.path.join(top, name)
        for each in (top, folder):
            with contextlib.suppress(FileExistsError):
                os.mkdir(each, 0o700)
            found = os.lstat(each)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                return None
        kept = all(_is_kept(os.stat(each)) for each in (Path(above), *Path(above).parents))
        return folder if kept and _take_away_foreign(folder) else None
    except OSError:
        return None


def _is_kept(found: os.stat_result) -> bool:
    """Whether only this user and the system can replace what lies in a folder."""
    mine = found.st_uid in (0, os.geteuid())
    return mine and (not found.st_mode & 0o022 or bool(found.st_mode & stat.S_ISVTX))


def _take_away_foreign(folder: str) -> bool:
    """Take away all that is no file or folder of this user's own; False where a folder is not."""
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            try:
                found = os.lstat(os.path.join(place, name))
            except FileNotFoundError:  # another process has given it its final name
                continue
            if found.st_uid == os.geteuid() and (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
                continue
            if stat.S_ISDIR(found.st_mode):
                return False
            os.unlink(os.path.join(place, name))
    return True
