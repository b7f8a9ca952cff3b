"""Replay devices and ranks without the seconds of a start: they fork a process that has imported what they need.

``monitor.processes`` starts that process, once for each set of variables that libraries read when they are loaded. Its
forks run the module as one that is started does. Tests of the start itself take the fixture ``started_processes``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

import torch

from monitor import processes
from monitor.numerics.known_answers import require_engines

LOADED = {
    "inspector.replay._worker": ["torch._dynamo", "inspector.replay._worker"],
    "monitor.distributed.launcher": ["torch._dynamo", "analysis.examples.train_on_two_processes"],
}
"""What a process imports before its first fork. The module itself is run by its name, as always."""
_OF_ONE = ("CHIPWITNESS_", "RANK", "LOCAL_RANK", "WORLD_SIZE")


class Forked:
    """As much of ``subprocess.Popen`` as the product uses."""

    def __init__(self, pid: int, status: socket.socket, stdin: IO[bytes] | None, stdout: IO[bytes] | None) -> None:
        self.pid, self._status = pid, status
        self.returncode: int | None = None
        self.stdin, self.stdout = stdin, stdout

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                code = int(self._status.recv(16))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("fork", timeout or 0.0) from None
            self.returncode = code
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has just ended, and the report of that is on its way
            if self.poll() is None:
                os.kill(self.pid, signal.SIGKILL)


class Forks:
    """In place of ``monitor.processes.start``: modules in ``LOADED`` are forked, all others are started."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, tuple[tuple[str, str], ...]], tuple[subprocess.Popen[bytes], socket.socket]]
        self.started, self._servers = processes.start, {}
        self._folder, self._lock = tempfile.TemporaryDirectory(), threading.Lock()

    def close(self) -> None:
        for server, channel in self._servers.values():
            channel.close()
            server.wait()
        self._folder.cleanup()

    def start(self, command: Sequence[str], folder: str, variables: Mapping[str, str], **streams: Any) -> Any:
        begins = [number for number, word in enumerate(command) if word.endswith("_begin.py")]
        place, module, *words = command[begins[0] + 1 :] if begins else ("", "")
        if module not in LOADED:
            return self.started(command, folder, variables, **streams)
        ours, theirs = socket.socketpair()
        given, kept = [], []
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            end, mine = _stream(streams.get(name), number)
            given.append(end)
            kept.append(mine)
        request = {"place": place, "module": module, "words": words, "folder": folder}
        content = json.dumps({**request, "environment": processes.environment(variables)}).encode()
        with self._lock:  # devices are started by threads of a pool; each reads the answer to its own request
            pid = self._ask(module, variables, content, [*given, theirs.fileno()])
        for end in given:
            os.close(end)
        theirs.close()
        return Forked(pid, ours, kept[0], kept[1])

    def _ask(self, module: str, variables: Mapping[str, str], content: bytes, given: Sequence[int]) -> int:
        """Process number of a new fork. A server that has ended is started anew once: its end is one test's failure."""
        for is_last in (False, True):
            channel = self._server(module, variables)
            try:
                socket.send_fds(channel, [len(content).to_bytes(4, "big")], given)
                channel.sendall(content)
                with channel.makefile("rb") as answers:
                    return int(answers.readline())
            except (OSError, ValueError):
                self._forget(channel)
                if is_last:
                    raise
        raise AssertionError

    def _forget(self, channel: socket.socket) -> None:
        for key, (server, kept) in list(self._servers.items()):
            if kept is channel:
                channel.close()
                server.kill()
                server.wait()
                del self._servers[key]

    def _server(self, module: str, variables: Mapping[str, str]) -> socket.socket:
        loaded = {name: value for name, value in variables.items() if not name.startswith(_OF_ONE)}
        key = module, tuple(sorted(loaded.items()))
        if key not in self._servers:
            ours, theirs = socket.socketpair()
            command = processes.python("tests.forks", module, str(theirs.fileno()))
            server = self.started(command, self._folder.name, loaded, pass_fds=[theirs.fileno()])
            theirs.close()
            self._servers[key] = server, ours
        return self._servers[key][1]


def _stream(wanted: Any, number: int) -> tuple[int, IO[bytes] | None]:
    """The end of a process's stream that it is given, and this side's, if it is a new pipe."""
    if wanted == subprocess.PIPE:
        reads, writes = os.pipe()
        return (reads, open(writes, "wb", 0)) if number == 0 else (writes, open(reads, "rb"))
    return os.dup(number if wanted is None else wanted.fileno()), None


def _serve(module: str, channel: socket.socket) -> None:
    for name in LOADED[module]:
        importlib.import_module(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork has none of this process's threads
    require_engines("exact", "rounded")  # loads compiled code
    require_engines.cache_clear()
    torch.set_num_threads(threads)
    gc.freeze()
    children: dict[int, int] = {}
    wakes, rings = os.pipe()
    os.set_blocking(rings, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(rings)
    while True:
        sources: list[socket.socket | int] = [channel, wakes]
        ready = select.select(sources, [], [])[0]
        if wakes in ready:
            os.read(wakes, 4096)
            _report(children)
        if channel not in ready:
            continue
        head, given, _, _ = socket.recv_fds(channel, 4, 4)
        if not head:
            break
        content = b""
        while len(content) < int.from_bytes(head, "big"):
            content += channel.recv(1 << 16)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (wakes, rings, channel.fileno(), *children.values()):
                os.close(each)
            _run(json.loads(content), given)
        children[pid] = given.pop()
        for each in given:
            os.close(each)
        channel.sendall(b"%d\n" % pid)
    for pid in children:
        os.kill(pid, signal.SIGKILL)


def _report(children: dict[int, int]) -> None:
    """Pass on how those have ended that did."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        told = children.pop(pid, None)
        if told is None:
            continue
        with contextlib.suppress(OSError):  # no one asks for it any more
            os.write(told, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(told)


def _run(job: Mapping[str, Any], given: Sequence[int]) -> NoReturn:
    """Be the process that was asked for."""
    for number, each in enumerate(given[:3]):
        os.dup2(each, number)
    for each in given:
        os.close(each)
    code = 1
    try:
        os.chdir(job["folder"])
        os.environ.clear()
        os.environ.update(job["environment"])
        sys.path[:] = [each for each in sys.path if each != ROOT] + ([job["place"]] if job["place"] else [])
        sys.argv[1:] = job["words"]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*found in sys.modules after import")
            runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

if __name__ == "__main__":
    _serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
