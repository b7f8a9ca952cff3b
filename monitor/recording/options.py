"""What a caller may choose of a run, and what can be recorded at all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from firmware_sim.errors import CallerError
from monitor.declaration.origin import Origin, Parent
from monitor.declaration.schedules import Schedule
from monitor.declaration.slots import Hyper
from monitor.declaration.statement import (
    OUTSIDE,
    Declaration,
    check_shares,
    is_hyper_name,
    is_state_name,
    members_of,
    optimizer_name,
)
from monitor.lab.lies import lie_name
from monitor.loops.optimizers import Several
from monitor.loops.state import LoopState
from monitor.programs.paths import is_agreed

__all__ = [
    "EVALUATIONS",
    "RunConfig",
    "check_objects",
    "checked_lie",
    "checked_shares",
    "refusals_of_objects",
    "require_new",
]

EVALUATIONS = "evaluations"
"""Among ``direct_paths``, means the programs that only compute and differentiate."""
_OF_MANY = {
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
    "DTensor",
    "ZeroRedundancyOptimizer",
    "DeepSpeedEngine",
}
"""Classes whose objects hold one process's part of a job of many."""
_DECLARED = ("numerics", "seed", "checkpoint_every", "keep", "beside", "maximum_slack", "schedule")
"""What a declaration says of them, under the same names; and ``shares``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How a run is recorded: what it declares, and what else lab and inspector agree on.

    Attributes:
        numerics: ``exact`` or ``rounded``; or ``native``, PyTorch's own kernels, to see what recording alone costs.
            Such a run verifies, but no other device can repeat it, so that inspections reject it; no step of it is
            repeated for ``check_writes``, and attention is made of its plain operators.
        seed: decides all random numbers of steps, whichever generator draws them, and keys of a lab that has none yet.
        shares: how many equal parts of the state each chip holds, such as (3, 1, 2); None for one each.
        checkpoint_every: steps from one checkpoint to the next.
        keep: how many of the newest checkpoints stay on disk, with the first and sparser ones between; None for all.
        beside: how often operators between two training steps, such as those that log a norm, may read or write as much
            as the whole state; whatever takes more of it is an ``evaluation``.
        maximum_slack: the share of the declared work that chips may count above it, of what no replay repeats, such as
            these operators and steps that are repeated after a crash; None for 1/20.
        schedule: rule that the learning rates of all parameter groups follow in the steps that update, such as
            ``Schedule.of_scheduler(scheduler, steps=10_000)``; None declares them step by step.
        free_slots: let numbers change from step to step although no rule explains them; the inspector lists them.
        free: names of hyper-parameters that lab and inspector agree to leave unbound to the arithmetic, or to change,
            and tensors, such as ``buffer/sums``, that may take gradients by numbers that nothing declares.
        direct_paths: tensors of the state, such as ``buffer/codes``, or patterns, such as ``buffer/*.running_mean``,
            that lab and inspector agree batches and constants may reach without passing a loss; ``evaluations`` lets
            programs that only compute take derivatives.
        check_writes: which steps are repeated from their programs before they are committed: ``sampled`` (one step in
            16), ``every``, or a number n (one step in n).
        sync: wait in each step until it is on the disk's medium (``fsync``). Without it, a run whose machine lost power
            goes on to the same bits or is refused by ``Recorder.resume``.
        reference: the trust file but for the countersigned declaration, if not what the simulated world says.

    Raises:
        CallerError: a value of another form.
    """

    numerics: str = "exact"
    seed: int = 0
    shares: Sequence[int] | None = None
    checkpoint_every: int = 4
    keep: int | None = None
    beside: int = OUTSIDE
    maximum_slack: Fraction | None = None
    schedule: Schedule | None = None
    free_slots: bool = False
    free: Collection[str] = ()
    direct_paths: Collection[str] = ()
    check_writes: Literal["sampled", "every"] | int = "sampled"
    sync: bool = False
    reference: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        free = self.free
        if not isinstance(self.sync, bool):
            raise CallerError(f"sync must be True or False, not {self.sync!r}")
        if isinstance(free, str) or not all(is_hyper_name(name) or is_state_name(name) for name in free):
            raise CallerError(
                f"free must list names of hyper-parameters, or tensors such as 'buffer/sums', not {free!r}"
            )
        if isinstance(self.direct_paths, str):
            raise CallerError(f"direct_paths must list tensors of the state, not {self.direct_paths!r}")
        check = self.check_writes
        if check not in ("sampled", "every") and (type(check) is not int or check < 1):
            raise CallerError(f"check_writes must be 'sampled', 'every' or a number of steps from 1 on, not {check!r}")

    @property
    def one_in(self) -> int:
        """Of how many steps one is repeated from its program; some always are."""
        check = self.check_writes
        return check if isinstance(check, int) else {"sampled": 16, "every": 1}[check]

    def declare(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        state: LoopState,
        groups: Sequence[Hyper],
        shares: Sequence[int],
        parent: Parent | None = None,
    ) -> Declaration:
        """The declaration of a run that begins with a state in memory."""
        return Declaration(
            **{name: getattr(self, name) for name in _DECLARED},
            shares=tuple(shares),
            optimizer=optimizer_name(optimizer),
            groups=tuple(groups),
            parameters=members_of(model, optimizer),
            state=state.entries,
            origin=Origin(state=str(state.memory.digest().root), parent=parent),
        )

    def require_declared(self, declared: Declaration, names: Collection[str]) -> None:
        """CallerError where one of the named values, of which a run to go on with has declared its own, is another."""
        for name in sorted({"shares", *_DECLARED} & set(names)):
            mine, known = getattr(self, name), getattr(declared, name)
            if mine != known and (name != "shares" or (mine is not None and tuple(mine) != known)):
                raise CallerError(f"the run declares {name} {known}, not {mine}; leave it out to go on as it began")

    def require_named(self, names: Collection[str]) -> None:
        """CallerError if ``direct_paths`` or ``free`` lists what names no tensor of the state."""
        listed = [("direct_paths", each) for each in sorted({*self.direct_paths} - {EVALUATIONS})]
        for keyword, pattern in listed + [("free", each) for each in sorted(self.free) if is_state_name(each)]:
            if not any(is_agreed(name, {pattern}) for name in names):
                raise CallerError(
                    f"{keyword} lists {pattern!a:.200}, which names no tensor of the state; list tensors of the "
                    f"state such as {min(names)!a:.200}, or patterns such as 'buffer/*.running_mean'"
                )


def require_new(folder: Path) -> None:
    """CallerError if a run folder is there already."""
    if folder.exists():
        raise CallerError(f"{folder} exists already; choose another folder, or go on with Recorder.resume")


def checked_shares(shares: Sequence[int] | None, chips: int) -> tuple[int, ...]:
    """How many equal parts of the state each of a lab's chips holds; one each unless the caller says otherwise."""
    found = (1,) * chips if shares is None else tuple(shares)
    check_shares(found)
    if len(found) != chips:
        raise CallerError(f"{len(found)} shares are given for {chips} chips")
    return found


def checked_lie(lie: str | None, step: int) -> str | None:
    """Name of the lie that a simulated lab tells, or None for an honest one."""
    if type(step) is not int or step < 1:
        raise CallerError(f"lie_step must be at least 1, not {step!r}")
    return None if lie is None else lie_name(lie)


def check_objects(model: object, optimizer: object) -> None:
    """CallerError unless model and optimizer are such as can be recorded."""
    for refusal in refusals_of_objects(model, optimizer):
        raise refusal


def _shared(model: object, optimizer: object) -> str:
    """The class by which many processes share the job of these objects, if they do."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    weights = model.parameters() if isinstance(model, nn.Module) else ()
    members = [each for _, each in optimizer.members] if isinstance(optimizer, Several) else [optimizer]
    names = (each.__name__ for thing in (*modules, *weights, *members) for each in type(thing).__mro__)
    return next((name for name in names if name in _OF_MANY), "")


def refusals_of_objects(model: object, optimizer: object) -> Iterator[CallerError]:
    """Each reason why model and optimizer cannot be recorded that shows without a step."""
    if shared := _shared(model, optimizer):
        yield CallerError(
            f"{shared} shares a job among processes, but a Recorder records one process; "
            "use monitor.distributed.recorder.DistributedRecorder"
        )
        return
    if not isinstance(optimizer, Optimizer | Several):
        yield CallerError(f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if not isinstance(model, nn.Module):
        yield CallerError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            yield CallerError(f"{name} has no shape yet; call the model on a batch before the recorder is made")
        elif tensor.device.type == "meta":
            yield CallerError(f"{name} lies on meta; a recorded model has tensors with values")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield CallerError(f"{name or 'the model'} is a script module; record the model without torch.jit")
