"""A pool of device processes behind a socket, for several commands: a line of JSON in, a line of JSON out.

The socket belongs to one user, who alone may write to it. Who asks names folders of this machine, and believes what
comes back as it would its own processes; results between parties that do not trust each other travel signed
(``inspector.bundle.replays``). A pool whose program was changed since it began refuses jobs of the changed one.
A connection whose first byte brings open files is no job: it goes to whoever takes those.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from firmware_sim import limits
from firmware_sim.errors import CallerError, ChipwitnessError, DeviceError, EvidenceError, file_error
from firmware_sim.evidence import canonical
from inspector.replay.pool import DevicePool
from inspector.replay.sources import STALE, is_same_program, program_digest

__all__ = ["PoolClient", "TakeOver", "serving"]

TakeOver = Callable[[socket.socket, Sequence[int]], None]
"""Is given a connection with the open files that came with its first byte, and keeps copies of what it needs."""

_MOST_FILES = 4


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, pool: DevicePool, take_over: TakeOver | None) -> None:
        self.pool, self.take_over, self.program = pool, take_over, program_digest()
        super().__init__(str(path), _Handler)

    def shutdown_request(self, request: Any) -> None:
        self.close_request(request)  # whoever took it over goes on with it


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Run the one job that a connection brings."""
        begun, files, _, _ = socket.recv_fds(self.connection, 1, _MOST_FILES)
        try:
            if not files:
                answer = self._answer(begun)
            elif self.server.take_over is None:
                answer = {"elsewhere": True}
            else:
                return self.server.take_over(self.connection, files)
        except ChipwitnessError as error:
            answer = {"error": str(error)}
        finally:
            for each in files:
                os.close(each)
        with contextlib.suppress(BrokenPipeError):
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    def _answer(self, begun: bytes) -> dict[str, Any]:
        rest = b"" if begun == b"\n" else self.rfile.readline(limits.WORKER_BYTES.most)
        asked = canonical.parse(begun + rest, most=limits.WORKER_BYTES)
        if not isinstance(asked, dict) or set(asked) != {"device", "job", "program"}:
            raise CallerError("a job has another form")
        if not is_same_program(asked["program"], self.server.program):
            return {"refused": STALE}
        if not isinstance(asked["job"], dict):
            raise CallerError("a job has another form")
        return {"result": self.server.pool.run(str(asked["device"]), asked["job"])}


@contextlib.contextmanager
def serving(path: Path, pool: DevicePool, take_over: TakeOver | None = None) -> Iterator[socketserver.BaseServer]:
    """Serve a pool at a new socket, which only this user may write to; it is removed at the end.

    A socket that nobody serves any more, as one that was killed leaves it, gives way.

    Args:
        take_over: takes connections that bring open files; None for a pool that only replays.

    Raises:
        CallerError: there is something else at that path, or no socket can be made there.
    """
    if _is_abandoned(path):
        path.unlink(missing_ok=True)
    before = os.umask(0o177)
    try:
        server = _Server(path, pool, take_over)
    except OSError as error:
        raise file_error(f"cannot serve at {path}", error) from None
    finally:
        os.umask(before)
    try:
        yield server
    finally:
        server.server_close()
        path.unlink(missing_ok=True)


def _is_abandoned(path: Path) -> bool:
    try:
        if not _is_own_socket(path.stat()):
            return False
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def _is_own_socket(found: os.stat_result) -> bool:
    return stat.S_ISSOCK(found.st_mode) and found.st_uid == os.getuid()


class PoolClient:
    """A pool that another process serves.

    Raises:
        CallerError: there is no such socket of this user.
    """

    def __init__(self, path: Path) -> None:
        try:
            found = path.stat()
        except OSError as error:
            raise file_error(f"there is no pool at {path}", error) from None
        if not _is_own_socket(found):
            raise CallerError(f"{path} is no socket of this user")
        self._path, self._program = path, program_digest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """The processes stay."""

    def prepare(self, names: Sequence[str]) -> None:
        """Nothing: the pool's processes are there."""

    def run(self, name: str, job: Mapping[str, Any]) -> dict[str, Any]:
        """Run one job; as ``DevicePool.run``.

        Raises:
            CallerError: the pool runs another version of the program.
            DeviceError: the pool's process broke, or the pool is gone.
        """
        asked = json.dumps({"device": name, "job": job, "program": self._program}).encode() + b"\n"
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(self._path))
                connection.sendall(asked)
                with connection.makefile("rb") as answers:
                    answer = canonical.parse(answers.readline(limits.WORKER_BYTES.most + 1), most=limits.WORKER_BYTES)
        except (OSError, EvidenceError) as error:
            raise DeviceError(f"the pool at {self._path} gave no answer: {error}") from None
        if isinstance(answer, dict) and isinstance(answer.get("refused"), str):
            raise CallerError(answer["refused"])
        if not isinstance(answer, dict) or not isinstance(answer.get("result"), dict):
            said = answer.get("error") if isinstance(answer, dict) else None
            raise DeviceError(str(said or f"the pool at {self._path} gave an answer of another form"))
        return dict(answer["result"])
