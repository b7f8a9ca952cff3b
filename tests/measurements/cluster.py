"""``cluster``: inspections on two nodes of a Ray cluster; what a further run and dealing out cost."""

from __future__ import annotations

import heapq
import os
import random
import signal
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from analysis.bench.origin import write_among
from analysis.demo import CHIPS, LABS, REPLAY_DEVICES, SAMPLES, SAMPLING, SNAPSHOT_RATE, STEPS, Lab
from firmware_sim.errors import CallerError, DeviceError
from firmware_sim.evidence import canonical
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.replays import Worker
from inspector.inspection.trust import Trust
from inspector.replay.pool import DevicePool, Executor
from inspector.replay.scheduler import Scheduler
from monitor import processes
from monitor.lab.simulated_lab import LabConfig
from monitor.presets.task import Task
from monitor.recording.recipes import train
from tests.measurements._ray_nodes import Nodes, device_processes, ray_nodes

__all__ = ["CASES", "run", "table", "verdict", "write"]

Row = dict[str, Any]

CASES = ("scheduler", "runs", "verdicts", "kills")
MOST_FURTHER = 0.5
"""Seconds for each run from the second on that one command inspects."""
SIZES = (1_000, 10_000, 30_000)
"""Segments that are dealt out to made-up workers."""
MOST_SECONDS, WORKERS = 0.01, 1000
"""Of the scheduler for a segment; of the made-up cluster."""
_MEMORY = 256
"""Bytes for a segment: its number, and its place in the answer."""
COMMAND = (sys.executable, "-c", "import sys; from analysis.cli import main; sys.exit(main())")
"""The command line in a process of its own."""
_STARTED = datetime(2026, 1, 1, tzinfo=UTC)
_AGAIN, _PAIRS, _RUNS = 40, 5, 5
_PATIENCE = 120.0


def run(
    *,
    cases: Sequence[str] = CASES,
    sizes: Sequence[int] = SIZES,
    pairs: int = _PAIRS,
    progress: Callable[[int], object] | None = None,
) -> list[Row]:
    """Measure the named works.

    Rows of ``scheduler`` hold ``seconds`` (processor time for a segment), ``segments``, ``workers`` and ``peak_kib``
    (of what Python allocates meanwhile); of ``runs`` ``seconds`` (of a run from the second on that one command
    inspects), ``ratio`` (to a command with the first alone) and ``alone_seconds``; of ``verdicts``, one for each of the
    demo's labs, ``seconds`` (on two nodes), ``ratio`` (to this process), ``outcome`` and ``equal`` (all of the verdict
    but seconds); of ``kills`` ``complete``.

    Raises:
        CallerError: Ray is not installed.
    """
    tell, rows = progress or (lambda _: None), []
    for segments in sizes if "scheduler" in cases else ():
        rows.append(_scheduled(segments))
        tell(1)
    if "runs" in cases:
        with tempfile.TemporaryDirectory(prefix="chipwitness-bench-") as folder:
            rows.append(_further(Path(folder), pairs, tell))
    if set(cases) & {"verdicts", "kills"}:
        with tempfile.TemporaryDirectory(prefix="chipwitness-bench-") as folder, ray_nodes(2) as nodes:
            for lab in LABS if "verdicts" in cases else LABS[:1]:
                trust = _train(Path(folder) / lab.name, lab)
                if "verdicts" in cases:
                    rows.append(_compared(Path(folder) / lab.name, trust, lab, nodes))
                    tell(1)
            if "kills" in cases:
                rows += _kills(Path(folder) / LABS[0].name, trust_of(Path(folder) / LABS[0].name), nodes, tell)
    return rows


class _Made:
    """Workers that compute nothing. When all that are used are at work the clock goes on to the next that is done."""

    def __init__(self, segments: int, workers: int) -> None:
        self._left, self._free, self._clock = segments, list(range(workers)), 0.0
        self._workers, self._number = min(workers, (segments + 1) // 2), 0  # no more workers than parts that wait
        self._working: list[tuple[float, int, Future[Row], Row]] = []
        self._random = random.Random(1)
        self._replay: Row = {}

    def hire(self, name: str) -> int | None:
        return self._free.pop() if self._free else None

    def suits(self, worker: int, name: str) -> bool:
        return True

    def begin(self, worker: int, name: str, part: Mapping[str, Any]) -> Future[Row]:
        future: Future[Row] = Future()
        answer = {"device": name, "fingerprint": "", "seconds": 0.0, "replays": [self._replay] * len(part["segments"])}
        self._number += 1
        self._left -= 1
        done = self._clock + self._random.expovariate(1.0)
        heapq.heappush(self._working, (done, self._number, future, answer))
        while self._working and (not self._left or len(self._working) == self._workers):
            self._clock, _, ended, answer = heapq.heappop(self._working)
            ended.set_result(answer)
        return future

    def stays(self, worker: int) -> bool:
        return False

    def hopeless(self, name: str) -> str | None:
        return None


def _dealt(segments: int) -> float:
    """Processor seconds of dealing out one job."""
    job = {"action": "replay", "run": "run", "segments": list(range(segments)), "inside": []}
    scheduler: Scheduler[int] = Scheduler(_Made(segments, WORKERS), parts=None)
    begun = time.process_time()
    found = scheduler.submit("native", job).result()
    seconds = time.process_time() - begun
    scheduler.close()
    if len(found["replays"]) != segments:
        raise DeviceError("the scheduler lost a segment")
    return seconds


def _scheduled(segments: int) -> Row:
    seconds = min(_dealt(segments) for _ in range(3))
    tracemalloc.start()
    _dealt(segments)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "work": "scheduler",
        "mode": f"{segments} segments",
        "seconds": seconds / segments,
        "ratio": None,
        "segments": segments,
        "workers": WORKERS,
        "peak_kib": round(peak / 1024),
    }


def _train(out: Path, lab: Lab) -> Trust:
    task = Task.for_preset("tiny-gpt", seed=1, steps=STEPS, checkpoint_every=4, shards=CHIPS)
    config = LabConfig(
        lab=lab.name, seed=1, chips=CHIPS, lie=lab.lie, lie_step=STEPS // 2, snapshot_rate=SNAPSHOT_RATE,
        started=_STARTED, duration=timedelta(hours=1),
    )  # fmt: skip
    train(task, out, config, device="native")
    return trust_of(out)


def trust_of(out: Path) -> Trust:
    """What the inspector knows of a run's world."""
    return Trust.load([out.with_name(f"{out.name}.trust.json")], [out])


def _inspected(out: Path, trust: Trust, worker: Worker) -> tuple[Row, float]:
    """The verdict without what differs from one time to the next: how long replays took."""
    settings = Settings(samples=SAMPLES, seed="bench", devices=REPLAY_DEVICES, sampling=SAMPLING)
    begun = time.perf_counter()
    found: Row = inspect([out], trust, settings, now=_STARTED + timedelta(minutes=30), worker=worker).to_json()
    seconds = time.perf_counter() - begun
    for replay in found["evidence"].get("replays", ()):
        del replay["seconds"]
    return found, seconds


def _further(folder: Path, pairs: int, tell: Callable[[int], object]) -> Row:
    """Commands that inspect one lab of the demo's honest kind, by turns with those that inspect several."""
    labs = [replace(LABS[0], name=f"{LABS[0].name}-{number}") for number in range(_RUNS)]
    for lab in labs:
        _train(folder / lab.name, lab)
    outcomes, measured = set(), []
    for _ in range(pairs):
        (one, alone), (all_, together) = _timed(folder, labs[:1]), _timed(folder, labs)
        outcomes |= {one, all_}
        measured.append(((together - alone) / (_RUNS - 1), alone))
        tell(1)
    return {
        "work": "runs",
        "mode": "inspect",
        "seconds": statistics.median(further for further, _ in measured),
        "ratio": statistics.median(further / alone for further, alone in measured),
        "alone_seconds": statistics.median(alone for _, alone in measured),
        "runs": _RUNS,
        "pairs": pairs,
        "outcome": "/".join(sorted(outcomes)),
    }


def _timed(folder: Path, labs: Sequence[Lab]) -> tuple[str, float]:
    """The outcome of an inspection by a command, and its time; of each lab as many chips are drawn as in the demo."""
    words = [str(folder / lab.name) for lab in labs] + ["--samples", str(SAMPLES * len(labs)), "--seed", "bench"]
    words += [word for lab in labs for word in ("--trust", str(folder / f"{lab.name}.trust.json"))]
    words += [word for name in REPLAY_DEVICES for word in ("--device", name)]
    command = [*COMMAND, "inspect", *words, "--now", "2026-01-01T00:30:00Z", "--json"]
    begun = time.perf_counter()
    done = processes.run(command)
    seconds = time.perf_counter() - begun
    try:
        return str(canonical.loads(done.stdout)["outcome"]), seconds
    except ValueError:
        raise DeviceError(f"an inspection ended without a verdict: {done.stderr.strip()[-200:]}") from None


def _compared(out: Path, trust: Trust, lab: Lab, nodes: Nodes) -> Row:
    from inspector.replay.ray_pool import RayPool

    with DevicePool() as pool:
        here, native = _inspected(out, trust, pool.run)
    with RayPool(nodes.address) as cluster:
        there, seconds = _inspected(out, trust, cluster.run)
    return {
        "work": "verdicts",
        "mode": lab.name,
        "seconds": seconds,
        "ratio": seconds / native,
        "outcome": there["outcome"],
        "equal": here == there,
    }


def _kills(out: Path, trust: Trust, nodes: Nodes, tell: Callable[[int], object]) -> list[Row]:
    from inspector.inspection.transcripts import open_run
    from inspector.replay.ray_pool import RayPool

    run, name = open_run(out, trust), REPLAY_DEVICES[0]
    where = {"run": str(out.resolve()), "manifest": run.manifest_digest}
    where["lab_key"] = trust.key_of(run.metadata.lab).raw.hex()
    job = {"action": "replay", **where, "segments": [0, 1] * _AGAIN}
    with DevicePool(workers=1, threads=1) as pool:
        whole = pool.run(name, {**job, "segments": [0, 1]})["replays"] * _AGAIN
    second, rows = nodes.newest, []
    kills: dict[str, Callable[[], object]] = {
        "device process": lambda: os.kill(next(iter(device_processes())), signal.SIGKILL),
        "Ray worker": lambda: os.kill(next(iter(device_processes().values())), signal.SIGKILL),
        "node": lambda: nodes.kill(second),
    }
    for mode, kill in kills.items():
        begun = time.perf_counter()
        with RayPool(nodes.address) as cluster, ThreadPoolExecutor(1) as threads:
            found = threads.submit(_result, cluster, name, job)
            while cluster.answered < _AGAIN // 4 and not found.done() and time.perf_counter() < begun + _PATIENCE:
                time.sleep(0.01)
            before = cluster.answered
            kill()
            ended = found.result()
        row = {"work": "kills", "mode": mode, "seconds": time.perf_counter() - begun, "ratio": None}
        complete = isinstance(ended, dict) and ended.get("replays") == whole
        rows.append({**row, "segments": len(whole), "answered_before": before, "complete": complete})
        tell(1)
    return rows


def _result(executor: Executor, name: str, job: Row) -> Row | str:
    try:
        return executor.run(name, job)
    except DeviceError as error:
        return str(error)


def write(rows: Sequence[Row], path: Path) -> None:
    """Put the rows in a file; those of other works that are there stay."""
    write_among(rows, path, by=("work", "mode"))


def verdict(rows: Sequence[Row]) -> str | None:
    """What is not as it should be, or None."""
    if not rows:
        raise CallerError("nothing was measured")
    dealt = [row for row in rows if row["work"] == "scheduler" and row["segments"] >= 2 * WORKERS]
    for row in rows:
        if row["work"] == "scheduler" and row["seconds"] > MOST_SECONDS:
            return f"the scheduler takes {1000 * row['seconds']:.1f} ms for a segment"
        if not row.get("equal", True):
            return f"the verdict on {row['mode']} is another one on the cluster"
        if row["work"] == "runs" and row["outcome"] != "ACCEPT":
            return f"honest runs in one command: {row['outcome']}"
        if row["work"] == "runs" and row["seconds"] > MOST_FURTHER:
            return f"each run from the second on takes {row['seconds']:.2f} s, more than {MOST_FURTHER}"
        if not row.get("complete", True):
            return f"a replay is not complete after a kill: {row['mode']}"
    for few, many in pairwise(dealt):
        grown = 1024 * (many["peak_kib"] - few["peak_kib"]) / max(1, many["segments"] - few["segments"])
        if grown > _MEMORY:
            return f"the scheduler keeps {grown:.0f} bytes for each segment"
    return None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = []
    for row in rows:
        seconds = f"{1e6 * row['seconds']:8.1f} µs" if row["work"] == "scheduler" else f"{row['seconds']:8.2f} s "
        said = {"scheduler": "peak_kib", "runs": "ratio", "verdicts": "equal", "kills": "complete"}[row["work"]]
        lines.append(f"{row['work']:10} {row['mode']:18} {seconds}  {said.replace('_', ' ')}: {row[said]}")
    return lines
