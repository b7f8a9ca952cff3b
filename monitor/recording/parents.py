"""A model takes over the final weights and buffers of an earlier, finished run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from firmware_sim.errors import CallerError
from monitor.declaration.origin import TAKEN_OVER, Parent
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript import RunFolder

__all__ = ["hold", "start_from"]


def start_from(model: nn.Module, folder: Path) -> Parent:
    """Let a model hold the final state of a finished run, which lies next to its lab's folder.

    Raises:
        CallerError: there is no such run, it is not finished, or its model has other tensors.
        EvidenceError: the run was altered.
    """
    run = RunFolder(folder, SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(folder))).verifying)
    if not run.finished:
        raise CallerError(f"{folder} is not finished, so it has no final state to start from")
    step = run.declared.steps
    hold(model, run.checkpoint(step))
    return Parent(run=run.manifest.run, step=step, state=str(run.leaf(step).state.root))


def hold(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy the weights and buffers of a state; CallerError unless the model has these tensors and no others."""
    mine: dict[str, Tensor] = {f"weight/{name}": tensor for name, tensor in model.named_parameters()}
    mine |= {f"buffer/{name}": tensor for name, tensor in model.named_buffers()}
    held = {name: tensor for name, tensor in state.items() if name.partition("/")[0] in TAKEN_OVER}
    layouts = [{name: (each.dtype, each.shape) for name, each in group.items()} for group in (mine, held)]
    if layouts[0] != layouts[1]:
        odd = sorted(name for name in mine.keys() | held.keys() if layouts[0].get(name) != layouts[1].get(name))
        raise CallerError(f"this model and the parent's do not have the same tensors (first difference: {odd[0]!a})")
    with torch.no_grad():
        for name, tensor in mine.items():
            tensor.copy_(held[name])
