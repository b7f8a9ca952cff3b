"""``replay``: a step repeated from its program, beside the same step as it was recorded, and in plain PyTorch.

Each step is taken three times in turn: natively, recorded, and repeated as an inspection does, which must lead to the
committed leaf. Figures are medians of processor time, all threads together; the first steps, which plan the program,
are left out. Peak memory is that of a process that takes two steps in one way, PyTorch itself included.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from analysis.bench.numerics import SMALL_PRESETS, held
from analysis.bench.origin import write
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import canonical
from inspector.replay.segment import replay_segment
from monitor import processes
from monitor.environment import accelerator
from monitor.lab.simulated_lab import LabConfig, SimulatedLab, lab_path
from monitor.presets import preset
from monitor.presets.task import Task
from monitor.presets.training import build, take_step
from monitor.recording.recipes import Begun, begin
from monitor.replay.repetition import ProgramTraining
from monitor.replay.steps import execution_of
from monitor.transcript import RunFolder
from monitor.transcript.data import declared_data
from tests.measurements.equality import WORKS

__all__ = ["MODES", "MOST", "run", "table", "verdict", "write"]

Row = dict[str, Any]

MODES = ("native", "recorded body", "recorded step", "replay")
"""Plain PyTorch; the body of a recorded step; that step with everything that is committed; the step repeated."""
MOST = 1.2
"""How much longer than recording a step its repetition may take."""
STEPS = 12
_WARM = 2
_CHIPS = 4
_SEED = 1


def run(*, presets: Sequence[str] = SMALL_PRESETS, steps: int = STEPS) -> list[Row]:
    """Measure each preset under ``exact`` and ``rounded``; large ones with a small batch, and ``exact`` alone.

    Rows hold ``work``, ``mode``, ``seconds`` (processor time of a step), ``ratio`` (to the native one), ``numerics``,
    ``step_ratio`` (to the recorded step), ``repetitions``, ``peak_mib`` and ``peak_ratio`` (to the native peak).

    Args:
        steps: how many are measured.

    Raises:
        CallerError: an unknown preset, or no step.
        EvidenceError: a repeated step leads elsewhere.
    """
    if steps < 1:
        raise CallerError(f"--steps must be at least 1, not {steps}")
    for name in presets:
        preset(name)
    rows = []
    for name in presets:
        for numerics in ("exact", "rounded") if WORKS[name][1] is None else ("exact",):
            rows += _rows(name, numerics, steps)
    return rows


def _task(name: str, numerics: str, steps: int) -> Task:
    return Task.for_preset(
        name,
        seed=_SEED,
        steps=steps,
        batch_size=WORKS[name][1],
        numerics=numerics,
        checkpoint_every=steps,
        shards=_CHIPS,
    )


def _config() -> LabConfig:
    started = datetime.now(UTC).replace(microsecond=0)
    return LabConfig(lab="lab-1", seed=_SEED, chips=_CHIPS, started=started, duration=timedelta(hours=1))


def _rows(name: str, numerics: str, steps: int) -> list[Row]:
    task = _task(name, numerics, steps + _WARM)
    with tempfile.TemporaryDirectory(prefix="chipwitness-bench-") as folder:
        taken = list(_measured(task, Path(folder) / "run"))[_WARM:]
    seconds = {mode: statistics.median(each[mode] for each in taken) for mode in MODES}
    peaks = {mode: _peak(name, numerics, mode) for mode in ("native", "recorded step", "replay")}
    return [
        {
            "work": f"{name}, batch {task.batch_size}",
            "mode": mode,
            "seconds": value,
            "ratio": value / seconds["native"],
            "numerics": numerics,
            "step_ratio": value / seconds["recorded step"],
            "repetitions": steps,
            "peak_mib": round(peaks[mode], 1) if mode in peaks else None,
            "peak_ratio": peaks[mode] / peaks["native"] if mode in peaks else None,
        }
        for mode, value in seconds.items()
    ]


def _measured(task: Task, out: Path) -> Iterator[dict[str, float]]:
    """Processor seconds of each step in each mode."""
    model, optimizer = build(task, accelerator())
    begun = begin(task, out, _config(), device="native")
    replayed: ProgramTraining | None = None
    for number in range(1, task.steps + 1):
        batch = begun.data.batch(number)
        started = time.process_time()
        take_step(task, model, optimizer, batch, task.learning_rate_at(number))
        native = time.process_time() - started
        body, whole = _record(begun, task, number)
        run = _opened(out)
        leaf, log, root = run.leaf(number), run.rounding_log(number), begun.data.batch_root(number)
        program = run.program(execution_of(leaf).program)
        if replayed is None:
            replayed = ProgramTraining(run.declared)
            replayed.memory.load(run.checkpoint(0))
        started = time.process_time()
        found, _ = replayed.take_step(program, execution_of(leaf), batch, root, log)
        replay = time.process_time() - started
        if found != leaf:
            raise EvidenceError(f"step {number} of {task.preset} is another one when it is repeated")
        yield dict(zip(MODES, (native, body, whole, replay), strict=True))


def _record(begun: Begun, task: Task, number: int) -> tuple[float, float]:
    """Processor seconds of the next recorded step: its body, and all of it."""
    batch = begun.data.batch(number)
    started = time.process_time()
    with begun.recorder.step(batch) as step:
        inside = time.process_time()
        loss = take_step(task, begun.model, begun.optimizer, batch, task.learning_rate_at(number))
        body = time.process_time() - inside
        step.commit(loss=loss)
    return body, time.process_time() - started


def _opened(out: Path) -> RunFolder:
    return RunFolder(out, SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(out))).verifying)


def _peak(name: str, numerics: str, mode: str) -> float:
    """MiB that a new process needs for two steps."""
    with tempfile.TemporaryDirectory(prefix="chipwitness-bench-") as folder:
        for part in ("recorded step", mode) if mode == "replay" else (mode,):
            command = processes.python(__name__, name, numerics, part, f"{folder}/run")
            found = processes.run(command, timeout=3600)
            found.check_returncode()
    return float(canonical.loads(found.stdout))


def _print_peak(name: str, numerics: str, mode: str, out: str) -> None:
    task = _task(name, numerics, _WARM)
    if mode == "replay":
        replay_segment(_opened(Path(out)), 0)
    elif mode == "native":
        data = declared_data(task, None).with_salt(bytes(32))
        model, optimizer = build(task, accelerator())
        for number in range(1, task.steps + 1):
            take_step(task, model, optimizer, data.batch(number), task.learning_rate_at(number))
    else:
        begun = begin(task, Path(out), _config(), device="native")
        for number in range(1, task.steps + 1):
            _record(begun, task, number)
        begun.recorder.finish()
    print(json.dumps(held()))


def verdict(rows: Sequence[Row]) -> str | None:
    """Which repetition takes longer than it may, or None."""
    for row in rows:
        if row["mode"] == "replay" and row["step_ratio"] > MOST:
            return f"{row['work']}, {row['numerics']}: a replay takes {row['step_ratio']:.2f} times the recorded step"
    return None


def table(rows: Sequence[Row]) -> list[str]:
    """Lines for a person."""
    lines = [f"{'work':24} {'numerics':9} {'step':14} {'ms':>9} {'native':>7} {'step':>6} {'MiB':>8} {'native':>7}"]
    for row in rows:
        peak = "" if row["peak_mib"] is None else f"{row['peak_mib']:8.0f} {row['peak_ratio']:6.2f}×"
        lines.append(
            f"{row['work']:24} {row['numerics']:9} {row['mode']:14} {1000 * row['seconds']:9.2f} "
            f"{row['ratio']:6.2f}× {row['step_ratio']:5.2f}× {peak}".rstrip()
        )
    return lines


if __name__ == "__main__":
    _print_peak(*sys.argv[1:])
