"""What the witness finds in a made step, and whether there is anything to be found."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from monitor import numerics
from monitor.programs.interpreter import Prepared, Watch
from monitor.programs.keys import RepeatedKeys
from monitor.programs.program import Program
from monitor.replay.witness import Difference, differences
from monitor.sharding import ShardedMemory
from tests.measurements.paths import Made, Step

__all__ = ["is_open", "witnesses"]


def witnesses(made: Made, program: Program) -> list[Difference]:
    """Differences that the witness finds in a made step, run on its own values."""
    tensors = {}
    for name, place in program.commit.items():
        kind, _, rest = name.partition("/")
        shape, dtype = (place["shape"], getattr(torch, place["dtype"])) if place else ((), torch.float32)
        tensors[kind, rest] = made.state.get(name, torch.zeros(shape, dtype=dtype)).detach().clone()
    if not any(tensor.numel() for tensor in tensors.values()):
        return []
    memory = ShardedMemory(tensors, 1)

    def run(batch: Mapping[str, Tensor], watch: Watch) -> None:
        keys = RepeatedKeys(0, 1)
        session = numerics.recording("exact", keys=keys)
        Prepared(program, memory).run(batch, program.numbers, session, keys, watch)

    return differences(program, memory, run, made.batch, hashlib.sha256(made.name.encode()).digest())


def is_open(made: Made, *, silent: bool = True) -> bool:
    """Whether, with all gradients zero, another batch leaves another finite number in the state: by PyTorch alone.

    Args:
        silent: False asks the same of what no loss depends on, the batch's ``model``, with gradients as they are.
    """
    others = [{**made.batch, "model": torch.full_like(made.batch["model"], value)} for value in (0.25, -0.75)]
    first, *rest = (_reached(made, batch, silent) for batch in (made.batch, *others))
    return any(
        all(bool(((each[name] != value) & each[name].isfinite() & value.isfinite()).any()) for each in rest)
        for name, value in first.items()
        if not name.startswith("gradient/")
    )


def _reached(made: Made, batch: Mapping[str, Tensor], silent: bool) -> dict[str, Tensor]:
    """The state after the step's body, as PyTorch computes it."""
    true, ones = torch.autograd.grad, torch.ones_like

    def silenced(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> Any:
        if isinstance(outputs, Tensor) and (grad_outputs is None or bool((grad_outputs == 1).all())):
            grad_outputs = torch.zeros_like(outputs)
        return true(outputs, inputs, grad_outputs, **options)

    def no_ones(given: Tensor, **options: Any) -> Tensor:
        return (
            torch.zeros_like(given, **options) if given.numel() == 1 else ones(given, **options)
        )  # a seed by its form

    state = {
        name: each.clone().requires_grad_(name.startswith("weight/") and each.is_floating_point())
        for name, each in made.state.items()
    }
    capture: Any = SimpleNamespace(taken=0)
    step = Step(state, {name: tensor.clone() for name, tensor in batch.items()}, capture)
    with (
        mock.patch("torch.autograd.grad", silenced if silent else true),
        mock.patch("torch.ones_like", no_ones if silent else ones),
    ):
        made.body(step)
    return {name: tensor.detach() for name, tensor in step.state.items()}
