"""A preset's training as ordinary PyTorch: model, optimizer and the step of its loop."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from monitor.presets import initialise, preset
from monitor.presets.task import Task

__all__ = ["build", "take_step"]


def build(task: Task, place: torch.device) -> tuple[nn.Module, Optimizer]:
    """Make and initialise a task's model and optimizer, with all gradients and optimizer state there from the start.

    PyTorch would otherwise make them in the first step, whose program would then be another than all others'.
    """
    with place:
        model = preset(task.preset).build()
    model.train()
    if place.type != "meta":
        initialise(model, task.seed)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    return model, _optimizer(task, model)


def take_step(
    task: Task, model: nn.Module, optimizer: Optimizer, batch: Mapping[str, Tensor], learning_rate: float
) -> Tensor:
    """Take one step and return the scalar FP32 loss."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.zero_grad(set_to_none=False)
    loss = preset(task.preset).loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss


def _optimizer(task: Task, model: nn.Module) -> Optimizer:
    parameters = list(model.parameters())
    if task.optimizer == "adamw":
        adamw = AdamW(
            parameters,
            lr=task.learning_rate,
            betas=(task.beta_1, task.beta_2),
            eps=task.epsilon,
            weight_decay=task.weight_decay,
            foreach=False,
            fused=False,
        )
        for parameter in parameters:
            moments = {key: torch.zeros_like(parameter, requires_grad=False) for key in ("exp_avg", "exp_avg_sq")}
            adamw.state[parameter] = {"step": torch.zeros((), dtype=torch.float32), **moments}
        return adamw
    sgd = SGD(
        parameters,
        lr=task.learning_rate,
        momentum=task.momentum,
        weight_decay=task.weight_decay,
        foreach=False,
        fused=False,
    )
    for parameter in parameters if task.momentum else ():
        sgd.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}
    return sgd
