"""Why control was needed: a run's steps without it, and with their rounding decisions taken freely.

Runs in a device's own process. *Native drift* takes the steps in plain FP32, so that the weights of two devices can be
compared. *Free decisions* takes them with formats whose decisions devices really disagree about, and counts the
logged ones that this device would have taken the other way; each alone would have ended bit equality.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from inspector.replay.scheduler import Answer, Job
from inspector.replay.work import open_job_run
from monitor import numerics
from monitor.environment import accelerator
from monitor.numerics import Bound, Formats
from monitor.numerics.known_answers import require_engines
from monitor.replay.steps import ProgramSteps
from monitor.transcript import RunFolder, encode_state

__all__ = ["DRIFT_BOUND", "DRIFT_FORMATS", "native_weights", "record_decisions", "replay_decisions", "run_drift"]

DRIFT_FORMATS = Formats(compute="float32", grid="bfloat16")
DRIFT_BOUND = Bound(kind="probabilistic", contradictions=1 << 20)
"""FP32 arithmetic on a bfloat16 grid is today's practice; its windows are wide, so devices really disagree."""


def native_weights(run: RunFolder) -> tuple[dict[str, Tensor], list[str]]:
    """Take all steps in plain FP32.

    Returns the weights after the last step by name, and the state digest after each step.
    """
    steps = ProgramSteps(run, 0)
    digests = []
    for _ in range(run.committed):
        steps.take_under(partial(numerics.recording, "native"))
        digests.append(str(steps.training.memory.digest().root))
    tensors = steps.training.memory.tensors.items()
    return {name: tensor for (kind, name), tensor in tensors if kind == "weight"}, digests


def record_decisions(run: RunFolder) -> list[bytes]:
    """Take all steps under ``DRIFT_FORMATS`` and return each one's rounding log."""
    steps = ProgramSteps(run, 0)
    control = partial(numerics.recording, "rounded", formats=DRIFT_FORMATS, bound=DRIFT_BOUND)
    return [steps.take_under(control)[0].log for _ in range(run.committed)]


def replay_decisions(run: RunFolder, logs: Sequence[bytes]) -> dict[str, object]:
    """Repeat those steps here; count logged decisions and those that this device alone would have turned."""
    steps = ProgramSteps(run, 0)
    logged, turned = [], []
    for log in logs:
        control = partial(numerics.replaying, "rounded", log, formats=DRIFT_FORMATS, bound=DRIFT_BOUND)
        session, _ = steps.take_under(control)
        logged.append(session.statistics.entries)
        turned.append(session.statistics.forced)
    first = next((step for step, count in enumerate(turned, start=1) if count), None)
    state = str(steps.training.memory.digest().root)
    return {"logged": logged, "turned": turned, "first_turned_step": first, "state_digest": state}


def run_drift(job: Job) -> Answer:
    """Take a run's steps both ways on this device.

    Args:
        job: ``run``, ``lab_key`` and ``manifest``; ``logs``, paths of what ``record_decisions`` returned; ``weights``,
            the path where this device's native weights are left, as a state.
    """
    require_engines("rounded", device=str(accelerator()))
    run = open_job_run(job)
    weights, digests = native_weights(run)
    Path(job["weights"]).write_bytes(encode_state(weights))
    logs = [Path(path).read_bytes() for path in job["logs"]]
    return {"native_digests": digests, "decisions": replay_decisions(run, logs)}
