"""Parties of a world, each with its own folder, file of options and process, on this machine."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from firmware_sim.errors import DeviceError
from inspector.rounds.parts import parties_of, split
from inspector.rounds.world import CLUSTER, INSPECTORATE, World
from monitor import processes

__all__ = ["free_ports", "lay_out", "party_process", "require_running", "served_as"]

_METRICS = 1000
_SECONDS = 60
"""For a party to stop once it is asked to."""


def free_ports(count: int) -> list[int]:
    """Ports of this machine at which no one listens now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def lay_out(world: World, out: Path, ports: Mapping[str, int], *, metrics: bool = True) -> None:
    """Write NAME/ and NAME.toml for each party.

    Args:
        ports: of each party's server.
        metrics: whether each has a port for metrics, 1000 above.

    Raises:
        CallerError: a folder is there already, or a round is under way.
    """
    out.mkdir(parents=True, exist_ok=True)
    for party in parties_of(world):
        split(world, party, out / party)
        served = served_as(party)
        others = [INSPECTORATE, CLUSTER] if served == "lab" else list(ports)
        options = {
            **({"name": party} if served == "lab" else {}),
            "folder": str((out / party).absolute()),
            "host": "127.0.0.1",
            "port": ports[party],
            "tls": True,
            **({"metrics-port": ports[party] + _METRICS} if metrics else {}),
            "peer": [f"{each}=https://127.0.0.1:{ports[each]}" for each in others if each != party],
        }
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in options.items()]
        text = f"# of {party}: chipwitness serve {served} --config {party}.toml\n"
        (out / f"{party}.toml").write_text(text + "".join(lines), encoding="utf-8")


def served_as(party: str) -> str:
    """The word after ``serve``."""
    return party if party in (INSPECTORATE, CLUSTER) else "lab"


@contextlib.contextmanager
def party_process(
    served: str, log: Path, *words: str, stdout: int | IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process of ``serve``, which writes its log to a file, and is asked to stop in the end.

    Args:
        words: options.
        stdout: as ``subprocess.Popen`` takes it.
    """
    begun = f"{__name__.partition('.')[0]}.cli"  # this command once more, which is no import
    command = processes.python(begun, "serve", served, *words)
    with log.open("ab") as file:
        process = processes.start(command, str(log.parent), {}, stderr=file, stdout=stdout)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()


def require_running(others: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """DeviceError if one of these has ended."""
    for party, process in others.items():
        if process.poll() is not None:
            raise DeviceError(f"{party} ended before the round was over; its log is {party}.log")
