"""Nodes of a Ray cluster on this machine, each with processes of its own, which nobody else is let into."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from firmware_sim.errors import CallerError

__all__ = ["Nodes", "device_processes", "ray_nodes"]


class Nodes:
    """A cluster that runs.

    Attributes:
        address: HOST:PORT of its head.
        newest: the node that was started last.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.address: str = cluster.address
        self.newest: Any = cluster.head_node

    def add(self, **variables: str) -> Any:
        """Start a node of one processor; ``variables`` are of its environment."""
        self.newest = self._cluster.add_node(num_cpus=1, env_vars=variables)
        return self.newest

    def kill(self, node: Any) -> None:
        """End all processes of a node at once, by SIGKILL."""
        self._cluster.remove_node(node, allow_graceful=False)


@contextlib.contextmanager
def ray_nodes(count: int = 2) -> Iterator[Nodes]:
    """Start that many nodes of one processor each, which ask for a token; nothing of them is left at the end.

    Clusters of several processes come one after another: two on one machine hold each other up for minutes.

    Raises:
        CallerError: Ray is not installed.
    """
    with _alone(), _token():
        from ray.cluster_utils import Cluster

        folder = tempfile.mkdtemp(prefix="cw-", dir="/tmp")  # short: the names of Ray's sockets are long
        Path(os.environ.get("TMPDIR", "/tmp"), "ray").mkdir(exist_ok=True)  # where Ray notes a cluster's address
        cluster = Cluster(shutdown_at_exit=True)
        try:
            cluster.add_node(num_cpus=1, temp_dir=folder, include_dashboard=False)
            nodes = Nodes(cluster)
            for _ in range(count - 1):
                nodes.add()
            yield nodes
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    with (Path(tempfile.gettempdir()) / f"chipwitness-ray-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _token() -> Iterator[None]:
    """Variables that Ray reads when it is imported, and here once more."""
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        _read_token_again()
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        _read_token_again()


def _read_token_again() -> None:
    try:
        import ray._raylet

        parts: Any = ray._raylet
    except ImportError:
        raise CallerError("this needs Ray: pip install 'chipwitness[ray]'") from None
    parts.Config.initialize("")
    parts.AuthenticationTokenLoader.instance().reset_cache()


def device_processes() -> Mapping[int, int]:
    """Device processes of this machine that a Ray worker has started, each with that worker's process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            command = (entry / "cmdline").read_bytes().split(b"\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            mine = f"RAY_AUTH_TOKEN={os.environ['RAY_AUTH_TOKEN']}".encode()
            ours = mine in (entry / "environ").read_bytes().split(b"\0")
            of_ray = Path(f"/proc/{parent}/cmdline").read_bytes().startswith(b"ray::")
            if b"inspector.replay._worker" in command and ours and of_ray:
                found[int(entry.name)] = parent
    return found
