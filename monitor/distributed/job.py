"""What a distributed job trains: functions from which every process makes its part, and one process all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from monitor import numerics
from monitor.numerics.exact.accumulator import ExactSum
from monitor.recording.micro_batches import total

__all__ = ["Job", "largest_of", "norm_of", "scales_of", "squares_of"]


def norm_of(gradient: Tensor) -> Tensor:
    """The norm of one whole gradient by the rule of exact numerics, outside of any step."""
    with torch.no_grad(), numerics.recording("exact"):
        norm: Tensor = torch.linalg.vector_norm(gradient)
        return norm


def largest_of(shards: Sequence[Tensor]) -> Tensor:
    """(shards,) INT32: the bits of each one's largest magnitude, which lie in the order of magnitudes."""
    bits = [
        each.abs().view(torch.int32).max() if each.numel() else torch.zeros((), dtype=torch.int32) for each in shards
    ]
    return torch.stack(bits)


def scales_of(largest: Tensor) -> Tensor:
    """The powers of two by which tensors are divided before their squares are added, given ``largest_of`` them."""
    return ((((largest >> 23) & 0xFF).clamp(min=1, max=253)) << 23).view(torch.float32)


def squares_of(shards: Sequence[Tensor], scales: Tensor) -> Tensor:
    """(shards · 10,) INT64: the digits of each one's exact sum of squares, and its special bits."""
    found = []
    for shard, scale in zip(shards, scales, strict=True):
        held, small = ExactSum(1, shard.device), torch.div(shard, scale)
        held.add_all(small * small)
        found += [held.digits.reshape(-1), held.special.to(torch.int64)]
    return torch.cat(found)


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
