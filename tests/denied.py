"""Permissions that bind whoever runs the tests, root too, and disks that are full: in this process, for a while."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_VERSION = 0x20080522
_OVERRIDE, _SEARCH = 1, 2
"""Linux's capabilities to pass over a file's permission bits."""


@contextmanager
def permissions_bind() -> Iterator[None]:
    """While it is open, this thread and what it starts may do with files no more than their bits allow."""
    if os.geteuid():
        yield
        return
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux lets root give up reading all files")
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_VERSION, 0)
    data = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable of the lower, then of the upper 32
    assert libc.capget(header, data) == 0
    held = data[0]
    data[0] = held & ~(1 << _OVERRIDE | 1 << _SEARCH)
    assert libc.capset(header, data) == 0
    try:
        yield
    finally:
        data[0] = held
        assert libc.capset(header, data) == 0


@contextmanager
def longest_file(size: int) -> Iterator[None]:
    """While it is open, no file can be written beyond so many bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
