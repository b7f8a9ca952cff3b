"""One preset trained for a few steps on this process's device, as digests: what the equality table compares."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from firmware_sim.errors import CallerError
from firmware_sim.evidence import Digest, digest_list, digest_tensor
from monitor.environment import accelerator
from monitor.numerics import recording, replaying
from monitor.numerics.known_answers import require_engines
from monitor.presets import preset
from monitor.presets.task import Task, draw_order
from monitor.recording.training import Training
from monitor.transcript import to_batch

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


def _batches(task: Task) -> Iterator[dict[str, Tensor]]:
    samples = preset(task.preset).samples(None)
    order = draw_order(task, len(next(iter(samples.values()))))
    for rows in order:
        yield to_batch(samples, np.asarray(rows))


def run_trial(job: dict[str, Any]) -> dict[str, Any]:
    """Train and return digests of weights (with buffers), optimizer state and all losses.

    Args:
        job: ``preset``, ``steps``, ``seed``, ``batch_size`` (None for the preset's), ``numerics``; ``logs``, a
            folder, or None; ``role``, with rounded numerics ``recording``, which writes a log for each step there, or
            ``replaying``, which reads them.

    Returns:
        ``weights``, ``optimizer``, ``losses`` (digests), ``last_loss``, ``step_seconds``, ``log_bytes``, ``entries``
        and ``forced`` (decisions of the log that this device alone would have taken the other way).

    Raises:
        EvidenceError: a log contradicts this device's arithmetic.
        CallerError: a log is missing.
        DeviceError: an engine of this device fails its known-answer test.
    """
    require_engines(job["numerics"], device=str(accelerator()))
    numerics, folder = job["numerics"], Path(job["logs"]) if job["logs"] else None
    task = Task.for_preset(
        job["preset"],
        seed=job["seed"],
        steps=job["steps"],
        batch_size=job["batch_size"],
        numerics=numerics,
        shards=1,
        checkpoint_every=job["steps"],
    )
    training = Training(task)
    losses: dict[str, Tensor] = {}
    log_bytes = entries = forced = 0
    started = time.perf_counter()
    for step, batch in enumerate(_batches(task), start=1):
        path = None if folder is None or numerics != "rounded" else folder / f"step-{step:04d}.log"
        if path is not None and job["role"] == "replaying":
            session = replaying(numerics, _read(path))
        else:
            session = recording(numerics)
        with session:
            losses[f"step {step:08d}"] = training.take_step(batch)
        if path is not None and job["role"] == "recording":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(session.log)
        log_bytes += len(session.log)
        entries += session.statistics.entries
        forced += session.statistics.forced
    seconds = time.perf_counter() - started
    tensors = training.memory.tensors
    digests = {
        name: str(_digest(name, {f"{kind}/{key}": value for (kind, key), value in tensors.items() if kind in kinds}))
        for name, kinds in _KINDS.items()
    }
    return {
        **digests,
        "losses": str(_digest("losses", losses)),
        "last_loss": float(losses[f"step {task.steps:08d}"]),
        "step_seconds": seconds / task.steps,
        "log_bytes": log_bytes,
        "entries": entries,
        "forced": forced,
    }


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CallerError(f"cannot read the rounding log {path}: {error.strerror}") from None
