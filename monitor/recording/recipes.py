"""The prover: trains a preset's task on monitored chips and leaves a run folder behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from firmware_sim.errors import CallerError
from monitor.environment import accelerator, check_subnormals
from monitor.lab.evidence import chip_evidence, write_answers
from monitor.lab.lies import conduct
from monitor.lab.simulated_lab import LabConfig, SimulatedLab, lab_path
from monitor.presets.task import Task
from monitor.presets.training import build, take_step
from monitor.programs.interpreter import loss_bits
from monitor.recording.options import RunConfig, checked_shares
from monitor.recording.parents import start_from
from monitor.recording.recorder import Recorder
from monitor.recording.sources import DeclaredSource, lab_salt
from monitor.replay.derivation import clocks_of, derive
from monitor.transcript import RunData, RunFolder
from monitor.transcript.data import declared_data

__all__ = [
    "Begun",
    "Progress",
    "TrainResult",
    "begin",
    "chip_evidence",
    "reference_of",
    "resume",
    "train",
    "write_answers",
]

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, loss bits)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Result of a finished training."""

    run: Path
    run_id: str
    state_digest: str
    steps: int
    rounding_log_bytes: int


def reference_of(task: Task, config: LabConfig, shares: Sequence[int] | None = None) -> dict[str, object]:
    """What maker and inspectorate know of a lab's chips, each with so many shares, before it trains a task."""
    if config.silicon is not None:
        return SimulatedLab.reference_values(config, SimulatedLab.noted_clocks(config, Path(config.silicon).parent))
    declared = replace(derive(task).declaration, shares=checked_shares(shares, config.chips))
    clocks = clocks_of(task, declared.layout)
    return SimulatedLab.reference_values(config, SimulatedLab.clocks_by_chip(config, clocks))


def train(
    task: Task,
    out: Path,
    config: LabConfig,
    *,
    device: str,
    run: RunConfig | None = None,
    parent: Path | None = None,
    progress: Progress | None = None,
) -> TrainResult:
    """Train from the first step; write ``out`` (evidence), ``out.lab`` (the lab's private side), ``out.trust.json``.

    Args:
        device: name of the replay device that this process runs as, for the metadata.
        run: of it counts what no task says: shares, ``sync`` and ``reference``.
        parent: a finished run of the same preset, from whose final weights and buffers this one starts.

    Raises:
        CallerError: ``out`` exists, or the task or configuration is impossible.
    """
    return _train(begin(task, out, config, device=device, run=run, parent=parent), task, progress)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A preset's recorded training, wherever its recorder is."""

    recorder: Recorder
    model: nn.Module
    optimizer: Optimizer
    data: RunData


def begin(
    task: Task, out: Path, config: LabConfig, *, device: str, run: RunConfig | None = None, parent: Path | None = None
) -> Begun:
    """Commit to the initial state, and take no step; as ``train``."""
    if out.exists():
        raise CallerError(f"{out} exists already; choose another --out or resume it")
    check_subnormals()
    own = declared_data(task, config.source)
    declared = conduct(config.lie, config.lie_step).declare_data(own)
    model, optimizer = build(task, accelerator())
    past = None if parent is None else start_from(model, parent)
    data = declared.with_salt(lab_salt(config, task.to_json(), past and past.run))
    agreed = frozenset({own.agreement} if config.source else ())
    source = DeclaredSource(data, declared.name, declared.files, agreed)
    recorder = Recorder.of_recipe(
        task,
        model,
        optimizer,
        source,
        out=out,
        run=run or RunConfig(),
        lab=config,
        device=device,
        parent=past,
    )
    return Begun(recorder=recorder, model=model, optimizer=optimizer, data=data)


def resume(out: Path, *, sync: bool = False, progress: Progress | None = None) -> TrainResult:
    """Go on with a run that was killed: repeat the steps since its last checkpoint, then record.

    Works on any device.
    """
    if not out.is_dir():
        raise CallerError(f"there is no run folder {out}")
    run = RunFolder(out, SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(out))).verifying)
    model, optimizer = build(run.task, accelerator())
    recorder = Recorder.resume(model, optimizer, out=out, sync=sync)
    return _train(Begun(recorder=recorder, model=model, optimizer=optimizer, data=run.data()), run.task, progress)


def _train(begun: Begun, task: Task, progress: Progress | None) -> TrainResult:
    """The loop of every preset."""
    recorder = begun.recorder
    for number in range(recorder.steps + 1, task.steps + 1):
        batch = begun.data.batch(number)
        with recorder.step(batch) as step:
            loss = take_step(task, begun.model, begun.optimizer, batch, task.learning_rate_at(number))
            step.commit(loss=loss)
        if progress is not None:
            progress(number, task.steps, loss_bits(loss))
    return TrainResult(
        run=recorder.folder,
        run_id=recorder.run_id,
        state_digest=recorder.finish(),
        steps=recorder.steps,
        rounding_log_bytes=recorder.rounding_log_bytes,
    )
