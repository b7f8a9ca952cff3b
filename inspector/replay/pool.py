"""The processes that replay, kept for later jobs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Protocol, Self

from firmware_sim import limits
from firmware_sim.errors import CallerError, DeviceError, EvidenceError, Unreadable, lacks_memory
from firmware_sim.evidence import canonical
from inspector.devices import DEVICES, Device, device
from inspector.replay.scheduler import Answer, Died, Job, Scheduler
from monitor import processes

__all__ = ["MOST_WORKERS", "DevicePool", "Executor", "run_worker"]

MOST_WORKERS = 256
"""Processes of one machine that replay at a time."""
_PARTS = 16
"""A job that replays segments is cut into so many parts for each process, so that slow ones do not end it late."""
_LAST_LINES = 100
"""Last lines of a process that broke in which memory is looked for: a library's own backtrace may follow."""


class Executor(Protocol):
    """What runs jobs on devices."""

    def prepare(self, names: Sequence[str]) -> None:
        """Learn which devices will be asked soon; CallerError where there is no such device."""

    def run(self, name: str, job: Job) -> Answer:
        """Run one job on the named device and return its JSON result; DeviceError where that cannot be had."""


class DevicePool:
    """Processes of ``inspector.replay._worker``, started when first asked for and kept for later jobs.

    Args:
        workers: so many processes replay at a time, and a job's segments are dealt out to them; None for one process
            with all cores for each device, all of them at the same time.
        threads: of each of these workers; None for its share of the cores.
        timeout: seconds for a job, or the part of it that one process takes.

    Raises:
        CallerError: the number of workers is out of range.
    """

    def __init__(self, *, workers: int | None = None, threads: int | None = None, timeout: float = 3600) -> None:
        if workers is not None and not 1 <= workers <= MOST_WORKERS:
            raise CallerError(f"workers must lie in 1 … {MOST_WORKERS}, not {workers}")
        self._workers = workers
        threads = threads or max(1, (os.cpu_count() or 1) // (workers or 1))
        self._crew = _Processes(workers, timeout, [] if workers is None else [str(threads)])
        self._scheduler = Scheduler(self._crew, parts=1 if workers in (None, 1) else _PARTS * (workers or 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._scheduler.close()
        self._crew.close()

    def prepare(self, names: Sequence[str]) -> None:
        """Start a process for each of these devices, as many as may run, while the caller does something else.

        Raises:
            CallerError: there is no such device.
        """
        for entry in [device(name) for name in dict.fromkeys(names[: self._workers])]:
            self._crew.prepare(entry)

    def run(self, name: str, job: Job) -> Answer:
        """Run one job on the named device and return its JSON result.

        A process that dies is replaced, once for each part of the job.

        Raises:
            CallerError: there is no such device.
            Unreadable: the run, as it lies here by now, is not what was verified.
            DeviceError: the process broke again, timed out or is not the device that it should be.
        """
        return self._scheduler.submit(device(name).name, job).result()


def run_worker(name: str, job: Job, *, timeout: float = 3600) -> Answer:
    """Run one job in a separate process; as ``DevicePool.run``."""
    with DevicePool(timeout=timeout) as pool:
        return pool.run(name, job)


class _Place:
    """One of those that replay at a time, with a process for each device that it was asked to be.

    Attributes:
        device: the only one that it may be, or None.
    """

    def __init__(self, only: str | None) -> None:
        self.device = only
        self.processes: dict[str, _Worker] = {}


class _Processes:
    """A crew of this machine's processes; a thread waits for each that is at work."""

    def __init__(self, workers: int | None, timeout: float, threads: Sequence[str]) -> None:
        self._workers, self._timeout, self._arguments = workers, timeout, threads
        self._lock = threading.Lock()
        self._places: list[_Place] = []
        self._ahead: dict[str, _Worker] = {}
        self.processes: list[_Worker] = []
        self._threads = ThreadPoolExecutor(max_workers=workers or len(DEVICES), thread_name_prefix="replay")

    def close(self) -> None:
        for worker in self.processes:
            worker.kill()
        self._threads.shutdown()
        for worker in self.processes:
            worker.close()
        self.processes.clear()

    def prepare(self, entry: Device) -> None:
        with self._lock:
            if any(worker.device is entry for worker in self.processes):
                return
            worker = self._ahead[entry.name] = self._new(entry)
            worker.start()

    def _new(self, entry: Device) -> _Worker:
        worker = _Worker(entry, self._timeout, self._arguments)
        self.processes.append(worker)
        return worker

    def hire(self, name: str) -> _Place | None:
        if self._workers is None:
            if any(place.device == name for place in self._places):
                return None
        elif len(self._places) >= self._workers:
            return None
        place = _Place(name if self._workers is None else None)
        self._places.append(place)
        return place

    def suits(self, worker: _Place, name: str) -> bool:
        return worker.device in (None, name)

    def begin(self, worker: _Place, name: str, part: Job) -> Future[Answer]:
        with self._lock:
            if name not in worker.processes:
                ahead = self._ahead.pop(name) if name in self._ahead else None
                worker.processes[name] = ahead or self._new(device(name))
        return self._threads.submit(worker.processes[name].run, part)

    def stays(self, worker: _Place) -> bool:
        return True  # its process is started again

    def hopeless(self, name: str) -> str | None:
        return None


class _Worker:
    """One process: a line of JSON in, a line of JSON out."""

    def __init__(self, entry: Device, timeout: float, threads: Sequence[str]) -> None:
        self.device, self._ended = entry, False
        self._timeout, self._threads = timeout, threads
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._place: tempfile.TemporaryDirectory[str] | None = None

    def run(self, job: Job) -> Answer:
        process = self.start()
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
        if "unreadable" in result:
            raise Unreadable(str(result["unreadable"]))
        return result

    def kill(self) -> None:
        """End the process for good; a caller that waits for its answer learns of it."""
        self._ended, process = True, self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.kill()  # it waits for a job, and holds nothing
            self._process.wait()
            self._process.stdout.close()
            self._process = None
        if self._errors is not None:
            self._errors.close()
            self._errors = None
        if self._place is not None:
            self._place.cleanup()
            self._place = None

    def start(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        if self._ended:
            raise DeviceError(f"device {self.device.name} was stopped")
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._place = tempfile.TemporaryDirectory(prefix="chipwitness-", ignore_cleanup_errors=True)
        self._process = processes.start(
            processes.python("inspector.replay._worker", *self._threads),
            self._place.name,
            self.device.variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
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
            return DeviceError(f"device {self.device.name} gave no answer within {self._timeout:.0f} s")
        said = lines[-1] if lines else f"exit code {code}"
        if any(map(lacks_memory, lines[-_LAST_LINES:])):
            said = "there is not enough memory for it"
        elif code < 0:
            name = signal.Signals(-code).name
            said = f"it was ended by {name}"
            if name == "SIGKILL":
                said += ", as happens where memory is short"
        text = f"device {self.device.name} broke: {said}"
        return Died(text) if code < 0 else DeviceError(text)
