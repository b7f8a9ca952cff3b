"""What a distributed job trains: functions from which every process makes its part, and one process all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from firmware_sim.errors import CallerError
from monitor import numerics
from monitor.loops.optimizers import one_optimizer
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


def _no_scaler() -> GradScaler:
    return GradScaler("cpu", enabled=False)


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
        scheduler: makes the schedule of the optimizer's rates, which goes on after each step.
        scaler: makes the gradient scaler of half-precision losses, whose scale is a part of the state.
        score: as ``loss``, of an evaluation's micro-batches; None for ``loss`` itself.
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer]
    loss: Callable[[nn.Module, Any], Tensor]
    micro_batches: int
    clip: float | None = None
    units: Callable[[nn.Module], Sequence[nn.Module]] = _no_units
    scheduler: Callable[[Optimizer], LRScheduler] | None = None
    scaler: Callable[[], GradScaler] = _no_scaler
    score: Callable[[nn.Module, Any], Tensor] | None = None

    def make_optimizer(self, parameters: Mapping[str, nn.Parameter]) -> Optimizer:
        """The optimizer of some parameters, whose updates a recorded run takes by plain operators."""
        return one_optimizer(self.optimizer(iter(parameters.values())))

    def take_step(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        scaler: GradScaler,
        parts: Iterable[Any],
        *,
        clip: Callable[[], None] | None = None,
        add: Callable[[list[Tensor]], Tensor] = total,
    ) -> Tensor:
        """The step as one process takes it, given its micro-batches, or as a rank does; returns its loss.

        Args:
            clip: scales all gradients, where this process does not hold them whole.
            add: adds the losses of all micro-batches, given those of this process.
        """
        losses = []
        model.zero_grad()
        for part in parts:
            loss = _one_number(self.loss(model, part))
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        scaler.unscale_(optimizer)
        if clip is not None:
            clip()
        elif self.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        scaler.step(optimizer)
        scaler.update()
        return add(losses)

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, parts: Iterable[Any], *, add: Callable[[list[Tensor]], Tensor] = total
    ) -> Tensor:
        """The loss of an evaluation, whose program writes nothing of the state; arguments as of ``take_step``."""
        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            return add([_one_number((self.score or self.loss)(model, part)).detach() for part in parts])
        finally:
            for module, mode in modes.items():
                module.training = mode

    def clipped(self, gradients: Sequence[Tensor], norms: Sequence[Tensor]) -> Tensor:
        """Scale gradients, or shards of them, as ``clip_grad_norm_`` does, given each whole one's norm."""
        assert self.clip is not None
        norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
        coefficient = torch.clamp(self.clip / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(coefficient)
        return norm


def _one_number(loss: Tensor) -> Tensor:
    if loss.numel() != 1 or not loss.dtype.is_floating_point:
        what = f"{str(loss.dtype).removeprefix('torch.')}{list(loss.shape)}"
        raise CallerError(f"the loss of a micro-batch must be one number, not {what}; return its sum in FP32")
    loss = loss.float()
    return loss.reshape(()) if loss.dim() else loss
