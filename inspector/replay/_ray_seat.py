"""What runs on a node of a Ray cluster: device processes as on any machine. It loads neither torch nor Ray."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firmware_sim import limits
from firmware_sim.errors import ChipwitnessError, Unreadable
from firmware_sim.evidence import canonical
from inspector.replay.pool import DevicePool

__all__ = ["Seat"]

_SAME = ("fingerprint", "settings", "versions")


class Seat:
    """One processor of a node. Its devices are processes, as a Ray worker's own environment is none of a device's."""

    def __init__(self, timeout: float) -> None:
        self._pool = DevicePool(workers=1, threads=1, timeout=timeout)
        self._checked: set[str] = set()

    def node(self) -> str:
        """JSON: which machine this is, and whether its Ray asks for a token."""
        mode = os.environ.get("RAY_AUTH_MODE", "").lower()
        return json.dumps({"host": socket.gethostname(), "process": os.getpid(), "token": mode == "token"})

    def watch(self) -> None:
        """Never returns: a caller that waits for it learns when this process ends."""
        threading.Event().wait()

    def run(self, name: str, job: bytes, wanted: bytes, manifest: str) -> bytes:
        """Run a part of a job.

        Args:
            wanted: JSON: what another process of this device says of itself.
            manifest: name of the file that says which evidence lies in a folder.

        Returns:
            JSON with one key: ``result``; ``refused``: why this is not the device; ``lacks``: why it has not the run;
            or ``error``.
        """
        try:
            refused = self._refusal(name, canonical.loads(wanted))
            if refused is not None:
                return json.dumps({"refused": refused}).encode()
            part = canonical.loads(job)
            _check_evidence(part, manifest)
            return json.dumps({"result": self._pool.run(name, part)}).encode()
        except Unreadable as error:
            return json.dumps({"lacks": f"node {socket.gethostname()}: {error}"}).encode()
        except ChipwitnessError as error:
            return json.dumps({"error": f"node {socket.gethostname()}: {error}"}).encode()

    def _refusal(self, name: str, wanted: Mapping[str, Any]) -> str | None:
        """Why this machine is not the device, or None: its process says so, and tests known answers, before any job."""
        if name in self._checked:
            return None
        found = self._pool.run(name, {"action": "fingerprint"})
        for key in _SAME:
            if found.get(key) != wanted.get(key):
                where = f"node {socket.gethostname()} is not the device {name}"
                return f"{where}: its {key} is {found.get(key)}, not {wanted.get(key)}"
        self._checked.add(name)
        return None


def _check_evidence(job: Mapping[str, Any], manifest: str) -> None:
    """Unreadable where this node has not the run that a job names: that is no fault of the lab."""
    if "run" not in job:
        return
    path = Path(job["run"]) / manifest
    try:
        with path.open("rb") as file:
            content = file.read(limits.WORKER_BYTES.most)
    except OSError as error:
        text = error.strerror or str(error)
        raise Unreadable(f"cannot read {path} ({text}): all nodes must find the runs under the same path") from None
    if job.get("manifest") not in (None, hashlib.sha256(content).hexdigest()):
        raise Unreadable(f"{path} is not the run that is inspected: all nodes must find the runs under the same path")
