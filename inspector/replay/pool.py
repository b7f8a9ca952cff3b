"""The processes that replay, kept for later jobs, and how a job is dealt out to several of them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import IO, Any, Protocol, Self

from firmware_sim import limits
from firmware_sim.errors import CallerError, DeviceError, EvidenceError
from firmware_sim.evidence import canonical
from inspector.devices import Device, device

__all__ = ["DevicePool", "Executor", "run_worker"]

_MOST_WORKERS = 256
_PARTS = 4
"""A job that replays segments is cut into so many parts for each process, so that slow ones do not end it late."""
_LINGER = 0.2
"""Seconds that a part waits for a process of its device before another one is started, which takes seconds."""
_ATTEMPTS = 2
_SAME = ("device", "fingerprint", "settings", "versions")
"""What all parts of a job must agree on."""


class Executor(Protocol):
    """What runs jobs on devices."""

    def prepare(self, names: Sequence[str]) -> None:
        """Be told which devices will be asked soon; CallerError where there is no such device."""

    def run(self, name: str, job: Mapping[str, Any]) -> dict[str, Any]:
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
        if workers is not None and not 1 <= workers <= _MOST_WORKERS:
            raise CallerError(f"workers must lie in 1 … {_MOST_WORKERS}, not {workers}")
        self._timeout, self._workers = timeout, workers
        threads = threads or max(1, (os.cpu_count() or 1) // (workers or 1))
        self._threads = [] if workers is None else [str(threads)]
        self._changed = threading.Condition()
        self._processes: list[_Worker] = []
        self._waiting: Counter[str] = Counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            for worker in self._processes:
                worker.close()
            self._processes.clear()

    def prepare(self, names: Sequence[str]) -> None:
        """Start a process for each of these devices, as many as may run, while the caller does something else.

        Raises:
            CallerError: there is no such device.
        """
        for name in dict.fromkeys(names[: self._workers]):
            with self._changed:
                worker = self._claim(device(name), 0)
                if worker is not None:
                    worker.start()

    def run(self, name: str, job: Mapping[str, Any]) -> dict[str, Any]:
        """Run one job on the named device and return its JSON result.

        A process that dies is replaced, once for each part of the job.

        Raises:
            DeviceError: the process broke again, timed out or is not the device that it should be.
        """
        entry, parts = device(name), self._parts(job)
        if len(parts) == 1:
            return self._run(entry, parts[0])
        with ThreadPoolExecutor(max_workers=self._workers) as threads:
            return _joined(name, list(threads.map(lambda part: self._run(entry, part), parts)))

    def _parts(self, job: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The job cut into runs of neighbouring segments; a job of another kind is not cut."""
        segments = job.get("segments") if job.get("action") == "replay" else None
        if self._workers in (None, 1) or not isinstance(segments, list) or not segments:
            return [job]
        count = min(len(segments), _PARTS * self._workers)
        cuts = [len(segments) * number // count for number in range(count + 1)]
        name = uuid.uuid4().hex
        return [{**job, "part_of": name, "segments": segments[a:b]} for a, b in pairwise(cuts)]

    def _run(self, entry: Device, job: Mapping[str, Any]) -> dict[str, Any]:
        with self._process(entry) as worker:
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    result = worker.run(job)
                    break
                except _Died:
                    if attempt == _ATTEMPTS:
                        raise
        if result.get("device") != entry.name:
            raise DeviceError(f"device {entry.name} gave an answer of another form")
        return result

    @contextlib.contextmanager
    def _process(self, entry: Device) -> Iterator[_Worker]:
        """A process of the device that nobody else uses meanwhile."""
        asked = time.monotonic()
        with self._changed:
            self._waiting[entry.name] += 1
            while (worker := self._claim(entry, time.monotonic() - asked)) is None:
                self._changed.wait(_LINGER)
            worker.busy = True
            self._waiting[entry.name] -= 1
        try:
            yield worker
        finally:
            with self._changed:
                worker.busy = False
                self._changed.notify_all()

    def _claim(self, entry: Device, waited: float) -> _Worker | None:
        """A free process of the device, or a new one where there may be and it is worth it; None to wait."""
        mine = [worker for worker in self._processes if worker.device is entry]
        if self._workers is not None and sum(worker.busy for worker in self._processes) >= self._workers:
            return None
        free = next((worker for worker in mine if not worker.busy), None)
        if free is not None:
            return free
        another = self._workers is not None and waited >= _LINGER and self._waiting[entry.name] >= len(mine)
        if mine and not another:
            return None
        worker = _Worker(entry, self._timeout, self._threads)
        self._processes.append(worker)
        return worker


def run_worker(name: str, job: Mapping[str, Any], *, timeout: float = 3600) -> dict[str, Any]:
    """Run one job in a process of its own; as ``DevicePool.run``."""
    with DevicePool(timeout=timeout) as pool:
        return pool.run(name, job)


def _joined(name: str, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result of the parts' results; the seconds are those of all processes together.

    Raises:
        DeviceError: the processes do not compute alike.
    """
    first = results[0]
    if any(each.get(key) != first.get(key) for each in results for key in _SAME):
        raise DeviceError(f"device {name}: its processes do not compute alike")
    joined = {**first, "seconds": sum(each["seconds"] for each in results)}
    failed = next((each for each in results if "evidence_error" in each), None)
    if failed is not None:
        joined.pop("replays", None)
        return {**joined, "evidence_error": failed["evidence_error"]}
    return {**joined, "replays": [replay for each in results for replay in each["replays"]]}


class _Died(DeviceError):
    """A process ended before it gave an answer."""


class _Worker:
    """One process: a line of JSON in, a line of JSON out.

    Attributes:
        busy: somebody uses it; the pool's own mark.
    """

    def __init__(self, entry: Device, timeout: float, threads: Sequence[str]) -> None:
        self.device, self.busy = entry, False
        self._timeout, self._threads = timeout, threads
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
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
        return result

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

    def start(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "inspector.replay._worker", *self._threads],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=self.device.process_environment(),
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
        text = f"device {self.device.name} broke: {lines[-1] if lines else f'exit code {code}'}"
        return _Died(text) if code < 0 else DeviceError(text)
