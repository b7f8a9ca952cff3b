"""Where a provider takes tasks: it accepts an order, has its files sent, runs it, and answers for the run.

    task SHA256 LENGTH    a client names its order; answered with what is still to be sent, or how far the run came

A question about a task or its run goes to a desk of that run, which answers the client alone that ordered it. Tasks run
one after another. What is refused is signed, as any answer.

    TASKS/<sha256>/task.json, files/, run/    a task, and the run that it led to; when its client has asked last is when
                                              task.json was modified
    TASKS/done/<sha256>/task.json, manifest.json    of a task that was deleted: what its client signed, and the head
                                              that this provider signed

A task about which its client has asked nothing for a time (``Bounds.keep``) is deleted, with the answers about it. Who
asks about it then gets none, as from any provider that is gone; nothing is signed that could be held against it.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from firmware_sim import limits
from firmware_sim.errors import CallerError, ChipwitnessError, EvidenceError
from firmware_sim.evidence import SigningKey, VerifyingKey, canonical
from inspector.dispute.prover import SigningProver
from inspector.dispute.provider import desk_of
from inspector.wire.desk import Desk
from monitor.files import remove
from monitor.transcript import Manifest, RunFolder
from monitor.transcript.layout import MANIFEST
from monitor.transcript.orders import TASK, OrderFolder
from monitor.transcript.reader import read_manifest

__all__ = ["Bounds", "Reception", "Workshop"]

_QUESTION = re.compile(r"task ([0-9a-f]{64}) ([0-9]{1,12})", re.ASCII)
_DIGEST = re.compile("[0-9a-f]{64}", re.ASCII)
_TASKS, _DONE = "tasks", "done"
_WAITS = 600
"""Seconds for which a task whose files are not all there takes up a place, after its client has asked last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What a provider takes on.

    Attributes:
        flop: of all steps of a task together; None for no bound.
        bytes: in memory and on disk (``Order.size``); None for what the disk has free.
        tasks: that are sent, wait or run at once.
        keep: seconds for which a task is kept after its client has asked about it last, unless it waits or runs.
    """

    flop: int | None = None
    bytes: int | None = None
    tasks: int = 4
    keep: float = 30 * 86_400

    def check(self, order: OrderFolder, promised: int = 0) -> None:
        """CallerError where a task takes more, of what the disk has free but for what was promised to others."""
        free = max(shutil.disk_usage(order.folder).free - promised, 0)
        most = free if self.bytes is None else min(self.bytes, free)
        if self.flop is not None and order.order.flop > self.flop:
            raise CallerError(f"the task takes {order.order.flop} FLOP, but this provider accepts at most {self.flop}")
        if order.order.size > most:
            raise CallerError(f"the task takes {order.order.size} bytes, but this provider has room for {most}")


class Workshop(Protocol):
    """How a provider runs a task."""

    def carry_out(self, folder: Path) -> None:
        """Run the task of a folder to ``folder/run``; ChipwitnessError or OSError says why it could not."""

    def prover(self, folder: Path) -> tuple[RunFolder, SigningProver]:
        """The finished run of a task's folder, and what answers for it."""


@dataclass(slots=True)
class _Job:
    """A task: how far it came, the desk of its run once that is finished, and why it could not be run."""

    folder: Path
    length: int
    asked: float
    order: OrderFolder | None = None
    state: str = "receiving"
    failure: str = ""
    run: str = ""
    desk: Desk | None = None

    @property
    def waits(self) -> bool:
        """Whether it takes up a place."""
        is_sent = self.state == "receiving" and time.monotonic() - self.asked < _WAITS
        return is_sent or self.state in ("queued", "running")


@dataclass(slots=True)
class Reception:
    """Hands each question to the desk that answers it, and answers those about tasks itself.

    Args:
        folder: of the tasks.
        store: of questions and answers.
        clients: keys of those who may order.
        witnesses: whose word about the time of its answers it accepts, which it signs in each answer about a task.
    """

    folder: Path
    store: Path
    key: SigningKey
    clients: Collection[VerifyingKey]
    bounds: Bounds
    workshop: Workshop
    witnesses: Collection[VerifyingKey] = ()
    _jobs: dict[str, _Job] = field(default_factory=dict)
    _worker: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _desk: Desk = field(init=False)

    def __post_init__(self) -> None:
        """Go on with the tasks that are there: one that was interrupted or failed runs from its start again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._desk = Desk(self.store / _TASKS, self._answer, self.key, self.clients, "")
        self._forget()
        for place in sorted(self.folder.glob(f"*/{TASK}")):
            with suppress(ChipwitnessError):  # of a client that may order no longer
                order = OrderFolder(place.parent, *self.clients)
                job = _Job(place.parent, len(order.envelope), 0.0, order)
                self._jobs[order.digest] = job
                self._queue(job)

    def take(self, envelope: bytes) -> Iterator[bytes]:
        """As ``Desk.take``."""
        question = self._desk.opened(envelope)
        for task, job in self._jobs.items():
            if job.desk is not None and question.run in (task, job.run):
                os.utime(job.folder / TASK)
                return job.desk.take(envelope)
        return self._desk.take(envelope)

    def _forget(self) -> None:
        """Delete the tasks about which no one has asked for long, and answers about tasks as old as that."""
        ended, done = time.time() - self.bounds.keep, self.folder / _DONE
        for folder in list(self.folder.iterdir()):
            job = self._jobs.get(folder.name)
            if _DIGEST.fullmatch(folder.name) is None or (job is not None and job.waits) or _asked(folder) > ended:
                continue
            kept = done / folder.name
            for path in (folder / TASK, folder / "run" / MANIFEST):
                if path.is_file():
                    kept.mkdir(parents=True, exist_ok=True)
                    path.replace(kept / path.name)
            remove(folder)
            remove(self.store / folder.name)
            self._jobs.pop(folder.name, None)
        for path in (self.store / _TASKS).glob("*/*"):
            if path.stat().st_mtime < ended:
                remove(path)

    def close(self) -> None:
        """Begin no other task."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def wanted(self, name: str) -> tuple[Path, int] | None:
        """Place and length of a file that is to be sent, by its SHA-256; None for any other."""
        job = self._jobs.get(name)
        if job is not None and job.order is None:
            return job.folder / TASK, job.length
        for job in list(self._jobs.values()):
            if job.state == "receiving" and job.order is not None and name in job.order.order.files:
                return job.order.place(name), job.order.order.files[name]
        return None

    def _answer(self, text: str) -> bytes:
        asked = _QUESTION.fullmatch(text)
        if asked is None:
            raise EvidenceError(f"{text!a:.100} is not a question about a task")
        name, length = asked[1], limits.TRUST_BYTES.check(int(asked[2]))
        job = self._jobs.get(name)
        if job is None:
            self._forget()
            busy = sum(each.waits for each in self._jobs.values())
            if busy >= self.bounds.tasks:
                raise CallerError(f"this provider already has {busy} tasks to do, and accepts no more at the moment")
            job = self._jobs[name] = _Job(self.folder / name, length, 0.0)
            job.folder.mkdir(exist_ok=True)
        job.asked = time.monotonic()
        with suppress(FileNotFoundError):
            os.utime(job.folder / TASK)
        if job.order is None:
            job.length = length  # who has announced another one cannot keep this one out
        if job.state == "receiving":
            self._accept(job)
        if job.failure:
            raise CallerError(job.failure)
        return canonical.encode(self._stated(job))

    def _stated(self, job: _Job) -> dict[str, Any]:
        needs: list[tuple[str, int]] = []
        if job.order is None:
            needs = [(job.folder.name, job.length)]
        elif job.state == "receiving":
            needs = job.order.missing()
        steps = 0 if job.order is None else len(job.order.order.steps)
        accepted = sorted(each.key_id for each in self.witnesses)
        return {"state": job.state, "step": self._step(job), "of": steps, "needs": needs, "witnesses": accepted}

    def _step(self, job: _Job) -> int:
        """The last step that the head of the run counts, which this provider has signed."""
        try:
            return max(Manifest.open(read_manifest(job.folder / "run"), self.key.verifying).steps, 0)
        except ChipwitnessError:
            return 0

    def _accept(self, job: _Job) -> None:
        """Have a task run as soon as it is whole; CallerError where it is none, or takes too much."""
        if job.order is None and (job.folder / TASK).is_file():
            try:
                order = OrderFolder(job.folder, *self.clients)
                others = [each.order for each in self._jobs.values() if each.waits and each.order is not None]
                self.bounds.check(order, sum(each.order.size for each in others))
            except ChipwitnessError:
                del self._jobs[job.folder.name]
                shutil.rmtree(job.folder, ignore_errors=True)
                raise
            job.order = order
        self._queue(job)

    def _queue(self, job: _Job) -> None:
        if job.order is not None and not job.order.missing():
            job.state = "queued"
            self._worker.submit(self._carry_out, job, job.order)

    def _carry_out(self, job: _Job, order: OrderFolder) -> None:
        job.state = "running"
        try:
            if not self._is_finished(job):
                self.workshop.carry_out(job.folder)
            run, prover = self.workshop.prover(job.folder)
            job.desk = desk_of(run, prover, self.store / order.digest, [order.key], task=order.digest)
            job.run, job.state = run.manifest.run, "finished"
        except Exception as error:  # whatever stops a task, its client gets a line
            job.failure, job.state = f"the task could not be run: {error}"[:400], "failed"

    def _is_finished(self, job: _Job) -> bool:
        try:
            return Manifest.open(read_manifest(job.folder / "run"), self.key.verifying).finished
        except ChipwitnessError:
            return False


def _asked(folder: Path) -> float:
    """When a task's client has asked about it last; of one that was never sent, when it was announced."""
    try:
        return (folder / TASK).stat().st_mtime
    except OSError:
        return folder.stat().st_mtime
