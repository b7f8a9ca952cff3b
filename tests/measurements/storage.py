"""``storage``: what a step costs on disk and in time, at the first thousand steps and at the last.

Synthetic leaves go through the real writer, and a tiny model is trained through the real recorder.
"""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from analysis.bench.origin import write
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import SigningKey, VerifyingKey, digest_bytes
from inspector.inspection.trust import Trust
from inspector.storage.fsck import fsck
from monitor import Recorder
from monitor.declaration.origin import Origin
from monitor.declaration.statement import Declaration, StateEntry
from monitor.sharding import Layout, StateDigest
from monitor.transcript import Execution, Leaf, Metadata, TranscriptWriter
from monitor.transcript.layout import JOURNAL, SALT, log_path, program_path

__all__ = ["run", "table", "verdict", "write"]

Row = dict[str, Any]

MOST = 1.5
"""By how much the last thousand may cost more than the first, in processor time and in bytes."""
_WINDOW = 1000
_SHARDS = 4
_SEED = 1
_STARTED = datetime(2026, 1, 1, tzinfo=UTC)


def run(*, leaves: int = 1_000_000, steps: int = 20_000, progress: Callable[[int], object] | None = None) -> list[Row]:
    """Measure both parts.

    Rows hold ``work``, ``mode`` (which steps), ``seconds``, ``ratio`` (to the first thousand, in processor time, or in
    all), ``steps``, ``cpu_ms`` (processor time a step), ``bytes`` (a step, checkpoints left out) and ``bytes_ratio``.

    Args:
        leaves: synthetic leaves.
        steps: real ones.
        progress: called with a number of steps just done.

    Raises:
        CallerError: fewer than two steps of one kind.
    """
    if min(leaves, steps) < 2:
        raise CallerError("two steps are the fewest that can be compared")
    tell = progress or (lambda _: None)
    with tempfile.TemporaryDirectory(prefix="chipwitness-bench-") as name:
        return [*_synthetic(Path(name), leaves, tell), *_real(Path(name), steps, tell)]


@dataclass(slots=True)
class _Meter:
    """Wall and processor time, and bytes, at the borders of the first and last window of steps."""

    steps: int
    size: Callable[[], int]
    marks: list[tuple[float, float, int]]

    @property
    def window(self) -> int:
        """Steps in each window: a thousand, or half of all."""
        return min(_WINDOW, self.steps // 2)

    def before(self, step: int) -> None:
        """Called before each step, 0, 1, …, and once after the last."""
        if step in (0, self.window, self.steps - self.window, self.steps):
            self.marks.append((time.perf_counter(), time.process_time(), self.size()))
            if self.window * 2 == self.steps and step == self.window:
                self.marks.append(self.marks[-1])

    def rows(self, work: str) -> list[Row]:
        """First window, last window and all."""
        one, two, three, four = self.marks
        named = {f"first {self.window}": (one, two), f"last {self.window}": (three, four), "all": (one, four)}
        counts = [self.window, self.window, self.steps]
        rows: list[Row] = []
        for (mode, (start, stop)), count in zip(named.items(), counts, strict=True):
            cpu, size = (stop[1] - start[1]) / count, (stop[2] - start[2]) / count
            first = rows[0] if rows else {"cpu_ms": 1000 * cpu, "bytes": size}
            rows.append(
                {
                    "work": work,
                    "mode": mode,
                    "seconds": stop[0] - start[0],
                    "ratio": 1000 * cpu / first["cpu_ms"],
                    "steps": count,
                    "cpu_ms": 1000 * cpu,
                    "bytes": size,
                    "bytes_ratio": size / first["bytes"],
                }
            )
        return rows


def _synthetic(folder: Path, leaves: int, tell: Callable[[int], object]) -> list[Row]:
    """Leaves with made-up digests, and the second opinion on what was written."""
    folder, key = folder / "leaves", SigningKey.generate(hashlib.sha256(b"storage").digest())
    entry = StateEntry(kind="weight", name="w", dtype="float32", shape=(3 << 20,))
    task = Declaration(
        numerics="exact",
        seed=_SEED,
        checkpoint_every=leaves,
        shares=(1,) * _SHARDS,
        optimizer="torch.optim.sgd.SGD",
        groups=({"lr": 0.1},),
        parameters=(("w",),),
        state=(entry,),
        origin=Origin(state=str(digest_bytes("state", b""))),
    )
    metadata = Metadata(
        lab="lab",
        task=task,
        data={},
        chips=tuple(f"chip-{shard}" for shard in range(_SHARDS)),
        device={"name": "none", "fingerprint": ""},
        versions={},
        settings={},
        started="2026-01-01T00:00:00Z",
        declared_end="2026-01-02T00:00:00Z",
    )
    staging = folder.with_name("staging")
    writer = TranscriptWriter.create(
        folder, staging, key, run=metadata.run_id.hex(), metadata=metadata.to_json(), data={SALT: bytes(32)}
    )
    rng, layout = random.Random(_SEED), task.layout
    log = str(digest_bytes("rounding-log", b""))
    writer.append(Leaf(step=0, batch="", state=_state(rng, layout), log="", loss="", flop=0), {})
    meter = _Meter(leaves, lambda: (folder / JOURNAL).stat().st_size, [])
    for step in range(leaves):
        leaf = Leaf(
            step=step + 1,
            batch=rng.randbytes(32).hex(),
            state=_state(rng, layout),
            log=log,
            loss="3f800000",
            flop=1,
            execution=_EXECUTION,
        )
        meter.before(step)
        program = {} if step else {program_path(_EXECUTION.program): _PROGRAM}
        writer.append(leaf, {log_path(step + 1): b"", **program})
        if step % _WINDOW == _WINDOW - 1:
            tell(_WINDOW)
    meter.before(leaves)
    return [*meter.rows("leaves"), _reading("leaves", folder, "lab", key.verifying, leaves)]


_PROGRAM = b"{}"
_EXECUTION = Execution(
    program=hashlib.sha256(_PROGRAM).hexdigest(), slots={}, hyper=({},), reads=str(digest_bytes("reads", b"[]"))
)
"""What each synthetic step says that it ran."""


def _state(rng: random.Random, layout: Layout) -> StateDigest:
    return StateDigest(layout, tuple(rng.randbytes(32) for _ in layout.subtrees))


def _reading(work: str, folder: Path, name: str, key: VerifyingKey, steps: int) -> Row:
    """The second opinion, which reads each byte of the journal twice and keeps no leaf."""
    start, cpu = time.perf_counter(), time.process_time()
    report = fsck(folder, {name: key.raw})
    if report.problems:
        raise EvidenceError(report.problems[0])
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    size = (folder / JOURNAL).stat().st_size / steps
    return {
        "work": work,
        "mode": "fsck",
        "seconds": seconds,
        "ratio": None,
        "steps": steps,
        "cpu_ms": 1000 * cpu / steps,
        "bytes": size,
        "bytes_ratio": None,
    }


def _real(folder: Path, steps: int, tell: Callable[[int], object]) -> list[Row]:
    """A regression of 4 numbers on 2, recorded step by step; a checkpoint every thousand."""
    torch.manual_seed(_SEED)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = folder / "run"
    recorder = Recorder(
        model,
        optimizer,
        out=run,
        seed=_SEED,
        chips=1,
        checkpoint_every=min(_WINDOW, steps // 2),
        snapshot_rate=Fraction(1, 64),
        started=_STARTED,
        hours=1.0,
    )
    batch = torch.randn(3, 4, generator=torch.Generator().manual_seed(_SEED))
    meter = _Meter(steps, lambda: _bytes(run), [])
    for step in range(steps):
        meter.before(step)
        with recorder.step(batch):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        if step % _WINDOW == _WINDOW - 1:
            tell(_WINDOW)
    meter.before(steps)
    recorder.finish()
    key = Trust.load([folder / "run.trust.json"]).labs["lab-1"]
    return [*meter.rows("training"), _reading("training", run, "lab-1", key, steps)]


def _bytes(run: Path) -> int:
    """Of what each step adds to."""
    folders = [run / name for name in ("batches", "logs") if (run / name).is_dir()]
    return (run / JOURNAL).stat().st_size + sum(entry.stat().st_size for each in folders for entry in os.scandir(each))


def verdict(rows: Sequence[Row]) -> str | None:
    """What grew faster than it should, or None."""
    for row in rows:
        for name, ratio in (("processor time", row["ratio"]), ("bytes", row["bytes_ratio"])):
            if row["mode"].startswith("last") and ratio > MOST:
                return f"{row['work']}: the {row['mode']} steps take {ratio:.2f} times the {name} of the first"
    return None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = [f"{'work':9} {'steps':12} {'seconds':>9} {'ms/step':>9} {'ratio':>7} {'bytes/step':>11} {'ratio':>7}"]
    for row in rows:
        ratios = ["" if row[name] is None else f"{row[name]:.2f}" for name in ("ratio", "bytes_ratio")]
        lines.append(
            f"{row['work']:9} {row['mode']:12} {row['seconds']:9.2f} {row['cpu_ms']:9.3f} {ratios[0]:>7} "
            f"{row['bytes']:11.1f} {ratios[1]:>7}"
        )
    return lines
