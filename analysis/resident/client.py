"""Hands a command with ``--pool SOCKET`` to the pool's resident process, which answers with its exit code.

Nothing here is loaded that takes time to load.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import stat
import struct
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import Any

from analysis.resident.circumstances import circumstances
from inspector.replay.sources import program_digest

__all__ = ["COMMANDS", "MARK", "forward"]

COMMANDS = frozenset({"inspect", "replay", "world"})
"""What may name a pool."""
MARK = b"!"
"""First byte of a connection that brings a command; folder, input, output and error output come with it."""

_CREDENTIALS = struct.Struct("3i")
_MOST = 1 << 16


def forward(words: Sequence[str]) -> int | None:
    """Have a command run where it is ready to run, with this process's folder, input and outputs; its exit code.

    None where it has to run in this process: no pool is named or there, it has no resident process, or that began in
    other circumstances (``circumstances``). Once a command has begun it is begun nowhere else: where its process ends
    without a word the code is 3.
    """
    path = _pool_of(words)
    connection = None if path is None or not _has_streams() else _connect(path)
    if connection is None:
        return None
    with closing(connection):
        if not _ask(connection, words):
            return None
        answer = _answer(connection)
    if answer is not None and answer.get("elsewhere") is True:
        return None
    code = None if answer is None else answer.get("exit")
    if type(code) is int:
        return code
    refused = None if answer is None else answer.get("refused")
    from analysis.text import visible

    text = f"the pool at {path} ended without an answer" if refused is None else refused
    print(visible(f"chipwitness {words[0]}: {text}"), file=sys.stderr)
    return 3 if refused is None else 2


def _ask(connection: socket.socket, words: Sequence[str]) -> bool:
    """Send a command; False where not all of it could be sent, so that it begins nowhere."""
    line = json.dumps(_asked(words)).encode() + b"\n"
    try:
        folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            socket.send_fds(connection, [MARK], [folder, 0, 1, 2])
        finally:
            os.close(folder)
        connection.sendall(line)
    except OSError:
        return False
    return True


def _asked(words: Sequence[str]) -> dict[str, Any]:
    os.umask(umask := os.umask(0o077))
    return {
        "program": program_digest(),
        "circumstances": circumstances(),
        "name": sys.argv[0],
        "words": list(words),
        "environment": dict(os.environ),
        "umask": umask,
    }


def _pool_of(words: Sequence[str]) -> str | None:
    """The socket that a command names; what is overlooked here the command finds itself."""
    if not words or words[0] not in COMMANDS:
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--pool")
    try:
        return parser.parse_known_args(list(words[1:]))[0].pool  # type: ignore[no-any-return]
    except (argparse.ArgumentError, SystemExit):
        return None


def _has_streams() -> bool:
    """Whether input and both outputs are open; the socket would take the place of one that is not."""
    try:
        return all(map(os.fstat, (0, 1, 2)))
    except OSError:
        return False


def _connect(path: str) -> socket.socket | None:
    """A connection with a process of this user."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        found = os.stat(path)
        connection.connect(path)
        if stat.S_ISSOCK(found.st_mode) and os.getuid() == found.st_uid == _user_of(connection):
            return connection
    except (OSError, ValueError, AttributeError):  # not every system says who is there
        pass
    connection.close()
    return None


def _user_of(connection: socket.socket) -> int:
    """Number of the user whose process made the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _answer(connection: socket.socket) -> dict[str, Any] | None:
    """The answer, or None; an interrupt is handed on by closing this end, and the command still says how it ended."""
    data = b""
    while not data.endswith(b"\n") and len(data) < _MOST:
        try:
            more = connection.recv(_MOST)
        except KeyboardInterrupt:
            connection.shutdown(socket.SHUT_WR)
            continue
        except OSError:
            return None
        if not more:
            return None
        data += more
    try:
        answer = json.loads(data)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None
