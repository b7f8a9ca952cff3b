"""One training process: a preset's model and optimizer, living in sharded chip memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from monitor.environment import accelerator
from monitor.presets import initialise, preset
from monitor.sharding import ShardedMemory, adopt
from monitor.task import Task

__all__ = ["Training"]


class Training:
    """The state of a run after some step, and the function that takes it one step further.

    The only inputs of a step are the state, the declared batch and the learning rate of that step.

    Attributes:
        step: number of optimizer steps taken so far.
        memory: all weights, buffers, gradients and optimizer state, as the chips hold them.
    """

    def __init__(self, task: Task, *, device: str | torch.device | None = None) -> None:
        """Builds and initialises model and optimizer on ``device``, by default where this process trains."""
        self.task = task
        self.step = 0
        self._preset = preset(task.preset)
        place = accelerator() if device is None else torch.device(device)
        with place:
            self.model = self._preset.build()
        self.model.train()
        if place.type != "meta":
            initialise(self.model, task.seed)
        self._optimizer, state = _optimizer(task, self.model)
        self.memory = adopt(self.model, state, task.shards)
        _install(self._optimizer, self.model, self.memory)

    def take_step(self, batch: Mapping[str, Tensor], *, learning_rate: float | None = None) -> Tensor:
        """Advance by one optimizer step and return the scalar FP32 loss (a tensor, still inside the numerics)."""
        number = self.step + 1
        rate = self.task.learning_rate_at(number) if learning_rate is None else learning_rate
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad(set_to_none=False)
        loss = self._preset.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self.step = number
        return loss.detach()


def _optimizer(task: Task, model: nn.Module) -> tuple[Optimizer, dict[tuple[str, str], Tensor]]:
    """Make the optimizer and its initial state, which PyTorch would otherwise allocate in the first step."""
    parameters = list(model.named_parameters())
    values = [parameter for _, parameter in parameters]
    state: dict[tuple[str, str], Tensor] = {}
    optimizer: Optimizer
    if task.optimizer == "adamw":
        optimizer = AdamW(
            values,
            lr=task.learning_rate,
            betas=(task.beta_1, task.beta_2),
            eps=task.epsilon,
            weight_decay=task.weight_decay,
            foreach=False,
            fused=False,
        )
        for name, parameter in parameters:
            state["optimizer", f"{name}/exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            state["optimizer", f"{name}/exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        for name, _ in parameters:
            state["optimizer", f"{name}/step"] = torch.zeros((), dtype=torch.float32)
        return optimizer, state
    optimizer = SGD(
        values,
        lr=task.learning_rate,
        momentum=task.momentum,
        weight_decay=task.weight_decay,
        foreach=False,
        fused=False,
    )
    if task.momentum:
        for name, parameter in parameters:
            state["optimizer", f"{name}/momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
    return optimizer, state


def _install(optimizer: Optimizer, model: nn.Module, memory: ShardedMemory) -> None:
    """Point the optimizer's per-parameter state at the chips' memory."""
    for name, parameter in model.named_parameters():
        slots = {
            key.rpartition("/")[2]: tensor
            for (kind, key), tensor in memory.tensors.items()
            if kind == "optimizer" and key.rpartition("/")[0] == name
        }
        if slots:
            optimizer.state[parameter] = slots
