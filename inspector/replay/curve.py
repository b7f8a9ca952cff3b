"""The losses of one training on this process's device: what ``bench quality`` compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from monitor.numerics import recording
from monitor.numerics.operators import row_named
from monitor.presets import preset
from monitor.presets.task import Task, draw_order
from monitor.recording.training import Training
from monitor.transcript import to_batch

__all__ = ["CONTROL", "CONTROL_BITS", "run_curve", "shorten"]

CONTROL_BITS = 11
"""Significant bits of FP16 and of the operands of tensor cores in TF32 mode."""

CONTROL = f"native-{CONTROL_BITS}-bit-operands"
"""A control that is meant to be worse: native FP32, but for the operands of every matrix product and convolution."""

_DROPPED = 24 - CONTROL_BITS


def shorten(x: Tensor) -> Tensor:
    """Round finite FP32 values to ``CONTROL_BITS`` significant bits, to nearest even (subnormals to fewer)."""
    bits = x.contiguous().view(torch.int32)
    odd = (bits >> _DROPPED) & 1
    half = (1 << (_DROPPED - 1)) - 1
    return ((bits + half + odd) & -(1 << _DROPPED)).view(torch.float32)


class _ShortOperands(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Native arithmetic on shortened operands; how an accelerator's reduced precision looks from outside."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        places = row_named(str(func)).factors
        args = tuple(shorten(value) if place in places else value for place, value in enumerate(args))
        return func(*args, **(kwargs or {}))


def run_curve(job: dict[str, Any]) -> dict[str, Any]:
    """Train and return every step's loss.

    Args:
        job: ``preset``, ``steps``, ``seed`` (of weights and data order) and ``mode``: native, exact, rounded or
            ``CONTROL``.

    Returns:
        ``losses``: FP32 values as Python numbers, in order.
    """
    mode = job["mode"]
    name = "native" if mode == CONTROL else mode
    task = Task.for_preset(job["preset"], seed=job["seed"], steps=job["steps"], numerics=name, shards=1)
    controls: Callable[[], Any] = _ShortOperands if mode == CONTROL else lambda: recording(name)
    samples = preset(task.preset).samples(None)
    training = Training(task)
    losses = []
    for rows in draw_order(task, len(next(iter(samples.values())))):
        batch = to_batch(samples, np.asarray(rows))
        with controls():
            loss = training.take_step(batch)
        losses.append(float(loss))
    return {"losses": losses}
