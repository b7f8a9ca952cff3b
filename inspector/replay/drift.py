"""Why control was needed: the same training without it, and with its rounding decisions taken freely.

Runs in a device's own process. *Native drift* trains the declared task in plain FP32 and reports the weights, so that
two devices can be compared. *Free decisions* replays a recorded step sequence and counts the logged decisions that
this device would have taken the other way; each alone would have ended bit equality.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from monitor import numerics
from monitor.numerics import Bound, Policy
from monitor.presets.task import Task
from monitor.recording.training import Training
from monitor.transcript import RunData

__all__ = ["DRIFT_BOUND", "DRIFT_POLICY", "native_weights", "record_decisions", "replay_decisions"]

DRIFT_POLICY = Policy(compute="float32", grid="bfloat16")
DRIFT_BOUND = Bound(kind="probabilistic", contradictions=1 << 20)
"""FP32 arithmetic on a bfloat16 grid is today's practice; its windows are wide, so devices really disagree."""


def native_weights(task: Task, data: RunData, steps: int) -> tuple[np.ndarray, list[str]]:
    """Train the task in plain FP32.

    Returns the weights after the last step, FP32 [weights], and the state digest after each step.
    """
    training = Training(task)
    digests = []
    for step in range(1, steps + 1):
        training.take_step(data.batch(step))
        digests.append(str(training.memory.digest().root))
    tensors = [tensor for (kind, _), tensor in training.memory.tensors.items() if kind == "weight"]
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).numpy().copy(), digests


def record_decisions(task: Task, data: RunData, steps: int) -> list[bytes]:
    """Train under ``DRIFT_POLICY`` and return each step's rounding log."""
    training = Training(task)
    logs = []
    for step in range(1, steps + 1):
        batch = data.batch(step)
        with numerics.recording("rounded", policy=DRIFT_POLICY, bound=DRIFT_BOUND) as session:
            training.take_step(batch)
        logs.append(session.log)
    return logs


def replay_decisions(task: Task, data: RunData, logs: list[bytes]) -> dict[str, Any]:
    """Replay those steps here; count logged decisions and those that this device alone would have turned."""
    training = Training(task)
    logged, turned = [], []
    for step, log in enumerate(logs, start=1):
        batch = data.batch(step)
        with numerics.replaying("rounded", log, policy=DRIFT_POLICY, bound=DRIFT_BOUND) as session:
            training.take_step(batch)
        logged.append(session.statistics.entries)
        turned.append(session.statistics.forced)
    first = next((step for step, count in enumerate(turned, start=1) if count), None)
    state = str(training.memory.digest().root)
    return {"logged": logged, "turned": turned, "first_turned_step": first, "state_digest": state}
