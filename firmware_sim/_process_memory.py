"""The memory of this process as the kernel sees it: who has a hand in it, and its bytes."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from io import FileIO
from itertools import accumulate
from typing import Any

from firmware_sim.errors import CallerError

__all__ = ["check_own", "read", "read_at_once"]


def check_own(spans: Iterable[tuple[str, int, int, str]]) -> None:
    """Check that all memory of the host belongs to this process alone, by the kernel's list of its mappings.

    Raises:
        CallerError: names the region, and what else has a hand in its memory.
    """
    held = sorted((start, stop, name) for device, start, stop, name in spans if device == "cpu" and start < stop)
    if not held:
        return
    try:
        is_served = any(_link(each) == _USERFAULTFD for each in os.scandir("/proc/self/fd"))
        with open(f"/proc/self/{'smaps' if is_served else 'maps'}", "rb", buffering=0) as file:
            _check_mapped(held, _Asked(file) if not is_served and _Asked.answers(file) else _Read(file))
    except OSError:
        return


def _link(entry: os.DirEntry[str]) -> str:
    """Where an entry leads; nowhere, if it is gone: the directory has listed its own descriptor."""
    try:
        return os.readlink(entry.path)
    except OSError:
        return ""


def _check_mapped(held: Iterable[tuple[int, int, str]], mappings: _Asked | _Read) -> None:
    end = 0
    for start, stop, name in held:
        at = max(start, min(end, stop))
        while at < stop:
            end, foreign = mappings.at(at)
            if foreign or not at < end:
                raise CallerError(
                    f"region {name!r}: its memory is {foreign or 'not mapped'}; clone the tensor, so that it lies in "
                    "memory of this process alone"
                )
            at = end


class _Query(ctypes.Structure):
    """``struct procmap_query`` of Linux 6.11."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("size", "query", "address", "start", "end", "flags")),
        *((name, ctypes.c_uint64) for name in ("page_size", "offset", "inode")),
        *((name, ctypes.c_uint32) for name in ("major", "minor", "name_size", "build_id_size")),
        *((name, ctypes.c_uint64) for name in ("name", "build_id")),
    )


_PROCMAP_QUERY = 0xC0686611
_SHARED = 8
"""``PROCMAP_QUERY_VMA_SHARED``."""


class _Asked:
    """The process's mappings, one after another asked of the kernel, where it answers (Linux 6.11)."""

    def __init__(self, file: FileIO) -> None:
        self._file = file

    @classmethod
    def answers(cls, file: FileIO) -> bool:
        """Whether this kernel does."""
        return _LIBC.ioctl(file.fileno(), ctypes.c_ulong(_PROCMAP_QUERY), ctypes.byref(_asked_at(0))) == 0 or (
            ctypes.get_errno() == errno.ENOENT
        )

    def at(self, address: int) -> tuple[int, str]:
        """End of the mapping at an address, 0 if there is none; and why others have a hand in it, if they have."""
        query = _asked_at(address)
        if _LIBC.ioctl(self._file.fileno(), ctypes.c_ulong(_PROCMAP_QUERY), ctypes.byref(query)):
            return 0, ""
        return query.end, _foreign(is_shared=bool(query.flags & _SHARED), is_file=bool(query.inode))


class _Read:
    """The process's mappings, read at once; with flags that say who serves their faults, where ``smaps`` is read."""

    def __init__(self, file: FileIO) -> None:
        text = file.read()
        found, flags = _MAPPING.findall(text), _FLAGS.findall(text)
        self._mappings = [
            (
                int(start, 16),
                int(stop, 16),
                _foreign(is_shared=kind == b"s", is_file=inode != b"0", is_served=not _SERVED.isdisjoint(flag.split())),
            )
            for (start, stop, kind, inode), flag in zip(found, flags or [b""] * len(found), strict=True)
        ]
        self._starts = [start for start, _, _ in self._mappings]

    def at(self, address: int) -> tuple[int, str]:
        """End of the mapping at an address, 0 if there is none; and why others have a hand in it, if they have."""
        at = bisect_right(self._starts, address) - 1
        _, end, foreign = self._mappings[at] if at >= 0 else (0, 0, "")
        return end, foreign


def _asked_at(address: int) -> _Query:
    return _Query(size=ctypes.sizeof(_Query), address=address)


def _foreign(*, is_shared: bool, is_file: bool, is_served: bool = False) -> str:
    """Why others than this process have a hand in a mapping, if they have."""
    if is_served:
        return "served by userfaultfd"
    return "shared with other processes" if is_shared else "a mapped file" if is_file else ""


_LIBC = ctypes.CDLL(None, use_errno=True)
_USERFAULTFD = "anon_inode:[userfaultfd]"
_SERVED = frozenset((b"um", b"uw", b"ui"))
"""Flags of mappings whose faults, writes or minor faults go to a userfaultfd, see proc(5)."""
_FLAGS = re.compile(rb"^VmFlags:(.*)$", re.MULTILINE)
_MOST_SPANS = 1024
"""``IOV_MAX`` of Linux."""
_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) ...(.) \S+ \S+ (\d+)", re.MULTILINE)
"""A line of ``/proc/self/maps``, see proc(5)."""


class _Span(ctypes.Structure):
    """``struct iovec`` of readv(2)."""

    _fields_ = (("start", ctypes.c_void_p), ("size", ctypes.c_size_t))


def read_at_once(pairs: Sequence[tuple[Any, Any]]) -> int:
    """Have the kernel copy this process's memory by ``process_vm_readv(2)``, as fast as a copy within a program.

    It keeps to the rights of pages; what lies behind the first page that may not be read is left to ``read``.

    Args:
        pairs: of arrays of bytes and what is copied into them.

    Returns:
        How many of the pairs are complete.
    """
    read, done = getattr(_LIBC, "process_vm_readv", None), 0
    if read is None:
        return 0
    read.restype = ctypes.c_ssize_t
    while done < len(pairs):
        some = pairs[done : done + _MOST_SPANS]
        mine, held = (
            (_Span * len(some))(*[_Span(array.ctypes.data, array.nbytes) for array in arrays])
            for arrays in zip(*some, strict=True)
        )
        copied = int(read(os.getpid(), mine, len(some), held, len(some), 0))
        if copied != sum(array.nbytes for array, _ in some):
            sizes = accumulate(array.nbytes for array, _ in some)
            return done + sum(1 for size in sizes if size <= copied)
        done += len(some)
    return done


def read(kernel: int, address: int, into: memoryview) -> None:
    """Have the kernel copy this process's memory from an address on."""
    done = 0
    while done < len(into):
        count = os.preadv(kernel, [into[done:]], address + done)
        if not count:
            raise OSError(errno.EFAULT, "the memory is no longer mapped")
        done += count
