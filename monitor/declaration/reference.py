"""The update that a declared optimizer makes, as a program: PyTorch's own class over tensors of one element."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from firmware_sim.errors import CallerError, EvidenceError
from monitor.declaration.statement import Declaration
from monitor.numerics.operators import is_counted
from monitor.programs.capture import Capture
from monitor.programs.keys import RecordedKeys
from monitor.programs.program import Program
from monitor.programs.watching import WriteWatch

__all__ = ["CLASSES", "IMPLEMENTATION", "SCHEDULES", "Contradicted", "NotBound", "ReferenceOptimizer", "Update"]

CLASSES: Mapping[str, type[Optimizer]] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.RAdam),
        *(torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD),
    )
}
"""Optimizers whose numbers depend on hyper-parameters and the count of updates alone, never on a tensor's shape."""

IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of PyTorch's optimizers that choose among implementations of one arithmetic."""

SCHEDULES = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""What PyTorch's schedules keep in parameter groups for themselves."""

_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What an optimizer raises on hyper-parameters that make no sense."""


class NotBound(Exception):
    """A step's arithmetic cannot be compared with its declared hyper-parameters; the text says why."""


class Contradicted(NotBound):
    """An update computes with other operators or arguments than the declared hyper-parameters give."""


@dataclass(frozen=True, slots=True)
class Update:
    """One run of the optimizer's ``step``: the weights that it writes, and whether by operators on lists."""

    weights: frozenset[str]
    foreach: bool


class ReferenceOptimizer:
    """Follows a run: takes each of its updates as the declared class takes it, on tensors of one element.

    Its own counters go on from update to update, so numbers that depend on them are those of the run.

    Args:
        task: class, groups, their weights and the layout of the state.
        start: the state that the run began with, under ``kind/name``.

    Raises:
        NotBound: a class is none of ``CLASSES``, or it refuses the declared hyper-parameters.
    """

    def __init__(self, task: Declaration, start: Mapping[str, Tensor]) -> None:
        kinds = [CLASSES.get(name) for name in task.optimizer.split("+")]
        kinds *= len(task.groups) if len(kinds) == 1 else 1
        if len(kinds) != len(task.groups) or None in kinds:
            raise NotBound(f"the arithmetic of optimizer {task.optimizer[:100]!a} is not known here")
        self._layouts: dict[str, dict[str, Tensor]] = {}
        weights = {}
        for entry in task.state:
            shape, dtype = (1,) * len(entry.shape), getattr(torch, entry.dtype)
            if entry.kind == "weight":
                weights[entry.name] = torch.zeros(shape, dtype=dtype)
            elif entry.kind == "optimizer":
                owner, _, key = entry.name.rpartition("/")
                value = start[f"optimizer/{entry.name}"]
                single = math.prod(entry.shape) == 1
                first = value.detach().cpu().reshape(shape).clone() if single else torch.zeros(shape, dtype=dtype)
                self._layouts.setdefault(owner, {})[key] = first
        self._weights: dict[str, Tensor] = {name: weights[name] for group in task.parameters for name in group}
        self._names = {weight: name for name, weight in self._weights.items()}
        groups = [
            {**_hyper(hyper), "params": [weights[name] for name in names]}
            for hyper, names in zip(task.groups, task.parameters, strict=True)
        ]
        try:
            # PyTorch's classes take one group after the other, so each group may have an instance of its own.
            self._optimizers = [
                kind([group])  # type: ignore[call-arg]
                for kind, group in zip(kinds, groups, strict=True)
                if kind is not None
            ]
        except _FAILURES as error:
            raise NotBound(_refusal(task.optimizer, error)) from None
        self._class = task.optimizer
        self._owner = {
            weight: each for each in self._optimizers for group in each.param_groups for weight in group["params"]
        }
        self._unmoved = set(self._weights)

    @property
    def known(self) -> frozenset[str]:
        """Names of the hyper-parameters that the class has."""
        return frozenset(name for each in self._optimizers for name in each.defaults)

    def take(self, updates: Sequence[Update], groups: Sequence[Mapping[str, Any]], present: Collection[str]) -> Program:
        """Take the updates of the next step.

        Args:
            groups: the step's hyper-parameters of each parameter group.
            present: weights for which the optimizer holds state when the step begins.

        Returns:
            What the class computes, as a program over ``state:weight/…``, ``state:optimizer/…`` and
            ``state:gradient/…``.

        Raises:
            NotBound: the class refuses the hyper-parameters.
        """
        self._settle(present)
        capture = Capture(RecordedKeys(0, 0), WriteWatch(0))
        capture.declare_inputs(self._held(), {})
        ranges = []
        try:
            for update in updates:
                first = len(capture.nodes)
                self._prepare(update, groups, capture)
                with _Calls(capture):
                    for each in self._optimizers:
                        each.step()
                ranges.append((first, len(capture.nodes)))
            return capture.program(dict(self._held()), {}, tuple(ranges))
        except (*_FAILURES, CallerError, EvidenceError) as error:
            raise NotBound(_refusal(self._class, error)) from None

    def _settle(self, present: Collection[str]) -> None:
        """Have state for just these weights: that of the start where none was made since."""
        for name, weight in self._weights.items():
            if name not in present:
                self._owner[weight].state.pop(weight, None)
            elif name in self._unmoved:
                self._owner[weight].state[weight] = dict(self._layouts[name])
                self._unmoved.remove(name)

    def _prepare(self, update: Update, groups: Sequence[Mapping[str, Any]], capture: Capture) -> None:
        gradients = {}
        for name, weight in self._weights.items():
            weight.grad = None
            if name in update.weights:
                weight.grad = gradients[f"gradient/{name}"] = torch.ones_like(weight)
                self._unmoved.discard(name)
        capture.declare_inputs(gradients, {})
        own = [group for each in self._optimizers for group in each.param_groups]
        for group, hyper in zip(own, groups, strict=True):
            group.update(_hyper(hyper))
            if hyper.get("foreach") is None:  # then PyTorch chooses by where the weights lie
                group["foreach"] = update.foreach

    def _held(self) -> dict[str, Tensor]:
        held = {f"weight/{name}": weight for name, weight in self._weights.items()}
        states = [item for each in self._optimizers for item in each.state.items()]
        for weight, state in states:
            for key, value in state.items():
                if isinstance(value, Tensor):
                    held[f"optimizer/{self._names[weight]}/{key}"] = value
        return held


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a capture the calls that a session would show it."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._capture = capture

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_counted(func):
            return func(*args, **kwargs)
        index = len(self._capture.nodes)
        self._capture.before(index, func, args, kwargs)
        out = func(*args, **kwargs)
        self._capture.after(index, func, args, kwargs, out)
        return out


def _hyper(declared: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in declared.items()}


def _refusal(optimizer: str, error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{optimizer} refuses the declared hyper-parameters: {text[:200]!a}"
