"""Replay devices: the same machine computing with different kernels, each in a process of its own.

Kernel families are chosen by environment variables that must be set before torch is imported, so a device is entered
only by starting a process. A CUDA device keeps what it trains in its own memory; the host's part of such a process is
that of ``native``. Emulated devices add in an order that this machine does not have (``emulated``) and say so in their
name and kind. Each device reports the fingerprint of its native arithmetic; equal fingerprints mean that two devices do
not really differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, Self

from firmware_sim import bounds
from firmware_sim.errors import CallerError, DeviceError, EvidenceError
from firmware_sim.evidence import canonical

__all__ = ["DEVICES", "ORDER", "Device", "DevicePool", "current_device", "device", "enter", "run_worker"]

ORDER = "CHIPWITNESS_EMULATED_ORDER"
"""Environment variable that names the emulated order of a process."""
_ACCELERATOR = "CHIPWITNESS_ACCELERATOR"
"""As ``monitor.environment`` has it, which this module must not import: it would load torch."""
_CONTROLLED = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    ORDER,
    _ACCELERATOR,
)
_NAME = "CHIPWITNESS_DEVICE"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A named way to compute.

    Attributes:
        kind: ``cpu`` for kernels of this machine's processor, ``cuda`` for its graphics card, ``emulated`` for an order
            of additions that it does not have.
        environment: variables that select the kernels; all other controlled ones are unset.
        capability: what PyTorch must report after it was imported, or None where it depends on the machine.
    """

    name: str
    kind: str
    summary: str
    environment: Mapping[str, str]
    capability: str | None = None

    def missing(self) -> str | None:
        """Why this machine cannot be the device, or None; loads torch where that has to be asked."""
        if self.kind != "cuda":
            return None
        import torch

        return None if torch.cuda.is_available() else "torch finds no CUDA device"

    def process_environment(self) -> dict[str, str]:
        """Environment of a process that is to be this device."""
        kept = {name: value for name, value in os.environ.items() if name not in _CONTROLLED}
        return {**kept, **self.environment, _NAME: self.name}


def _emulated(order: str, summary: str) -> Device:
    environment = {**_ONE_THREAD, ORDER: order}
    return Device(name=f"emulated-{order}", kind="emulated", summary=f"emulated: {summary}", environment=environment)


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
        Device(name="cuda", kind="cuda", summary="the first CUDA device", environment={_ACCELERATOR: "cuda"}),
        _emulated("split-k", "K in four parts whose sums are added"),
        _emulated("tiles", "tiles of 96 × 256 × 96, added by falling K"),
        _emulated("no-fma", "term by term, product and sum rounded separately"),
        _emulated("tensor-core", "chunks of 8 exact products, FP32 sums truncated"),
        Device(
            name="emulated-accelerator",
            kind="emulated",
            summary="emulated: an accelerator's memory and code paths, K in four parts",
            environment={**_ONE_THREAD, ORDER: "split-k", _ACCELERATOR: "emulated"},
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

    Must be called before torch is imported. Does not return if the process is replaced. An emulated device computes in
    this thread only. DeviceError where the machine has no such device.
    """
    wanted = device(name).process_environment()
    if "torch" in sys.modules:
        raise DeviceError(f"cannot become device {name}: torch is loaded already")
    if any(os.environ.get(key) != wanted.get(key) for key in (*_CONTROLLED, _NAME)):
        os.execve(sys.executable, [sys.executable, "-m", "analysis.cli", *sys.argv[1:]], wanted)
    if ORDER in wanted or _ACCELERATOR in wanted:
        from inspector.devices.emulated import install_from_environment
        from monitor.environment import accelerator

        install_from_environment()
        accelerator()


class DevicePool:
    """Processes of ``inspector._worker``, one for each device, started when first asked and kept for later jobs.

    Jobs for different devices may run at the same time; jobs for one device wait for each other.
    """

    def __init__(self, *, timeout: float = 3600) -> None:
        self._timeout = timeout
        self._lock = threading.Lock()
        self._workers: dict[str, _Worker] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            for worker in self._workers.values():
                worker.close()
            self._workers.clear()

    def run(self, name: str, job: Mapping[str, Any]) -> dict[str, Any]:
        """Run one job on the named device and return its JSON result.

        Raises:
            DeviceError: the process broke, timed out or is not the device that it should be.
        """
        with self._lock:
            worker = self._workers.setdefault(name, _Worker(device(name), self._timeout))
        result = worker.run(job)
        if result.get("device") != name:
            raise DeviceError(f"device {name} gave an answer of another form")
        return result


def run_worker(name: str, job: Mapping[str, Any], *, timeout: float = 3600) -> dict[str, Any]:
    """Run one job in a process of its own; as ``DevicePool.run``."""
    with DevicePool(timeout=timeout) as pool:
        return pool.run(name, job)


class _Worker:
    """One process: a line of JSON in, a line of JSON out."""

    def __init__(self, entry: Device, timeout: float) -> None:
        self._device = entry
        self._timeout = timeout
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            process = self._process or self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(self._timeout, process.kill)
            timer.start()
            try:
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline(bounds.WORKER_BYTES.most + 1)
            except BrokenPipeError:
                line = b""
            finally:
                timed_out = not timer.is_alive()
                timer.cancel()
            try:
                result = canonical.parse(line, most=bounds.WORKER_BYTES)
            except EvidenceError:
                raise self._failure(timed_out) from None
            if not isinstance(result, dict):
                raise self._failure(timed_out)
            return result

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
            self._process.stdout.close()
            self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def _start(self) -> subprocess.Popen[bytes]:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "inspector._worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=self._device.process_environment(),
        )
        return self._process

    def _failure(self, timed_out: bool) -> DeviceError:
        """End the process and say why it gave no answer."""
        assert self._process is not None
        assert self._errors is not None
        self._process.kill()
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        self.close()
        if timed_out:
            return DeviceError(f"device {self._device.name} gave no answer within {self._timeout:.0f} s")
        return DeviceError(f"device {self._device.name} broke: {lines[-1] if lines else f'exit code {code}'}")
