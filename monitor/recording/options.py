"""What a caller may choose outside the declaration, and what can be recorded at all."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import Optimizer

from firmware_sim.errors import CallerError
from monitor.declaration.statement import check_shares, is_hyper_name, is_state_name
from monitor.lab.lies import simulated_lie
from monitor.loops.optimizers import Several
from monitor.programs.paths import is_agreed

__all__ = [
    "EVALUATIONS",
    "Options",
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
_SAMPLED = 16
"""Of how many steps one is repeated from its program, unless the caller says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a caller may choose outside the declaration.

    Attributes:
        data: digests of samples and orders that lab and inspector agreed on, where they are not a preset's own.
        reference: the trust file but for the countersigned declaration, if not what the simulated world says.
        one_in: of how many steps one is repeated from its program, in addition to those that always are.
        sync: each step outlives a power loss, and not only the end of the process.
        trusted: the body cannot do anything else than its program, so that it is captured once, then followed.
    """

    free_slots: bool = False
    free: frozenset[str] = frozenset()
    direct_paths: frozenset[str] = frozenset()
    data: frozenset[str] = frozenset()
    reference: Mapping[str, Any] | None = None
    one_in: int = _SAMPLED
    sync: bool = False
    trusted: bool = False

    @classmethod
    def of(
        cls,
        free_slots: bool,
        free: Sequence[str],
        direct_paths: Sequence[str],
        check_writes: object,
        sync: object = False,
    ) -> Options:
        """Check a caller's arguments."""
        if not isinstance(sync, bool):
            raise CallerError(f"sync is True or False, not {sync!r}")
        if isinstance(free, str) or not all(is_hyper_name(name) or is_state_name(name) for name in free):
            raise CallerError(f"free lists names of hyper-parameters, or tensors such as 'buffer/sums', not {free!r}")
        if isinstance(direct_paths, str):
            raise CallerError(f"direct_paths lists tensors of the state, not {direct_paths!r}")
        return cls(
            free_slots=free_slots,
            free=frozenset(free),
            direct_paths=frozenset(direct_paths),
            one_in=_one_in(check_writes),
            sync=sync,
        )

    def require_named(self, names: Collection[str]) -> None:
        """CallerError if ``direct_paths`` or ``free`` lists what names no tensor of the state."""
        listed = [("direct_paths", each) for each in sorted(self.direct_paths - {EVALUATIONS})]
        for keyword, pattern in listed + [("free", each) for each in sorted(self.free) if is_state_name(each)]:
            if not any(is_agreed(name, {pattern}) for name in names):
                raise CallerError(
                    f"{keyword} lists {pattern!a:.200}, which names no tensor of the state; list tensors of the "
                    f"state such as {min(names)!a:.200}, or patterns such as 'buffer/*.running_mean'"
                )


def _one_in(check_writes: object) -> int:
    if check_writes in ("sampled", "every"):
        return _SAMPLED if check_writes == "sampled" else 1
    if type(check_writes) is not int or check_writes < 1:
        raise CallerError(f"check_writes is 'sampled', 'every' or a number of steps from 1 on, not {check_writes!r}")
    return check_writes


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
    return None if lie is None else simulated_lie(lie).value


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
