"""How jobs are dealt out to workers: one thread, however many jobs, parts and workers there are.

What the workers are is a crew's matter: processes of this machine (``pool``), nodes of a Ray cluster (``ray_pool``), or
workers that a measurement makes up (``tests.measurements.cluster``).
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from firmware_sim.errors import DeviceError
from firmware_sim.evidence.canonical import JsonObject

__all__ = ["Answer", "Crew", "Died", "Job", "Lacking", "Refused", "Scheduler", "Worker", "at_once", "cut"]

_LINGER = 0.2
"""Seconds that a job waits for workers that know its device before another is set up for it, which takes seconds."""
_SAME = ("device", "fingerprint", "settings", "versions")
"""What all parts of a job must agree on."""

Job = Mapping[str, Any]
"""What a device's process is to do, as JSON: its ``action``, and what that takes."""
Answer = JsonObject
"""What it answered, which no one has checked yet."""
Worker = Callable[[str, JsonObject], Answer]
"""Runs a job on the named device; ``inspector.replay.pool.run_worker`` in production."""
W = TypeVar("W", bound=Hashable)
Entry = TypeVar("Entry")
Made = TypeVar("Made")


class Died(DeviceError):
    """A worker was lost before it gave an answer."""


class Refused(DeviceError):
    """A worker is not the device that was asked for, and computed nothing."""


class Lacking(Refused):
    """A worker has not the run that a job is about, or a damaged copy of it; it takes parts of jobs about others."""


class Crew(Protocol[W]):
    """Workers, each of which takes one part at a time; only the scheduler's thread calls these."""

    def hire(self, name: str) -> W | None:
        """One more worker that takes parts for this device; None where there is none now."""

    def suits(self, worker: W, name: str) -> bool:
        """Whether an idle worker may take a part for this device."""

    def begin(self, worker: W, name: str, part: Job) -> Future[Answer]:
        """Begin a part; the future ends with its answer, with Died, Refused, or the error that ends the job."""

    def stays(self, worker: W) -> bool:
        """Whether a worker that was lost takes parts all the same, and if not, replace it where that can be done."""

    def hopeless(self, name: str) -> str | None:
        """Why no worker will ever take a part for this device, asked while none is at work; None to wait."""


class Scheduler(Generic[W]):
    """Hands the parts of jobs to idle workers, those first that know the device, and puts the answers together.

    A worker that is new to a device is used where no other knows it, or where a job has waited and there are more parts
    than workers that do.

    Args:
        parts: into how many a job of segments is cut at the most; None for a part for each segment.
        attempts: how often a part is begun whose workers are lost.
    """

    def __init__(self, crew: Crew[W], *, parts: int | None, attempts: int = 2) -> None:
        self._crew, self._parts, self._attempts = crew, parts, attempts
        self._events: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._state = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._jobs: set[_Job] = set()
        self._waiting: dict[str, deque[_Job]] = {}
        self._left: Counter[str] = Counter()
        self._idle: dict[W, None] = {}
        self._warm: defaultdict[str, dict[W, None]] = defaultdict(dict)
        self._knows: defaultdict[W, set[str]] = defaultdict(set)
        self._known: Counter[str] = Counter()
        self._refused: defaultdict[str, set[W]] = defaultdict(set)
        self._lacks: defaultdict[str, set[W]] = defaultdict(set)
        self._running: set[W] = set()
        self._lost: set[W] = set()

    def submit(self, name: str, job: Job) -> Future[Answer]:
        """Enter a job; its result comes with the future, or the DeviceError that ended it."""
        entered = _Job(name, job, self._parts)
        with self._state:
            if self._closed:
                raise DeviceError("the replay processes were closed")
            self._jobs.add(entered)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="replay-scheduler", daemon=True)
                self._thread.start()
        self._events.put(partial(self._enter, entered))
        return entered.future

    def wake(self) -> None:
        """Ask the crew again, which has changed."""
        self._events.put(lambda: None)

    def lose(self, worker: W) -> None:
        """Say that a worker was lost; one at work answers for itself first."""
        self._events.put(partial(self._missed, worker))

    def close(self) -> None:
        """Deal out nothing more; jobs that are not done end with DeviceError."""
        with self._state:
            self._closed = True
            thread = self._thread
        self._events.put(lambda: None)
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while not self._closed:
            try:
                event = self._events.get(timeout=_LINGER if self._waiting else None)
            except Empty:
                event = None
            try:
                if event is not None:
                    event()
                self._deal()
                self._give_up()
            except Exception as error:  # no caller may wait for ever
                self._fail(error)
        self._fail(DeviceError("the replay processes were closed"))

    def _fail(self, error: Exception) -> None:
        for job in list(self._jobs):
            self._end(job, error)

    def _end(self, job: _Job, error: BaseException | None) -> None:
        self._jobs.discard(job)
        if error is None:
            job.future.set_result(job.answers.joined())
        else:
            job.future.set_exception(error)

    def _enter(self, job: _Job) -> None:
        self._left[job.name] += job.left
        self._waiting.setdefault(job.name, deque()).append(job)

    def _deal(self) -> None:
        for name in list(self._waiting):
            jobs, served = self._waiting[name], False
            while jobs:
                job = jobs[0]
                if job.future.done():
                    self._left[name] -= job.left
                    jobs.popleft()
                    continue
                worker = self._claim(name, job)
                if worker is None:
                    break
                served = True
                task = job.take()
                self._left[name] -= 1
                jobs.popleft()
                if job.left:
                    jobs.append(job)  # jobs take turns
                self._begin(worker, task)
            if not jobs:
                del self._waiting[name]
            elif served:
                self._waiting[name] = self._waiting.pop(name)  # and devices

    def _claim(self, name: str, job: _Job) -> W | None:
        lacking = self._lacks[job.run]
        worker: W | None = next((each for each in reversed(self._warm[name]) if each not in lacking), None)
        if worker is None:
            known = self._known[name] - sum(name in self._knows.get(each, ()) for each in lacking)
            if known and (time.monotonic() - job.asked < _LINGER or self._left[name] < known):
                return None
            refused = self._refused[name] | lacking
            suiting = (each for each in self._idle if each not in refused and self._crew.suits(each, name))
            worker = next(suiting, None)
            worker = self._crew.hire(name) if worker is None else worker
        if worker is not None:
            self._take_from_idle(worker)
        return worker

    def _take_from_idle(self, worker: W) -> None:
        self._idle.pop(worker, None)
        for name in self._knows[worker]:
            self._warm[name].pop(worker, None)

    def _begin(self, worker: W, task: _Task) -> None:
        name = task.job.name
        if name not in self._knows[worker]:
            self._knows[worker].add(name)
            self._known[name] += 1
        self._running.add(worker)
        try:
            future = self._crew.begin(worker, name, task.part)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(lambda done: self._events.put(partial(self._finished, worker, task, done)))

    def _finished(self, worker: W, task: _Task, done: Future[Answer]) -> None:
        self._running.discard(worker)
        job = task.job
        try:
            error = done.exception()
        except CancelledError as cancelled:
            error = cancelled
        task.attempts += isinstance(error, Died)
        self._release(worker, job, error)
        if job.future.done():
            return
        if isinstance(error, Refused) or (isinstance(error, Died) and task.attempts < self._attempts):
            self._again(task)
            return
        try:
            if error is not None:
                raise error
            job.answers.add(task.number, done.result())
        except BaseException as failure:
            self._end(job, failure)
            return
        if job.answers.complete:
            self._end(job, None)

    def _release(self, worker: W, job: _Job, error: BaseException | None) -> None:
        """Note what a worker's last part says of it, and let it wait for the next one where it stays."""
        stays = True
        if isinstance(error, Died) or worker in self._lost:
            self._lost.discard(worker)
            stays = self._crew.stays(worker)
        if isinstance(error, Lacking):
            self._lacks[job.run].add(worker)
        elif isinstance(error, Refused):
            self._refused[job.name].add(worker)
            self._knows[worker].discard(job.name)
            self._known[job.name] -= 1
        if not stays:
            self._forget(worker)
            return
        self._idle[worker] = None
        for name in self._knows[worker]:
            self._warm[name][worker] = None

    def _again(self, task: _Task) -> None:
        job = task.job
        job.again.append(task)
        self._left[job.name] += 1
        if job.left == 1:
            self._waiting.setdefault(job.name, deque()).appendleft(job)

    def _missed(self, worker: W) -> None:
        if worker in self._running:
            self._lost.add(worker)
        elif not self._crew.stays(worker):
            self._forget(worker)

    def _forget(self, worker: W) -> None:
        self._take_from_idle(worker)
        for name in self._knows.pop(worker, ()):
            self._known[name] -= 1

    def _give_up(self) -> None:
        if self._running:
            return
        for name, jobs in self._waiting.items():
            text = self._crew.hopeless(name)
            if text is not None and not jobs[0].future.done():
                self._end(jobs[0], DeviceError(text))  # those behind it may be about another run


def cut(job: Job, most: int | None) -> tuple[int, Iterator[Job]]:
    """A job as runs of neighbouring segments: how many, and these one by one; a job of another kind is not cut.

    Args:
        most: how many there may be; None for one for each segment.
    """
    segments = job.get("segments") if job.get("action") == "replay" else None
    count = len(segments) if isinstance(segments, list) else 1
    count = count if most is None else min(count, most)
    if segments is None or count <= 1:
        return 1, iter([job])
    name, total = uuid.uuid4().hex, len(segments)
    runs = ((total * number // count, total * (number + 1) // count) for number in range(count))
    return count, ({**job, "part_of": name, "segments": segments[a:b]} for a, b in runs)


@dataclass(slots=True, eq=False)
class _Task:
    """A part of a job, and how many workers were lost with it."""

    job: _Job
    number: int
    part: Job
    attempts: int = 0


class _Job:
    """A job whose parts are made when a worker takes them.

    Attributes:
        run: the manifest that is asked for, and where it lies.
        again: parts that were begun and have to be begun again.
    """

    def __init__(self, name: str, job: Job, most: int | None) -> None:
        self.name, self.asked = name, time.monotonic()
        self.run = f"{job.get('manifest')} {job.get('run')}"
        self.future: Future[Answer] = Future()
        self.again: list[_Task] = []
        self._count, self._parts = cut(job, most)
        self._begun = 0
        self.answers = _Answers(name, self._count)

    @property
    def left(self) -> int:
        """Parts that no worker has."""
        return self._count - self._begun + len(self.again)

    def take(self) -> _Task:
        if self.again:
            return self.again.pop()
        self._begun += 1
        return _Task(self, self._begun - 1, next(self._parts))


class _Answers:
    """The parts' answers as one; of each no more is kept than its replays. Seconds are those of all workers."""

    def __init__(self, name: str, count: int) -> None:
        self._name, self._count, self._came = name, count, 0
        self._first: Answer | None = None
        self._seconds = 0.0
        self._replays: list[list[Any]] = [[]] * count
        self._failed: tuple[int, Any] | None = None

    @property
    def complete(self) -> bool:
        return self._came == self._count

    def add(self, number: int, answer: Answer) -> None:
        """DeviceError where an answer has another form, or the workers do not compute alike."""
        if answer.get("device") != self._name:
            raise DeviceError(f"device {self._name} gave a malformed answer")
        self._came += 1
        if self._count == 1:
            self._first = answer
            return
        replays, failed = answer.get("replays"), answer.get("evidence_error")
        if (failed is None and not isinstance(replays, list)) or not isinstance(answer.get("seconds"), (int, float)):
            raise DeviceError(f"device {self._name} gave a malformed answer")
        if self._first is None:
            self._first = {key: value for key, value in answer.items() if key not in ("replays", "evidence_error")}
        if any(answer.get(key) != self._first.get(key) for key in _SAME):
            raise DeviceError(f"device {self._name}: its processes do not all compute the same bits")
        self._seconds += answer["seconds"]
        if failed is not None:
            self._failed = min(self._failed or (number, failed), (number, failed))
        elif isinstance(replays, list):
            self._replays[number] = replays

    def joined(self) -> Answer:
        """One answer of all of them."""
        assert self._first is not None
        if self._count == 1:
            return self._first
        joined = {**self._first, "seconds": self._seconds}
        if self._failed is not None:
            return {**joined, "evidence_error": self._failed[1]}
        return {**joined, "replays": [replay for each in self._replays for replay in each]}


def at_once(work: Callable[[Entry], Made], entries: Iterable[Entry]) -> list[Made]:
    """Do all of this at the same time, in threads that mostly wait; an interrupt does not wait for them."""
    threads = ThreadPoolExecutor(max_workers=os.cpu_count() or 1)
    try:
        return list(threads.map(work, entries))
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
