"""Replays on the nodes of a Ray cluster. Ray is an optional dependency: ``pip install chipwitness[ray]``.

Who holds a cluster's token runs code on its nodes, and a node's answers are read by Ray in this process: the nodes are
the inspector's own. What they compute is compared with this machine: each tells its device's fingerprint first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import ModuleType
from typing import Any, Self

from firmware_sim import limits
from firmware_sim.errors import CallerError, DeviceError, EvidenceError
from firmware_sim.evidence import canonical
from firmware_sim.folders import in_empty_folder
from inspector.devices import DEVICES, device
from inspector.replay import _ray_access as access
from inspector.replay._ray_seat import Seat
from inspector.replay.pool import run_worker
from inspector.replay.scheduler import Answer, Died, Job, Lacking, Refused, Scheduler
from inspector.replay.work import open_job_run

__all__ = ["RayPool"]

_ATTEMPTS = 3
"""How often a segment is begun whose Ray worker is lost: with a node, those are lost too that took over from others."""
_ROUNDS = 12
"""How often Ray is asked in vain to replace what was lost: for a while it places actors on a node that is gone."""
_PAUSES = (0.2, 8.0)
"""Seconds before the first of these and before the later ones; each takes twice as long as the one before."""
_PATIENCE = 120.0
"""Seconds to wait for a first or another Ray worker where none is at work."""


class RayPool:
    """A Ray cluster as an executor: each segment is a separate task, taken by a device process on a node.

    Args:
        address: HOST:PORT of the cluster's head; this machine is one of its nodes.
        workers: so many replay at a time; None for one for each processor that the cluster has.
        timeout: seconds for a segment.

    Raises:
        CallerError: Ray is not installed; there is no such cluster, it does not let this process in, or it has machines
            besides this one and asks for no token.
        DeviceError: it has no processor to give.
    """

    def __init__(self, address: str, *, workers: int | None = None, timeout: float = 3600) -> None:
        if workers is not None and workers < 1:
            raise CallerError(f"workers must be at least 1, not {workers}")
        self._ray = _connected(address)
        try:
            self._seats = _Seats(self._ray, address, workers, timeout)
        except BaseException:
            self._ray.shutdown()
            raise
        self._scheduler = Scheduler(self._seats, parts=None, attempts=_ATTEMPTS)
        self._seats.open(self._scheduler)
        self._asking = ThreadPoolExecutor(max_workers=len(DEVICES), thread_name_prefix="reference")
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._scheduler.close()
        self._asking.shutdown()
        self._seats.close()
        self._ray.shutdown()

    @property
    def answered(self) -> int:
        """How many segments, or jobs of other kinds, nodes have answered."""
        return self._seats.answered

    def prepare(self, names: Sequence[str]) -> None:
        """Ask a process of this machine what each of these devices is, while the caller does something else.

        Raises:
            CallerError: there is no such device.
        """
        for name in [device(name).name for name in dict.fromkeys(names)]:
            with self._lock:
                if name not in self._seats.wanted:
                    self._seats.wanted[name] = self._asking.submit(run_worker, name, {"action": "fingerprint"})

    def run(self, name: str, job: Job) -> Answer:
        """Run one job on the named device and return its JSON result.

        A segment whose Ray worker or node is lost is begun again elsewhere, twice at the most; a node whose device has
        another fingerprint than this machine's, or whose copy of the run is damaged or is not there, takes no part, and
        ``dropped`` in the result names it. What a node finds wrong, this machine repeats on its own copy.

        Raises:
            CallerError: there is no such device.
            DeviceError: this machine or no node is that device, a device broke, or no node has the run as it is here.
        """
        self.prepare([name])
        self._seats.wanted[name].result()
        found = self._scheduler.submit(name, job).result()
        if _is_against(job, found):
            found = run_worker(name, job)
        return {**found, "dropped": list(self._seats.refusals.get(name, ()))}


def _is_against(job: Job, found: Mapping[str, Any]) -> bool:
    """Whether a node found anything wrong with a run, or reached another step than its lab committed."""
    if "evidence_error" in found or any(each["contradiction"] for each in found.get("replays", ())):
        return True
    if "replays" not in found:
        return False
    run = open_job_run(dict(job))
    leaves = [(at, leaf) for each in found["replays"] for at, leaf in enumerate(each["leaves"], each["segment"][1] + 1)]
    return any(canonical.encode(leaf) != run.leaf(at).encoded() for at, leaf in leaves)


def _connected(address: str) -> ModuleType:
    """Ray, connected to the cluster."""
    try:
        import ray
    except ImportError:
        raise CallerError("--ray needs Ray: pip install 'chipwitness[ray]'") from None
    host, _ = access.read_address(address)
    access.require_token(host)
    if ray.is_initialized():
        raise CallerError("this process is connected to a Ray cluster already")
    _keep_from_output(ray)
    try:
        with in_empty_folder():  # Ray's workers look for modules in the folder in which this process is now
            ray.init(address, logging_level=logging.CRITICAL, log_to_driver=False)
    except Exception as error:
        raise CallerError(f"the Ray cluster at {address} does not let this process in: {_line(error)}") from None
    found: ModuleType = ray
    return found


def _keep_from_output(ray: ModuleType) -> None:
    """Ray writes of its workers to the standard output, where a command's JSON goes, and has no setting against it."""
    worker: Any = getattr(getattr(ray, "_private", None), "worker", None)
    if worker is not None and hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


def _line(error: object) -> str:
    """The first line of what Ray says."""
    lines = str(error).strip().splitlines()
    return ascii(lines[0].strip())[1:-1] if lines else type(error).__name__


class _Place:
    """A Ray actor that has said where it is."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor


class _Seats:
    """A crew of Ray actors, each on one processor. Ray places them, and says when one is lost."""

    def __init__(self, ray: ModuleType, address: str, workers: int | None, timeout: float) -> None:
        self.wanted: dict[str, Future[Answer]] = {}
        self._ray, self._address, self._timeout = ray, address, timeout
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self._apart = False
        for node in nodes:
            access.require_token(node["NodeManagerAddress"])
            self._apart = self._apart or not access.is_here(node["NodeManagerAddress"])
        count = sum(int(node["Resources"].get("CPU", 0)) for node in nodes)
        count = count if workers is None else min(count, workers)
        if not count:
            raise DeviceError(f"the Ray cluster at {address} has no free processor")
        self._kind = ray.remote(Seat)
        self._count = count
        self._owed = self._rounds = 0
        self._due = 0.0
        self._lock = threading.Lock()
        self._coming: set[_Place] = set()
        self._ready: deque[_Place] = deque()
        self._there: set[_Place] = set()
        self._since = time.monotonic()
        self.answered = 0
        self._lost = ""
        self.refusals: dict[str, dict[str, None]] = {}

    def open(self, scheduler: Scheduler[_Place]) -> None:
        """Ask Ray for the actors; the scheduler hears of each that comes and of each that is lost."""
        self._scheduler = scheduler
        for _ in range(self._count):
            self._call()

    def close(self) -> None:
        for place in [*self._coming, *self._there]:
            with contextlib.suppress(Exception):
                self._ray.kill(place.actor)

    def _call(self) -> None:
        options = {"num_cpus": 1, "max_concurrency": 2, "scheduling_strategy": "SPREAD"}
        place = _Place(self._kind.options(**options).remote(self._timeout))
        with self._lock:
            self._coming.add(place)
            self._since = time.monotonic()
        place.actor.node.remote().future().add_done_callback(partial(self._came, place))

    def _came(self, place: _Place, answer: Future[str]) -> None:
        """In a thread of Ray's: an actor is there, or will never be."""
        with self._lock:
            self._coming.discard(place)
            error = answer.exception()
            if error is None and self._apart and not canonical.loads(answer.result())["token"]:
                error = CallerError(f"Ray on {canonical.loads(answer.result())['host']} asks for no token")
            if error is None:
                self._there.add(place)
                self._ready.append(place)
            elif "creation task" in str(error):  # the node cannot run it at all
                self._lost = _line(str(error).strip().rpartition("\n")[2])
            else:
                self._owe(_line(error))
            self._rounds = self._rounds if error else 0
        if error is None:
            place.actor.watch.remote().future().add_done_callback(lambda _: self._scheduler.lose(place))
        self._scheduler.wake()

    def _owe(self, said: str) -> None:
        """With the lock: one is lost, and will be replaced after a pause."""
        self._lost = said
        if not self._owed:
            self._due = time.monotonic() + min(_PAUSES[0] * 2**self._rounds, _PAUSES[1])
        self._owed += 1

    def _replace(self) -> None:
        with self._lock:
            if not self._owed or self._rounds >= _ROUNDS or time.monotonic() < self._due:
                return
            self._rounds += 1
            owed, self._owed = self._owed, 0
        for _ in range(owed):
            self._call()

    def hire(self, name: str) -> _Place | None:
        self._replace()
        return self._ready.popleft() if self._ready else None

    def suits(self, worker: _Place, name: str) -> bool:
        return True

    def begin(self, worker: _Place, name: str, part: Job) -> Future[Answer]:
        from monitor.transcript.layout import MANIFEST

        wanted = json.dumps(self.wanted[name].result()).encode()
        future = worker.actor.run.remote(name, json.dumps(part).encode(), wanted, MANIFEST).future()
        answer: Future[Answer] = Future()
        future.add_done_callback(lambda done: _pass_on(answer, partial(self._read, name, done)))
        return answer

    def _read(self, name: str, done: Future[bytes]) -> Answer:
        try:
            reply = canonical.parse(done.result(), most=limits.WORKER_BYTES)
        except self._ray.exceptions.RayActorError as error:
            raise Died(f"the Ray cluster lost a process that replayed: {_line(error)}") from None
        except (self._ray.exceptions.RayError, EvidenceError, TypeError) as error:
            raise DeviceError(f"the Ray cluster gave no answer: {_line(error)}") from None
        if isinstance(reply, dict) and isinstance(reply.get("result"), dict):
            self.answered += 1
            return dict(reply["result"])
        for key, kind in (("refused", Refused), ("lacks", Lacking)) if isinstance(reply, dict) else ():
            if key in reply:
                refused = f"{str(reply[key])!a:.500}"[1:-1]
                self.refusals.setdefault(name, {})[refused] = None
                raise kind(refused)
        said = reply.get("error") if isinstance(reply, dict) else None
        raise DeviceError(str(said or "the Ray cluster gave a malformed answer"))

    def stays(self, worker: _Place) -> bool:
        with self._lock:
            if worker in self._there:
                self._there.discard(worker)
                self._owe("its process or its node ended")
            if worker in self._ready:
                self._ready.remove(worker)
        return False

    def hopeless(self, name: str) -> str | None:
        with self._lock:
            if self._ready or (self._owed and self._rounds < _ROUNDS):
                return None
            if self._coming and time.monotonic() - self._since < _PATIENCE:
                return None
        if self._there and name in self.refusals:
            return f"no node takes part: {next(reversed(self.refusals[name]))}"
        text = f"the Ray cluster at {self._address} has no process left that can replay"
        return f"{text}: {self._lost}" if self._lost else text


def _pass_on(answer: Future[Answer], read: Callable[[], Answer]) -> None:
    try:
        found = read()
    except Exception as error:
        answer.set_exception(error)
    else:
        answer.set_result(found)
