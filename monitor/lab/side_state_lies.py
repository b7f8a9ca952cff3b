"""Lies about what a lab does with the state outside its programs, and about what it calls an evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from firmware_sim import NO_WORK, Work
from firmware_sim.errors import CallerError
from firmware_sim.lies import Chance, Scenery
from monitor.lab.conduct import Conduct, tells
from monitor.programs.flop import live_work
from monitor.transcript import EVALUATION

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from monitor.declaration.statement import Declaration
    from monitor.lab.host import Host
    from monitor.lab.simulated_lab import LabConfig
    from monitor.sharding import ShardedMemory
    from monitor.transcript import Leaf

_NORM = torch.ops.aten.linalg_vector_norm.default


def _work_outside(memory: ShardedMemory, least: Work) -> Work:
    """Take norms of the weights until more is done than ``least``; what the chips have metered."""
    done = NO_WORK
    while done <= least:
        for (kind, _), tensor in memory.tensors.items():
            if kind == "weight":
                work = live_work(_NORM, (tensor,), {}, _NORM(tensor))
                memory.meter.charge(work)
                done += work
    return done


@tells(
    "untold-work", "works with the state between two steps, and tells of it in none", Chance.ALWAYS, "meter snapshot"
)
class _UntoldWork(Conduct):
    """Works with the state after one step, little enough to be allowed, and the next step does not tell of it."""

    def check(self, declared: Declaration, config: LabConfig) -> None:
        if declared.length is not None and declared.length <= self._step:
            raise CallerError(
                "the step after the lie has to report the extra work; choose a lie step before the last one"
            )

    def after_step(self, step: int, host: Host) -> None:
        if step == self._step:
            self.work(host)

    def work(self, host: Host) -> None:
        """What the chips see of it."""
        _work_outside(host.memory, NO_WORK)


@tells(
    "more-work", "works with the state between two steps, more than was agreed, and tells of it", Chance.ALWAYS, "meter"
)
class _MoreWork(_UntoldWork):
    """Works with the state after one step, more than the declaration allows, and the next step tells of it."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self._reported = NO_WORK

    def work(self, host: Host) -> None:
        self._reported = _work_outside(host.memory, host.declared.allowance)

    def declare(self, leaf: Leaf) -> Leaf:
        if leaf.step != self._step + 1 or leaf.execution is None:
            return leaf
        return replace(leaf, execution=replace(leaf.execution, outside=leaf.execution.outside + self._reported))


@tells("step-as-evaluation", "calls a step that trains an evaluation", Chance.ALWAYS)
class _StepAsEvaluation(Conduct):
    """Calls a step that trains an evaluation, which rules about steps and learning rates do not count."""

    def declare(self, leaf: Leaf) -> Leaf:
        if leaf.step != self._step or leaf.execution is None:
            return leaf
        return replace(leaf, execution=replace(leaf.execution, kind=EVALUATION))


@tells("dropping-evaluation", "drops optimizer state in an evaluation", Chance.ALWAYS, scenery=Scenery.EVALUATIONS)
class _DroppingEvaluation(Conduct):
    """Drops the optimizer's state in the first evaluation at or after one step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._reported = False

    def check(self, declared: Declaration, config: LabConfig) -> None:
        if declared.recipe is not None:
            raise CallerError(
                "this lie needs evaluations, and presets have none; record a loop that evaluates, with Recorder"
            )

    def in_evaluation(self, step: int, optimizer: Optimizer) -> None:
        if step >= self._step and optimizer.state and not self._reported:
            self._reported = True
            self.take(optimizer)

    def take(self, optimizer: Optimizer) -> None:
        """Do what an evaluation must not do."""
        optimizer.state.clear()

    def before_evidence(self, host: Host) -> None:
        if not self._reported:
            raise CallerError(f"from step {self._step} on, no evaluation found optimizer state, which this lie needs")


@tells(
    "moving-evaluation",
    "keeps optimizer state in another place after an evaluation, with other values",
    Chance.ALWAYS,
    scenery=Scenery.EVALUATIONS,
)
class _MovingEvaluation(_DroppingEvaluation):
    """Moves the largest tensor of the optimizer's state elsewhere in an evaluation, half as large, under its name."""

    def take(self, optimizer: Optimizer) -> None:
        places = ((held, key) for held in optimizer.state.values() for key in held)
        held, key = max(places, key=lambda place: torch.as_tensor(place[0][place[1]]).numel())
        held[key] = held[key] * 0.5
