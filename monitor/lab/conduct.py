"""How an honest lab behaves, as the moments at which a lie could depart from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from firmware_sim.lies import Chance, Lie
from monitor.replay.reexecution import Behaviour

if TYPE_CHECKING:
    from pathlib import Path

    from torch.optim import Optimizer

    from monitor.declaration.statement import Declaration
    from monitor.lab.host import Host
    from monitor.lab.simulated_lab import LabConfig, SimulatedLab
    from monitor.replay.moment import Moment
    from monitor.sharding import ShardedMemory
    from monitor.transcript.data import DeclaredData

__all__ = ["LAB_LIES", "Conduct", "LabLie", "shuffle_weights", "tells", "undeclared"]


def undeclared(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch of the same shapes that was not declared."""
    return {name: values.flip(0).roll(1, -1) for name, values in batch.items()}


def shuffle_weights(memory: ShardedMemory, seed: int) -> None:
    """Put other weights in place of a state's: its own in an order that the seed gives, and a little added."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for (kind, _), tensor in memory.tensors.items():
            if kind == "weight":
                flat = tensor.detach().reshape(-1)
                order = torch.randperm(flat.numel(), generator=generator).to(flat.device)
                tensor.copy_((flat[order] + 2.0**-7).view(tensor.shape))


class Conduct(Behaviour):
    """The honest lab.

    Attributes:
        keeps_leaves: whether it looks at leaves that were committed long ago.

    Args:
        step: at which a lie departs from honesty; those about the start, the end or all of a run take none.
    """

    keeps_leaves = False

    def __init__(self, step: int = 0) -> None:
        self._step = step

    @property
    def lies(self) -> bool:
        """Whether it departs from honesty, so that its recorder's own checks would find it."""
        return type(self) is not Conduct

    def check(self, declared: Declaration, config: LabConfig) -> None:
        """Raise CallerError if that lab cannot carry out this lie in that run."""

    def declare_data(self, data: DeclaredData) -> DeclaredData:
        """Return the samples and their order that the lab declares and trains on."""
        return data

    def before_run(self, lab: SimulatedLab) -> None:
        """Called once before the chips hold the run's memory."""

    def initialise(self, declared: Declaration, memory: ShardedMemory, lab: SimulatedLab) -> None:
        """Called on the initial state before it is committed."""

    def in_evaluation(self, step: int, optimizer: Optimizer) -> None:
        """Called as the body of an evaluation begins; what it computes counts as the body's."""

    def record(self, moment: Moment) -> tuple[bytes, str]:
        """Return the rounding log that the lab commits to, and the bits of the loss that the step has under it."""
        return moment.log, moment.loss

    def head(self, step: int, shard: int, host: Host) -> bytes:
        """Return the root of the log of steps that the chip with a shard receives after a step."""
        return host.root(step)

    def rest(self, host: Host) -> None:
        """Called when the chips have heard of a step, and before the next one begins."""

    def after_step(self, step: int, host: Host) -> None:
        """Called after a step was committed and the chips have seen it."""

    def before_evidence(self, host: Host) -> None:
        """Called after the last step, before the chips are asked for their evidence."""

    def hand_over(self, shard: int, evidence: dict[str, bytes], host: Host) -> dict[str, bytes]:
        """Return the evidence files of the chip that holds a shard, as the lab hands them over."""
        return evidence

    def publish(self, run: Path, lab: SimulatedLab) -> None:
        """Called with the finished run folder before anybody else sees it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabLie(Lie):
    """A lie of a lab with honest chips.

    Attributes:
        conduct: makes the conduct that tells it, from the step at which the lab departs from honesty.
    """

    conduct: Callable[[int], Conduct]


LAB_LIES: dict[str, LabLie] = {}
"""The lies of labs by name; ``monitor.lab.lies`` imports all modules that describe one."""

_AnyConduct = TypeVar("_AnyConduct", bound=type[Conduct])


def tells(
    name: str, text: str, chance: Chance, found_by: str = "", **more: Any
) -> Callable[[_AnyConduct], _AnyConduct]:
    """Describe the lie that a conduct tells, with guards in one text and ``more`` fields of ``Lie`` by name."""

    def describe(conduct: _AnyConduct) -> _AnyConduct:
        LAB_LIES[name] = LabLie(
            name=name, text=text, chance=chance, found_by=frozenset(found_by.split()), conduct=conduct, **more
        )
        return conduct

    return describe
