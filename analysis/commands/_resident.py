"""A pool's resident process, as the pool sees it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Self

from analysis.resident.circumstances import circumstances
from inspector.replay.sources import program_digest

__all__ = ["Resident"]

_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""NumPy's library starts threads when it is loaded, and a process with threads cannot be copied."""


class Resident:
    """Starts the process, hands commands to it, and starts it again where it has ended."""

    def __init__(self) -> None:
        self._told = [program_digest(), circumstances()]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def take(self, connection: socket.socket, descriptors: Sequence[int]) -> None:
        """Hand over a connection that brings a command, with folder, input, output and error output."""
        given = [connection.fileno(), *descriptors]
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._start()
            assert self._socket is not None
            socket.send_fds(self._socket, [b"!"], given)

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "analysis.commands._resident_process", *self._told],
                stdin=theirs.fileno(),
                env={**os.environ, **_ONE_THREAD},
                start_new_session=True,
            )

    def _end(self) -> None:
        """What commands run goes on until it is done."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
