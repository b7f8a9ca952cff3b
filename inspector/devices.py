"""Replay devices: the same machine computing with different kernels, each in a process of its own.

Kernel families are chosen by environment variables that must be set before torch is imported, so a device is entered
only by starting a process. Each reports the fingerprint of its native arithmetic; equal fingerprints mean that two
devices do not really differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from firmware_sim.errors import CallerError, DeviceError

__all__ = ["DEVICES", "Device", "current_device", "device", "enter", "run_worker"]

_CONTROLLED = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)
_NAME = "CHIPWITNESS_DEVICE"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A named way to compute.

    Attributes:
        environment: variables that select the kernels; all other controlled ones are unset.
        capability: what PyTorch must report after it was imported, or None where it depends on the machine.
    """

    name: str
    kind: str
    summary: str
    environment: Mapping[str, str]
    capability: str | None = None

    def process_environment(self) -> dict[str, str]:
        """Environment of a process that is to be this device."""
        kept = {name: value for name, value in os.environ.items() if name not in _CONTROLLED}
        return {**kept, **self.environment, _NAME: self.name}


DEVICES: dict[str, Device] = {
    entry.name: entry
    for entry in (
        Device(name="native", kind="cpu", summary="the machine's best kernels, all cores", environment={}),
        Device(
            name="native-1",
            kind="cpu",
            summary="the machine's best kernels, one thread",
            environment=_ONE_THREAD,
        ),
        Device(
            name="avx2",
            kind="cpu",
            summary="AVX2 kernels, one thread",
            environment={
                **_ONE_THREAD,
                "ATEN_CPU_CAPABILITY": "avx2",
                "ONEDNN_MAX_CPU_ISA": "AVX2",
                "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            },
            capability="AVX2",
        ),
        Device(
            name="sse41",
            kind="cpu",
            summary="SSE4.1 kernels and ATen's default ones, one thread",
            environment={
                **_ONE_THREAD,
                "ATEN_CPU_CAPABILITY": "default",
                "ONEDNN_MAX_CPU_ISA": "SSE41",
                "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            },
            capability="DEFAULT",
        ),
        Device(
            name="mkl-compatible",
            kind="cpu",
            summary="MKL's compatible mode, one code path for all processors; one thread",
            environment={**_ONE_THREAD, "MKL_CBWR": "COMPATIBLE"},
        ),
    )
}


def device(name: str) -> Device:
    """Return the device of that name; CallerError lists the known ones."""
    try:
        return DEVICES[name]
    except KeyError:
        raise CallerError(f"unknown device {name!r}; known: {', '.join(DEVICES)}") from None


def current_device() -> str:
    """Name of the device that this process was started as."""
    return os.environ.get(_NAME, "native")


def enter(name: str) -> None:
    """Make this process that device, by starting the same command again with its environment where it has another.

    Must be called before torch is imported. Does not return if the process is replaced.
    """
    wanted = device(name).process_environment()
    if "torch" in sys.modules:
        raise DeviceError(f"cannot become device {name}: torch is loaded already")
    if any(os.environ.get(key) != wanted.get(key) for key in (*_CONTROLLED, _NAME)):
        os.execve(sys.executable, [sys.executable, "-m", "analysis.cli", *sys.argv[1:]], wanted)


def run_worker(name: str, job: Mapping[str, Any], *, timeout: float = 3600) -> dict[str, Any]:
    """Run one job of ``inspector._worker`` in a process that is the named device and return its JSON result.

    Raises:
        DeviceError: the process broke, timed out or is not the device that it should be.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "inspector._worker"],
            input=json.dumps(job).encode(),
            capture_output=True,
            env=device(name).process_environment(),
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"device {name} gave no answer within {timeout:.0f} s") from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise DeviceError(f"device {name} broke: {lines[-1] if lines else f'exit code {done.returncode}'}")
    try:
        result = json.loads(done.stdout)
    except ValueError:
        raise DeviceError(f"device {name} gave no readable answer") from None
    if not isinstance(result, dict) or result.get("device") != name:
        raise DeviceError(f"device {name} gave an answer of another form")
    return result
