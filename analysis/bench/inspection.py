"""``bench inspection``: an inspection's cost relative to the training, by checkpoint interval and number of workers."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from analysis.bench.origin import Row, write_among
from firmware_sim.errors import CallerError
from inspector.inspection.guards import Sampling, Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.transcripts import open_run
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Verdict
from inspector.probability.odds import Violation, chain
from inspector.replay.pool import DevicePool
from inspector.replay.scheduler import Answer, Job
from inspector.storage.stats import run_stats
from monitor import Recorder
from monitor.lab.simulated_lab import LabConfig
from monitor.presets.task import Task
from monitor.recording.recipes import train

__all__ = ["run", "table", "verdict", "write"]


SHARE, WORKERS = 0.1, 0.65
"""Of a long run's steps that are replayed; of one worker's time that two take."""
CONFIDENCE = 0.9
DEVICES = ("sse41", "mkl-compatible")
_INTERVALS = (1, 2, 4, 8, 16, 32, 64)
_LONG_INTERVAL, _LONG_SHARE = 4, 100
_STARTED, _HOURS = datetime(2026, 1, 1, tzinfo=UTC), 1.0
_NOW = _STARTED + timedelta(minutes=30)
_PRESET_STEPS, _PRESET_CHIPS, _PAIRS = 12, 8, 3


def run(
    *,
    steps: int = 10_000,
    curve_steps: int = 1024,
    pairs: int = _PAIRS,
    cases: Sequence[str] = ("interval", "long", "workers"),
    progress: Callable[[int], object] | None = None,
) -> list[Row]:
    """Measure the named works.

    Rows of ``interval`` and ``long`` hold ``seconds`` (of the inspection), ``ratio`` (steps replayed on a device, in
    steps of the run), ``steps``, ``interval``, ``against``, ``confidence``, ``segments``, ``replayed_segments``,
    ``replayed_steps``, ``predicted_steps`` (of the uniform draw), ``replay_seconds`` (of each device), ``step_ms`` (a
    replayed step), ``training_seconds``, ``bytes_a_step`` and ``checkpoint_bytes`` (of all that are kept); rows of
    ``workers`` the medians of the whole inspection and of its replays alone, with processes that are there already.

    Args:
        steps: of the long run.
        curve_steps: of each run of the curve.
        pairs: repetitions of each number of workers.
        cases: of ``interval``, ``long`` and ``workers``.
        progress: called with 1 after each run.

    Raises:
        CallerError: too few steps to compare.
    """
    if min(steps, curve_steps) < 2 * max(_INTERVALS) or pairs < 1:
        raise CallerError(f"a run needs at least {2 * max(_INTERVALS)} steps here, and at least one inspection")
    tell, rows = progress or (lambda _: None), []
    with tempfile.TemporaryDirectory(prefix="chipwitness-bench-") as folder, DevicePool() as devices:
        for device in DEVICES:
            devices.run(device, {"action": "fingerprint"})
        for interval in _INTERVALS if "interval" in cases else ():
            against = Violation("scattered", Fraction(max(1, curve_steps // 100)))
            rows.append(_tiny(Path(folder) / f"every-{interval}", curve_steps, interval, against, devices))
            tell(1)
        if "long" in cases:
            against = Violation("scattered", Fraction(max(1, steps // _LONG_SHARE)))
            rows.append({**_tiny(Path(folder) / "long", steps, _LONG_INTERVAL, against, devices), "work": "long"})
            tell(1)
    if "workers" in cases:
        with tempfile.TemporaryDirectory(prefix="chipwitness-bench-") as folder:
            rows += _workers(Path(folder) / "run", pairs, tell)
    return rows


def _tiny(out: Path, steps: int, interval: int, against: Violation, devices: DevicePool) -> Row:
    """A regression of 4 numbers on 2, recorded and inspected."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rate = Fraction(1, 64)
    recorder = Recorder(
        model, optimizer, out=out, seed=1, chips=1, checkpoint_every=interval, snapshot_rate=rate, started=_STARTED,
        hours=_HOURS,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    begun = time.perf_counter()
    for _ in range(steps):
        batch = torch.randn(3, 4, generator=generator)
        with recorder.step(batch):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    recorder.finish()
    training = time.perf_counter() - begun
    sampling = Sampling(confidence=CONFIDENCE, against=against)
    trust = Trust.load([out.with_name(f"{out.name}.trust.json")], [out])
    found, seconds = _inspected(
        out, trust, Settings(samples=1, seed="bench", devices=DEVICES, sampling=sampling), devices
    )
    (odds,), replays = found.evidence["odds"], found.evidence["replays"]
    audit, stored = chain(steps, interval, first=True), run_stats(open_run(out, trust))
    (states,) = (each for each in stored.kinds if each.kind == "checkpoints")
    return {
        "work": "interval",
        "mode": f"every {interval}",
        "seconds": seconds,
        "ratio": odds["coverage"],
        "steps": steps,
        "interval": interval,
        "against": str(against),
        "confidence": CONFIDENCE,
        "outcome": found.outcome.value,
        "segments": odds["segments"],
        "replayed_segments": odds["replayed_segments"],
        "replayed_steps": odds["replayed_steps"],
        "predicted_steps": audit.price(audit.needed(against, CONFIDENCE)),
        "replay_seconds": {each["device"]: each["seconds"] for each in replays},
        "step_ms": 1000 * statistics.mean(each["seconds"] / each["steps"] for each in replays),
        "training_seconds": training,
        "bytes_a_step": stored.bytes / steps,
        "checkpoint_bytes": states.bytes,
    }


def _inspected(out: Path, trust: Trust, settings: Settings, devices: Any) -> tuple[Verdict, float]:
    """One inspection, as in a process that has made none before: it cleans up after no other."""
    gc.collect()
    begun = time.perf_counter()
    found = inspect([out], trust, settings, now=_NOW, worker=devices.run)
    return found, time.perf_counter() - begun


def _workers(out: Path, pairs: int, tell: Callable[[int], object]) -> list[Row]:
    """Eight chips of a tiny GPT: every step replayed on two devices by one worker of one thread, and by two."""
    config = LabConfig(
        lab="lab", seed=1, chips=_PRESET_CHIPS, snapshot_rate=Fraction(1, 2), started=_STARTED,
        duration=timedelta(hours=_HOURS),
    )  # fmt: skip
    task = Task.for_preset("tiny-gpt", seed=1, steps=_PRESET_STEPS, checkpoint_every=1, shards=_PRESET_CHIPS)
    train(task, out, config, device="native")
    trust = Trust.load([out.with_name(f"{out.name}.trust.json")], [out])
    sampling = Sampling(confidence=0.99, against=Violation("together"))
    settings = Settings(samples=_PRESET_CHIPS, seed="bench", devices=DEVICES, sampling=sampling)
    times: dict[int, list[tuple[float, float]]] = {1: [], 2: []}
    outcomes = set()
    with DevicePool(workers=1, threads=1) as one, DevicePool(workers=2, threads=1) as two:
        for number in range(pairs + 1):  # the first starts the processes
            for workers, pool in ((1, one), (2, two)):
                timed = _Timed(pool)
                found, seconds = _inspected(out, trust, settings, timed)
                outcomes.add(found.outcome.value)
                if number:
                    times[workers].append((seconds, timed.end - timed.begin))
            tell(1)
    rows: list[Row] = []
    for workers, measured in times.items():
        for mode, number in (("inspection", 0), ("replays", 1)):
            seconds = statistics.median(each[number] for each in measured)
            ratios = [each[number] / other[number] for each, other in zip(measured, times[1], strict=True)]
            rows.append(
                {
                    "work": "workers",
                    "mode": f"{mode}, {workers} of one thread",
                    "seconds": seconds,
                    "ratio": statistics.median(ratios),
                    "pairs": pairs,
                    "steps": _PRESET_STEPS,
                    "chips": _PRESET_CHIPS,
                    "outcome": "/".join(sorted(outcomes)),
                }
            )
    return rows


class _Timed:
    """A pool, and from when to when it had work."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool, self.begin, self.end = pool, float("inf"), 0.0

    def run(self, name: str, job: Job) -> Answer:
        self.begin = min(self.begin, time.perf_counter())
        result = self._pool.run(name, job)
        self.end = max(self.end, time.perf_counter())
        return result


def write(rows: Sequence[Row], path: Path) -> None:
    """Put the rows in a file; those of other works that are there stay."""
    write_among(rows, path, by=("work", "mode", "steps"))


def verdict(rows: Sequence[Row]) -> str | None:
    """What was not accepted or costs more than it may, or None."""
    for row in rows:
        if row["outcome"] != "ACCEPT":
            return f"{row['work']}, {row['mode']}: {row['outcome']}"
        if row["work"] == "long" and row["ratio"] > SHARE:
            return f"the long run: {row['ratio']:.1%} of its steps are replayed, more than {SHARE:.0%}"
        if row["work"] == "workers" and row["ratio"] > WORKERS and ", 2 of" in row["mode"]:
            what = row["mode"].partition(",")[0]
            return f"two workers take {row['ratio']:.2f} times as long as one ({what}), more than {WORKERS}"
    return None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = [f"{'work':9} {'mode':28} {'seconds':>8} {'ratio':>6} {'replayed steps':>15} {'bytes a step':>13}"]
    for row in rows:
        replayed = f"{row['replayed_steps']:,} of {row['steps']:,}" if "replayed_steps" in row else ""
        stored = f"{row['bytes_a_step']:,.0f}" if "bytes_a_step" in row else ""
        lines.append(
            f"{row['work']:9} {row['mode']:28} {row['seconds']:8.2f} {row['ratio']:6.3f} {replayed:>15} {stored:>13}"
        )
    return lines
