"""What a job trains again: a preset's task by its derived program, or the recorded steps of a run."""

from __future__ import annotations

from pathlib import Path

from firmware_sim.errors import CallerError
from firmware_sim.evidence import VerifyingKey
from inspector.replay.scheduler import Job
from monitor.presets.task import Task
from monitor.replay.derivation import DerivedSteps
from monitor.replay.steps import ProgramSteps
from monitor.transcript import RunFolder

__all__ = ["open_job_run", "steps_of"]


def open_job_run(job: Job) -> RunFolder:
    """Open the very run that the job's sender verified, whatever lies in its place by now.

    Args:
        job: ``run``, ``lab_key`` and ``manifest``; with ``opened`` the folder holds no more than the job needs.
    """
    key = VerifyingKey(bytes.fromhex(job["lab_key"]))
    opened = () if job.get("opened") else None
    return RunFolder(Path(job["run"]), key, manifest=job["manifest"], opened=opened)


def steps_of(job: Job) -> tuple[ProgramSteps | DerivedSteps, int]:
    """The training of a job, at its initial state, and its number of steps.

    Args:
        job: ``run``, ``lab_key`` and ``manifest`` of a run whose programs its sender may execute; or ``preset``,
            ``steps``, ``seed`` and perhaps ``batch_size`` (None for the preset's).
    """
    if "run" in job:
        run = open_job_run(job)
        if run.committed < 1:
            raise CallerError("the run has no step yet")
        return ProgramSteps(run, 0), run.committed
    task = Task.for_preset(
        job["preset"], seed=job["seed"], steps=job["steps"], batch_size=job.get("batch_size"), shards=1
    )
    return DerivedSteps(task), task.steps
