"""``snapshots``: chips are due in every step; replays on devices that differ must pass through what they saw."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

from analysis.bench.origin import write
from firmware_sim import RecordKind, parse_log
from firmware_sim.errors import CallerError
from inspector.inspection.guards import Settings
from inspector.inspection.inspection import inspect
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome
from inspector.replay.pool import DevicePool
from monitor.lab.simulated_lab import LabConfig
from monitor.presets.task import Task
from monitor.recording.recipes import train
from monitor.replay.steps import execution_of, zeros
from monitor.transcript import RunFolder
from monitor.transcript.layout import chip_path
from tests.measurements._own_loop import record_own_loop

__all__ = ["DEVICES", "run", "table", "verdict", "write"]

Row = dict[str, Any]

DEVICES = ("sse41", "mkl-compatible")
"""Replay devices whose native arithmetic differs."""
_PRESETS = ("tiny-gpt", "digits-cnn", "llama-small")
_STARTED, _DURATION = datetime(2026, 1, 1, tzinfo=UTC), timedelta(hours=1)
_LAB = "lab"
_ANEW = "dropped, state anew"


def run(
    *,
    presets: Sequence[str] | None = None,
    numerics: str = "rounded",
    chips: int = 16,
    steps: int = 12,
    progress: Callable[[int], object] = lambda _: None,
) -> list[Row]:
    """Record each preset with that many chips, all due for a snapshot in every tick, and inspect all of them.

    Each is recorded three times: as a preset, which zeroes its gradients, as a loop of one's own that drops them, and
    as one whose optimizer makes its state anew in each second step.

    Returns:
        Rows with ``work`` (the preset), ``mode`` (the numerics), ``gradients`` (``zeroed``, ``dropped`` or ``dropped,
        state anew``), ``seconds`` (of the inspection), ``ratio`` (None), ``chips``, ``steps``, ``snapshots``,
        ``inside`` (of steps), ``in_updates`` (those of them between the operators of an optimizer's update),
        ``in_gradients`` (those between the first and the last operator that writes a gradient for the first time in its
        step), ``in_state`` (those of ``in_updates`` behind an operator that makes state of the optimizer anew),
        ``operators`` (of the last step), ``compared`` by device, and ``outcome``.

    Raises:
        CallerError: an unknown preset, or an impossible number.
    """
    rows = []
    with DevicePool() as devices, tempfile.TemporaryDirectory() as folder:
        for name in presets or _PRESETS:
            for gradients in ("zeroed", "dropped", _ANEW):
                out = Path(folder) / f"{name}-{gradients}"
                rows.append(_row(out, name, numerics, gradients, chips, steps, devices))
                progress(1)
    return rows


def _row(out: Path, preset: str, numerics: str, gradients: str, chips: int, steps: int, devices: DevicePool) -> Row:
    if steps < 2:
        raise CallerError("the first step has no length to go by; take at least two")
    world: dict[str, Any] = {"started": _STARTED, "duration": _DURATION}
    task = Task.for_preset(preset, seed=1, steps=steps, numerics=numerics, checkpoint_every=4, shards=chips)
    if gradients != "zeroed":
        record_own_loop(task, out, rate=Fraction(1), restarts=gradients == _ANEW, **world)
    else:
        config = LabConfig(lab=_LAB, seed=1, chips=chips, snapshot_rate=Fraction(1), **world)
        train(task, out, config, device="native")
    trust = Trust.load([out.with_name(f"{out.name}.trust.json")], [out])
    settings = Settings(samples=chips, seed="bench", devices=DEVICES)
    started = time.perf_counter()
    found = inspect([out], trust, settings, now=_STARTED + 2 * _DURATION, worker=devices.run)
    seconds = time.perf_counter() - started
    opened = RunFolder(out, trust.labs[_LAB])
    return {
        "work": preset,
        "mode": numerics,
        "gradients": gradients,
        "seconds": seconds,
        "ratio": None,
        "chips": chips,
        "steps": steps,
        **_counted(opened),
        "compared": {replay["device"]: replay.get("snapshots_inside_steps", 0) for replay in found.evidence["replays"]},
        "outcome": found.outcome.value,
    }


def _counted(run: RunFolder) -> Mapping[str, int]:
    """How many snapshots the chips took, and where."""
    every = [
        record
        for chip in run.metadata.chips
        for record in parse_log(run.read(chip_path(chip, "log.bin")))
        if record.kind is RecordKind.SNAPSHOT
    ]
    inside = [record for record in every if record.operators]
    updating = gradients = state = operators = 0
    for record in inside:
        program = run.program(execution_of(run.leaf(record.step + 1)).program)
        operators = len(program.counted)
        call = program.counted[record.operators - 1]
        is_updating = any(first <= call < stop for first, stop in program.updates)
        updating += is_updating
        first = [at for name, at in program.first_writes.items() if name.startswith("gradient/")]
        gradients += min(first) <= record.operators < max(first)
        before = run.program(execution_of(run.leaf(record.step)).program) if record.step else None
        left = zeros(run.checkpoint(0)) if before is None else before.absent
        made = [at for name, at in program.first_held(left).items() if name in program.births.values()]
        state += is_updating and record.operators >= min(made, default=operators + 1)
    found = {"snapshots": len(every), "inside": len(inside), "in_updates": updating, "in_gradients": gradients}
    return {**found, "in_state": state, "operators": operators}


def verdict(rows: Sequence[Row]) -> str | None:
    """Which inspections did not accept, or did not compare every snapshot on every device; None if all did."""
    odd = [
        row["work"]
        for row in rows
        if row["outcome"] != Outcome.ACCEPT.value or set(row["compared"].values()) != {row["inside"]}
    ]
    return f"snapshots without an explanation: {', '.join(odd)}" if odd else None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = [
        f"{'run':14} {'numerics':9} {'gradients':19} {'snapshots':>9} {'inside':>7} {'in updates':>10} "
        f"{'in gradients':>12} {'in state':>8} {'compared':>9}  outcome"
    ]
    for row in rows:
        compared = min(row["compared"].values(), default=0)
        lines.append(
            f"{row['work']:14} {row['mode']:9} {row['gradients']:19} {row['snapshots']:9} {row['inside']:7} "
            f"{row['in_updates']:10} {row['in_gradients']:12} {row['in_state']:8} {compared:9}  {row['outcome']}"
        )
    return [*lines, f"each compared on {' and '.join(DEVICES)}"]
