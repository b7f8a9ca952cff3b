"""The processes that replay: one for each device, kept for later jobs."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import IO, Any, Self

from firmware_sim import limits
from firmware_sim.errors import DeviceError, EvidenceError
from firmware_sim.evidence import canonical
from inspector.devices import Device, device

__all__ = ["DevicePool", "run_worker"]


class DevicePool:
    """Processes of ``inspector.replay._worker``, one for each device, started when first asked and kept for later jobs.

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
                line = process.stdout.readline(limits.WORKER_BYTES.most + 1)
            except BrokenPipeError:
                line = b""
            finally:
                timed_out = not timer.is_alive()
                timer.cancel()
            try:
                result = canonical.parse(line, most=limits.WORKER_BYTES)
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
            [sys.executable, "-m", "inspector.replay._worker"],
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
