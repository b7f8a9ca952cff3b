"""What a model and its optimizer hold of a job's state, in one order on every rank.

Ranks gather tensors one after another, and a gather takes what each rank gives: two ranks that name them in different
orders would mix two tensors without an error. A dict keeps the order in which it was filled, so that a state read from
a file may have another one in each process.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from firmware_sim.errors import CallerError
from firmware_sim.evidence import TensorKey
from monitor.loops.objects import named_objects, tensors_held

__all__ = ["buffers_of", "held", "owner", "require_one_order"]

_DIGITS = 7


def held(
    parameters: Mapping[str, nn.Parameter], buffers: Mapping[str, Tensor], optimizer: Optimizer
) -> dict[TensorKey, Tensor]:
    """Weights, buffers, and what there is of gradients and optimizer state, sorted by kind and name."""
    found: dict[TensorKey, Tensor] = {("buffer", name): buffer.detach() for name, buffer in buffers.items()}
    for name, parameter in parameters.items():
        found["weight", name] = parameter.detach()
        if parameter.requires_grad and parameter.grad is not None:
            found["gradient", name] = parameter.grad.detach()
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found["optimizer", f"{name}/{key}"] = value.detach()
    return dict(sorted(found.items()))


def buffers_of(model: nn.Module, scaler: GradScaler) -> dict[str, Tensor]:
    """What of a job's state counts as buffers, by name: the model's, and what its gradient scaler counts with."""
    held = tensors_held(named_objects({"scaler": scaler}), ())
    found = ((each.name, each.get()) for each in held)
    return {**dict(model.named_buffers()), **{name: tensor for name, tensor in found if tensor is not None}}


def owner(kind: str, name: str) -> str:
    """The parameter that a tensor of the state belongs to."""
    return name.rpartition("/")[0] if kind == "optimizer" else name


def require_one_order(tensors: Iterable[tuple[TensorKey, Tensor]], device: torch.device) -> None:
    """CallerError on every rank unless all of them are about to gather the same tensors one after another."""
    text = repr([(*key, tuple(tensor.shape), tensor.dtype) for key, tensor in tensors])
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:_DIGITS])
    extremes = torch.tensor([number, -number], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if extremes[0] != -extremes[1]:
        raise CallerError("the ranks hold different tensors; create the same job and optimizer on all of them")
