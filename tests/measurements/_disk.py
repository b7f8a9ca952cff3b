"""What a crash may leave of a folder: every operation on its files is noted, and played again as far as it got.

A process that ends leaves all that it did, its last write torn. A power loss leaves of each file what was flushed
(``fsync``), and of what came after any part: writes are lost, torn or overtake one another, a file has its new length
and zeros in it, and names are as they were, some of them or up to a point. To exchange names (``rename``) is one
operation, as journaling file systems have it. What is put back is as it was some operations before, but for one folder.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from firmware_sim.nvram import PosixDisk

__all__ = ["KINDS", "Disk", "Kind", "noted"]

Kind = Literal["kill", "power", "put back"]
KINDS: tuple[Kind, ...] = ("kill", "power", "put back")
_ROOT = 0


@dataclass(frozen=True, slots=True)
class _Operation:
    """One operation on a file or folder, each of which has a number.

    Attributes:
        what: ``write`` (data at a place, or from a length on if there are none), ``name`` or ``sync``.
        node: the file; of ``sync`` also a folder.
        place: where data begin, or the new length.
        data: what is written; None where only the length changes.
        leaves, enters: (folder, name) that the node loses and gets.
    """

    what: Literal["write", "name", "sync"]
    node: int
    place: int = 0
    data: bytes | None = None
    leaves: tuple[int, str] | None = None
    enters: tuple[int, str] | None = None


@dataclass(slots=True)
class Disk:
    """The operations on everything below a folder, in their order."""

    root: Path
    operations: list[_Operation] = field(default_factory=list)
    _names: dict[tuple[int, str], int] = field(default_factory=dict)
    _folders: set[int] = field(default_factory=lambda: {_ROOT})
    _open: dict[int, tuple[int, bool]] = field(default_factory=dict)
    _places: dict[int, int] = field(default_factory=dict)
    _lengths: dict[int, int] = field(default_factory=dict)
    _count: int = 0

    def __len__(self) -> int:
        """Number of operations so far."""
        return len(self.operations)

    def image(self, folder: Path, *, after: int, kind: Kind, seed: int, apart: str = "") -> None:
        """Make a folder as a crash after so many operations may leave it.

        Args:
            apart: path of a folder that nobody puts back.
        """
        done, rng = self.operations[:after], random.Random(f"{seed} {after}")
        if kind == "kill":
            last = self.operations[after] if after < len(self.operations) else None
            if last is not None and last.data:
                torn = last.data[: rng.randrange(len(last.data))]
                done.append(_Operation("write", last.node, last.place, torn))
            kept = done
        elif kind == "put back":
            before, known = rng.randrange(1, after + 1), self._below(apart)
            kept = [each for number, each in enumerate(done) if number < before or each.node in known]
        else:
            kept = list(_survivors(done, self._folders, rng))
        _build(folder, kept, self._folders)

    def _below(self, path: str) -> set[int]:
        """All that lies, by now, in the folder at a path."""
        found, waiting = set(), [self.find(str(self.root / path))]
        while waiting:
            node = waiting.pop()
            below = [child for (parent, _), child in self._names.items() if parent == node]
            found.update(below)
            waiting += below
        return found

    def enter(self, path: str, *, is_folder: bool = False) -> int:
        """A new file or folder."""
        self._count += 1
        node = self._count
        if is_folder:
            self._folders.add(node)
        self._bind(node, None, self._place(path))
        return node

    def find(self, path: str) -> int | None:
        """Number of the file or folder at a path."""
        place = self._place(path)
        return _ROOT if place[1] == "." else self._names.get(place)

    def _place(self, path: str) -> tuple[int, str]:
        parts, node = os.path.relpath(os.path.abspath(path), self.root).split(os.sep), _ROOT
        for part in parts[:-1]:
            node = self._names[node, part]
        return node, parts[-1]

    def _bind(self, node: int, leaves: tuple[int, str] | None, enters: tuple[int, str] | None) -> None:
        self.operations.append(_Operation("name", node, leaves=leaves, enters=enters))
        _rename(self._names, self.operations[-1])

    def owns(self, path: object) -> bool:
        """Whether a path lies below the folder."""
        text = os.path.abspath(os.fspath(path)) if isinstance(path, str | os.PathLike) else ""
        return text == str(self.root) or text.startswith(f"{self.root}{os.sep}")

    def opened(self, descriptor: int, path: str, flags: int) -> None:
        """A file was opened, made, or made empty; a folder may be opened to flush it."""
        node = self.find(path)
        if node is None:
            node = self.enter(path)
        elif flags & os.O_TRUNC:
            self.cut(node, 0)
        self._open[descriptor] = node, bool(flags & os.O_APPEND)
        self._places[descriptor] = 0

    def closed(self, descriptor: int) -> None:
        """A descriptor is no longer any file's."""
        self._open.pop(descriptor, None)

    def node_of(self, descriptor: int) -> int | None:
        """The file or folder that a descriptor stands for."""
        return self._open[descriptor][0] if descriptor in self._open else None

    def written(self, descriptor: int, data: bytes, place: int | None) -> None:
        """Data were written at a place, or where the descriptor stands."""
        node, is_end = self._open[descriptor]
        if place is None:
            place = self._lengths.get(node, 0) if is_end else self._places[descriptor]
            self._places[descriptor] = place + len(data)
        self._lengths[node] = max(self._lengths.get(node, 0), place + len(data))
        self.operations.append(_Operation("write", node, place, data))

    def cut(self, node: int, length: int) -> None:
        """A file got another length."""
        self._lengths[node] = length
        self.operations.append(_Operation("write", node, length))

    def moved(self, source: str, target: str) -> None:
        """A file or folder took a name, perhaps in the place of another one."""
        node, old, new = self.find(source), self._place(source), self._place(target)
        assert node is not None
        self._bind(node, old, new)

    def linked(self, source: str, target: str) -> None:
        """A file got a second name."""
        node = self.find(source)
        assert node is not None
        self._bind(node, None, self._place(target))

    def removed(self, path: str) -> None:
        """A name is gone."""
        node = self.find(path)
        assert node is not None
        self._bind(node, self._place(path), None)

    def synced(self, node: int) -> None:
        """What a file or folder holds was flushed."""
        self.operations.append(_Operation("sync", node))


def _survivors(done: list[_Operation], folders: set[int], rng: random.Random) -> Iterator[_Operation]:
    """The operations of which a power loss leaves something, in some order that keeps those on flushed files."""
    synced: dict[int, int] = {}
    for number, operation in enumerate(done):
        if operation.what == "sync":
            synced[operation.node] = number
    flushed = rng.choice(
        [0, rng.randrange(len(done) + 1), max(0, len(done) - rng.randrange(30))]
    )  # by the system itself
    names_until = rng.choice([None, rng.randrange(len(done) + 1)])
    fate = {
        node: rng.choice(["all", "none", "some", "torn"]) for node in range(1 + max((o.node for o in done), default=0))
    }
    for number, operation in enumerate(done):
        if operation.what == "name":
            place = operation.enters or operation.leaves
            assert place is not None
            is_kept = rng.random() < 0.5 if names_until is None else number < names_until
            if is_kept or number < max(flushed, synced.get(place[0], -1)):
                yield operation
        elif operation.what == "write":
            how = "all" if number < max(flushed, synced.get(operation.node, -1)) else fate[operation.node]
            if how == "all" or (how == "some" and rng.random() < 0.5):
                yield operation
            elif how == "torn":
                data = operation.data or b""
                part = rng.randrange(len(data) + 1)
                yield _Operation("write", operation.node, operation.place, data[:part])
                if operation.data is not None and rng.random() < 0.5:  # its length, and zeros
                    yield _Operation("write", operation.node, operation.place + part, bytes(len(data) - part))


def _rename(names: dict[tuple[int, str], int], operation: _Operation) -> None:
    if operation.leaves is not None and names.get(operation.leaves) == operation.node:
        del names[operation.leaves]
    if operation.enters is not None:
        names[operation.enters] = operation.node


def _build(folder: Path, operations: list[_Operation], folders: set[int]) -> None:
    """Make what the operations make."""
    names: dict[tuple[int, str], int] = {}
    contents: dict[int, bytearray] = {}
    for operation in operations:
        if operation.what == "name":
            _rename(names, operation)
        elif operation.what == "write":
            held = contents.setdefault(operation.node, bytearray())
            if operation.data is None:
                del held[operation.place :]
                held += bytes(operation.place - len(held))
            else:
                held += bytes(max(0, operation.place - len(held)))
                held[operation.place : operation.place + len(operation.data)] = operation.data
    below: dict[int, list[tuple[str, int]]] = {}
    for (parent, name), node in names.items():
        below.setdefault(parent, []).append((name, node))
    made: dict[int, Path] = {}
    waiting = [(folder, _ROOT)]
    while waiting:
        path, node = waiting.pop()
        if node in folders:
            path.mkdir()
            waiting += [(path / name, child) for name, child in below.get(node, ())]
        elif node in made:
            path.hardlink_to(made[node])
        else:
            path.write_bytes(contents.get(node, b""))
            made[node] = path


@contextmanager
def noted(root: Path) -> Iterator[Disk]:
    """While it is open, note every operation of this process on the files below a new folder."""
    root = root.absolute()
    root.mkdir()
    disk, lock = Disk(root), threading.RLock()
    with ExitStack() as stack:
        for name, note in _NOTES.items():
            true = getattr(os, name)
            stack.enter_context(mock.patch.object(os, name, functools.wraps(true)(_one_by_one(lock, note(disk, true)))))
        stack.enter_context(mock.patch.object(PosixDisk, "write_file", _write_file))
        stack.enter_context(mock.patch.object(shutil, "rmtree", functools.partial(_remove_tree, shutil.rmtree, disk)))
        yield disk


def _one_by_one(lock: threading.RLock, call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that threads make one after the other, in the order in which they are noted."""

    def alone(*arguments: Any, **named: Any) -> Any:
        with lock:
            return call(*arguments, **named)

    return alone


def _write_file(self: PosixDisk, path: Path, data: bytes) -> None:
    """As the true one, by calls that can be noted."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.write(descriptor, data)
    self.flush(descriptor)
    os.close(descriptor)
    self._flush_names(path)


def _remove_tree(true: Callable[..., None], disk: Disk, path: Any, **options: Any) -> None:
    if not disk.owns(path):
        true(path, **options)
        return
    for folder, folders, names in os.walk(path, topdown=False):
        for name in names:
            os.unlink(os.path.join(folder, name))
        for name in folders:
            os.rmdir(os.path.join(folder, name))
    if os.path.isdir(path):
        os.rmdir(path)


def _open(disk: Disk, true: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        descriptor: int = true(path, flags, *rest, **named)
        if disk.owns(path):
            disk.opened(descriptor, os.fspath(path), flags)
        return descriptor

    return call


def _close(disk: Disk, true: Callable[..., Any]) -> Callable[..., Any]:
    def call(descriptor: int) -> None:
        disk.closed(descriptor)
        true(descriptor)

    return call


def _write(disk: Disk, true: Callable[..., Any]) -> Callable[..., Any]:
    def call(descriptor: int, data: Any, *place: int) -> int:
        written: int = true(descriptor, data, *place)
        if disk.node_of(descriptor) is not None:
            disk.written(descriptor, bytes(data[:written]), *place or (None,))
        return written

    return call


def _cut(disk: Disk, true: Callable[..., Any]) -> Callable[..., Any]:
    def call(what: Any, length: int) -> None:
        true(what, length)
        node = disk.node_of(what) if isinstance(what, int) else disk.find(what) if disk.owns(what) else None
        if node is not None:
            disk.cut(node, length)

    return call


def _sync(disk: Disk, true: Callable[..., Any]) -> Callable[..., Any]:
    def call(descriptor: int) -> None:
        node = disk.node_of(descriptor)
        if node is None:
            true(descriptor)
        else:  # the true disk is of no interest
            disk.synced(node)

    return call


def _two(note: Callable[[Disk, str, str], None], disk: Disk, true: Callable[..., Any]) -> Callable[..., Any]:
    def call(source: Any, target: Any, **named: Any) -> None:
        true(source, target, **named)
        if disk.owns(target):
            note(disk, os.fspath(source), os.fspath(target))

    return call


def _one(note: Callable[[Disk, str], object], disk: Disk, true: Callable[..., Any]) -> Callable[..., Any]:
    def call(path: Any, *rest: Any, **named: Any) -> None:
        true(path, *rest, **named)
        if disk.owns(path):
            note(disk, os.fspath(path))

    return call


_NOTES: dict[str, Callable[[Disk, Callable[..., Any]], Callable[..., Any]]] = {
    "open": _open,
    "close": _close,
    "write": _write,
    "pwrite": _write,
    "ftruncate": _cut,
    "truncate": _cut,
    "fsync": _sync,
    "fdatasync": _sync,
    "link": functools.partial(_two, Disk.linked),
    "replace": functools.partial(_two, Disk.moved),
    "unlink": functools.partial(_one, Disk.removed),
    "rmdir": functools.partial(_one, Disk.removed),
    "mkdir": functools.partial(_one, functools.partial(Disk.enter, is_folder=True)),
}
