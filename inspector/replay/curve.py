"""The losses of one training on this process's device: what ``bench quality`` compares."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from inspector.replay.scheduler import Answer, Job
from inspector.replay.work import steps_of
from monitor.numerics import Session, Statistics, recording
from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.operators import row_named
from monitor.numerics.session import MakesCall
from monitor.programs.interpreter import loss_of
from monitor.replay.repetition import Control

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


class _ShortOperands(Session):  # type: ignore[no-untyped-call]
    """Native arithmetic on shortened operands; how an accelerator's reduced precision looks from outside."""

    def operator(self, func: OpOverload) -> MakesCall:
        native, places = super().operator(func), row_named(str(func)).factors

        def shortened(index: int, args: Arguments, kwargs: Keywords) -> Any:
            short = tuple(shorten(value) if place in places else value for place, value in enumerate(args))
            return native(index, short, kwargs)

        return shortened if places else native


def _short_operands(*, keys: Callable[[], int]) -> Session:
    return _ShortOperands("native", None, Statistics(), None, keys)


def run_curve(job: Job) -> Answer:
    """Train and return every step's loss.

    Args:
        job: what ``steps_of`` takes, and ``mode``: native, exact, rounded or ``CONTROL``.

    Returns:
        ``losses``: FP32 values as Python numbers, in order.

    Raises:
        CallerError: a step commits to no loss, so that there is nothing to compare.
    """
    control: Control = _short_operands if job["mode"] == CONTROL else partial(recording, job["mode"])
    steps, count = steps_of(job)
    return {"losses": [float(loss_of(steps.take_under(control)[1])) for _ in range(count)]}
