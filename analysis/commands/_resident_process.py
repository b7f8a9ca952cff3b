"""The resident process: loads what commands need, and has a copy of itself take each command.

``python -m analysis.commands._resident_process PROGRAM CIRCUMSTANCES``, with a socket of the pool as input. What it
loads is code and what follows from code alone: no command runs in it, so that a copy knows nothing of those before.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from analysis.commands.running import build_parser, run
from inspector.replay.sources import STALE, is_same_program

__all__ = ["main"]

_MODULES = (
    *("inspector.inspection.judging", "inspector.inspection.checkpoints"),
    *("inspector.inspection.memory", "inspector.bundle.building", "inspector.bundle.models"),
    *("inspector.bundle.replays", "inspector.registry.keyfiles", "inspector.replay.served"),
    *("inspector.rounds.contest", "inspector.rounds.playing", "inspector.rules.judging"),
    *("inspector.rules.reading", "monitor.lab.evidence", "monitor.lab.shards"),
)
_MOST = 1 << 24
"""Bytes of a command with its environment."""
_AGAIN_SECONDS = 0.5


def main(program: str, own: str) -> None:
    """Take commands until the pool is gone."""
    pool = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threads, parser = _load()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who asked learns how a command ended
    sys.stdout.flush()
    gc.collect()
    gc.freeze()  # so that no copy looks again at what never ends
    while True:
        _, given, _, _ = socket.recv_fds(pool, 1, 5)
        if not given:
            return
        with socket.socket(fileno=given[0]) as connection:
            if not _is_alone():
                _say(connection, elsewhere=True)
            elif os.fork() == 0:
                code = 3
                try:
                    pool.close()
                    code = _take(connection, given[1:], program, own, threads, parser)
                finally:
                    os._exit(code)
        for descriptor in given[1:]:
            os.close(descriptor)


def _load() -> tuple[int, ArgumentParser]:
    """Load everything; returns how many threads torch would use, of which this process starts none, and a parser."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in _MODULES:
        importlib.import_module(name)
    from monitor.presets.task import Task
    from monitor.recording.derivation import derive

    with torch.random.fork_rng(devices=[]):
        derive(Task.for_preset("tiny-gpt", seed=0, steps=1, shards=1))  # torch loads half of itself when first used
    return threads, build_parser()


def _is_alone() -> bool:
    """Whether this process has no other thread: a copy would lack it, and wait for its locks."""
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _take(
    connection: socket.socket, given: Sequence[int], program: str, own: str, threads: int, parser: ArgumentParser
) -> int:
    """Be the process of one command, and say how it ended."""
    with connection.makefile("rb") as lines:
        asked = json.loads(lines.readline(_MOST))
    if not is_same_program(asked["program"], program):
        return _say(connection, refused=STALE)
    if asked["circumstances"] != own:
        return _say(connection, elsewhere=True)
    _enter(asked, given)
    import torch

    torch.set_num_threads(threads)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_watch, args=(connection,), daemon=True).start()
    code = _run(asked["words"], parser)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return _say(connection, exit=code)


def _enter(asked: dict[str, Any], given: Sequence[int]) -> None:
    """Take over folder, input, outputs, environment and names."""
    folder, *streams = given
    os.fchdir(folder)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    for descriptor in given:
        os.close(descriptor)
    os.umask(asked["umask"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    tempfile.tempdir = None
    sys.argv = [asked["name"], *asked["words"]]
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]


def _watch(connection: socket.socket) -> None:
    """Interrupt the command when whoever asked has been interrupted, or is gone; until it has ended.

    An interrupt that meets a callback of compiled code is lost: what that raises is ignored.
    """
    with contextlib.suppress(OSError):
        if not connection.recv(1):
            while True:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(_AGAIN_SECONDS)


def _run(words: Sequence[str], parser: ArgumentParser) -> int:
    """Run a command as the interpreter would; its exit code."""
    code = 1
    try:
        code = run(words, parser)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except KeyboardInterrupt:  # before there was a command
        code = 3
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    sys.stderr.flush()
    return code


def _say(connection: socket.socket, **answer: Any) -> int:
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(json.dumps(answer).encode() + b"\n")
    return 0


if __name__ == "__main__":
    main(*sys.argv[1:])
