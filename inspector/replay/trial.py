"""A training's first steps on this process's device, as digests: what the equality table compares."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from firmware_sim.errors import file_error
from firmware_sim.evidence import Digest, digest_list, digest_tensor
from inspector.replay.decisions import Decisions
from inspector.replay.scheduler import Answer, Job
from inspector.replay.work import steps_of
from monitor.environment import accelerator
from monitor.numerics import recording, replaying
from monitor.numerics.known_answers import require_engines
from monitor.numerics.statistics import Statistics
from monitor.programs.interpreter import loss_of

__all__ = ["run_trial"]

_KINDS = {"weights": ("weight", "buffer"), "optimizer": ("optimizer",)}


def _digest(name: str, tensors: dict[str, Tensor]) -> Digest:
    items = []
    for key, tensor in tensors.items():
        values = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        data = values.reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(values.dtype).removeprefix("torch.")
        items.append((key, digest_tensor(name=key, dtype=dtype, shape=tuple(values.shape), offset=0, data=data)))
    return digest_list(name, items, allow_empty=True)  # SGD without momentum keeps nothing


def _digests(tensors: Mapping[tuple[str, str], Tensor]) -> dict[str, str]:
    return {
        name: str(_digest(name, {f"{kind}/{key}": value for (kind, key), value in tensors.items() if kind in kinds}))
        for name, kinds in _KINDS.items()
    }


def run_trial(job: Job) -> Answer:
    """Train and return digests of weights (with buffers), optimizer state and all losses.

    Args:
        job: what ``steps_of`` takes, and ``numerics``; ``logs``, a folder, or None; ``role``, with rounded numerics
            ``recording``, which writes a log for each step there, or ``replaying``, which reads them.

    Returns:
        ``weights``, ``optimizer``, ``losses`` (digests), ``last_loss``, ``step_seconds``, ``log_bytes``, ``entries``,
        ``forced`` (decisions of the log that this device alone would have taken the other way) and ``decisions``
        (``inspector.replay.decisions``).

    Raises:
        EvidenceError: a log contradicts this device's arithmetic.
        CallerError: a log is missing.
        DeviceError: an engine of this device fails its known-answer test.
    """
    require_engines(job["numerics"], device=str(accelerator()))
    numerics, folder = job["numerics"], Path(job["logs"]) if job["logs"] else None
    steps, count = steps_of(job)
    losses: dict[str, Tensor] = {}
    log_bytes = entries = 0
    statistics: dict[int, Statistics] = {}
    started = time.perf_counter()
    for step in range(1, count + 1):
        path = None if folder is None or numerics != "rounded" else folder / f"step-{step:04d}.log"
        if path is not None and job["role"] == "replaying":
            session, loss = steps.take_under(partial(replaying, numerics, _read(path)))
        else:
            session, loss = steps.take_under(partial(recording, numerics))
        losses[f"step {step:08d}"] = loss_of(loss)
        if path is not None and job["role"] == "recording":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(session.log)
        log_bytes += len(session.log)
        entries += session.statistics.entries
        statistics[step] = session.statistics
    seconds, decisions = time.perf_counter() - started, Decisions.of(statistics)
    return {
        **_digests(steps.training.memory.tensors),
        "losses": str(_digest("losses", losses)),
        "last_loss": float(losses[f"step {count:08d}"]),
        "step_seconds": seconds / count,
        "log_bytes": log_bytes,
        "entries": entries,
        "forced": decisions.turned,
        "decisions": decisions.to_json(),
    }


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise file_error(f"cannot read the rounding log {path}", error) from None
