"""What a distributed job trains: functions from which every process makes its part, and one process all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from monitor import numerics
from monitor.recording.micro_batches import total

__all__ = ["Job", "norm_of"]


def norm_of(gradient: Tensor) -> Tensor:
    """The norm of one whole gradient by the rule of exact numerics, outside of any step."""
    with torch.no_grad(), numerics.recording("exact"):
        norm: Tensor = torch.linalg.vector_norm(gradient)
        return norm


def _no_units(model: nn.Module) -> Sequence[nn.Module]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training loop's parts.

    Attributes:
        model: makes the model; its initial values are those that ``monitor.initialised`` gives.
        optimizer: makes the optimizer of some parameters.
        loss: scalar FP32 loss of one micro-batch, divided by whatever divides the whole batch's (such as its number
            of tokens): gradients and losses of micro-batches are added.
        micro_batches: per step, whatever the number of processes.
        clip: largest norm of all gradients together; None for no clipping.
        units: modules of the model that are gathered each by itself where parameters are sharded.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer]
    loss: Callable[[nn.Module, Any], Tensor]
    micro_batches: int
    clip: float | None = None
    units: Callable[[nn.Module], Sequence[nn.Module]] = _no_units

    def take_step(self, model: nn.Module, optimizer: Optimizer, parts: Iterator[Any]) -> Tensor:
        """The step as one process takes it, given its micro-batches; returns its loss."""
        losses = []
        for part in parts:
            loss = self.loss(model, part)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        if self.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        optimizer.step()
        return total(losses)

    def clipped(self, gradients: Sequence[Tensor], norms: Sequence[Tensor]) -> Tensor:
        """Scale gradients, or shards of them, as ``clip_grad_norm_`` does, given each whole one's norm."""
        assert self.clip is not None
        norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
        coefficient = torch.clamp(self.clip / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(coefficient)
        return norm
