"""The update that a declared optimizer makes, as a program: PyTorch's own class over tensors of one element.

Weights of ``SHAPED`` have their own shapes, on which their update's operators and numbers depend.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from firmware_sim.errors import CallerError, EvidenceError
from monitor.declaration.formulas import FORMULAS, Formula
from monitor.declaration.statement import Declaration
from monitor.declaration.update_calls import ITEM, NotBound, OtherCount, UpdateCalls, UpdateForm
from monitor.programs.capture import Capture
from monitor.programs.keys import RecordedKeys
from monitor.programs.memory_watch import WriteWatch
from monitor.programs.program import Program

__all__ = [
    "CLASSES",
    "IMPLEMENTATION",
    "READING",
    "SCHEDULES",
    "SHAPED",
    "ReferenceOptimizer",
    "Update",
    "classes_of",
    "may_vary",
]

CLASSES: Mapping[str, type[Optimizer]] = dict(FORMULAS) | {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.RAdam),
        *(torch.optim.NAdam, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD),
        *(torch.optim.Rprop, torch.optim.Adafactor, torch.optim.Muon),
    )
}
"""Optimizers whose numbers depend on hyper-parameters, the count of updates and, in ``SHAPED``, shapes alone.

Those of packages are formulas, from which a package may differ.
"""

SHAPED = frozenset({torch.optim.Muon, torch.optim.Adafactor})
"""Those that take a weight's shape into account: how it is turned, and by what its rate is multiplied."""

READING = frozenset({torch.optim.Adafactor, torch.optim.Rprop})
"""Those whose calls depend on values that an update reads: the size of a weight, whether a scalar's gradient turned.

A transcript states these, and a replay reads them again.
"""

IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Settings of PyTorch's optimizers that choose among implementations of one arithmetic."""

SCHEDULES = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"})
"""What PyTorch's schedules keep in parameter groups for themselves."""

_BASE = "z"
"""Where schedule-free optimizers keep the weights that they step from: zeros there would take all weights to zero."""

_AVERAGES = frozenset(
    {"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg", "row_var"}
    | {"col_var", "variance", "prev", "ax", "mu"}
)
"""What optimizers keep of gradients and weights, and no rate: it brings no more than another W_0 would.

A declared origin covers it: a supplied W_0 by its digest, one that continues a run by the final state of that run.
"""

_MOST_FORMS = 8
"""Captured updates that are kept: a loop has a few, and a run of thousands of programs must not fill the memory."""


_Values = tuple[dict[Tensor, Tensor], list[dict[Tensor, dict[str, object]]], list[list[dict[str, object]]]]

_FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What an optimizer raises on hyper-parameters that make no sense."""


def may_vary(optimizer: str, name: str, declared: Any, used: Any) -> bool:
    """Tell whether a step may use another value of a hyper-parameter than was declared.

    A rate may; a momentum, or the first of betas, below what was declared, as schedules cycle it; what an optimizer of
    a package keeps in its groups; and all of an optimizer that is not known, whose numbers are not bound.
    """
    kind = CLASSES.get(optimizer)
    if kind is None or name in {"lr"} | SCHEDULES or (issubclass(kind, Formula) and name in kind.KEPT):
        return True
    if name not in ("momentum", "betas"):
        return False
    old, new = (list(each) if isinstance(each, list | tuple) else [each] for each in (declared, used))
    try:
        return len(old) == len(new) > 0 and old[1:] == new[1:] and 0 <= new[0] <= old[0]
    except TypeError:
        return False


def classes_of(task: Declaration) -> list[str]:
    """The declared class of each parameter group's optimizer; where they are not as many, what was declared."""
    named = task.optimizer.split("+")
    return named if len(named) == len(task.groups) else [task.optimizer] * len(task.groups)


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

    Attributes:
        unknown: of the groups whose class is none of ``CLASSES``, the weights: nothing is said of their updates.
        reasons: the hyper-parameters of these groups, each with why it is not bound.

    Raises:
        NotBound: no class is one of ``CLASSES``, or one refuses the declared hyper-parameters.
    """

    def __init__(self, task: Declaration, start: Mapping[str, Tensor]) -> None:
        named = classes_of(task)
        self.reasons: dict[str, str] = {}
        for name, hyper in zip(named, task.groups, strict=True):
            if name not in CLASSES:
                reason = f"the arithmetic of optimizer {name[:100]!a} is not known here"
                self.reasons.update(dict.fromkeys(hyper.keys() - IMPLEMENTATION - SCHEDULES, reason))
        kinds = [CLASSES.get(name) for name in named]
        if not any(kinds):
            raise NotBound(next(iter(self.reasons.values()), "there is no parameter group"))
        self._named = named
        self._is_known = [kind is not None for kind in kinds]
        self.unknown = frozenset(
            name for names, known in zip(task.parameters, self._is_known, strict=True) if not known for name in names
        )
        self._layouts: dict[str, dict[str, Tensor]] = {}
        weights = {}
        shaped = {name for names, kind in zip(task.parameters, kinds, strict=True) if kind in SHAPED for name in names}
        for entry in task.state:
            owner = entry.name if entry.kind == "weight" else entry.name.rpartition("/")[0]
            shape = tuple(entry.shape) if owner in shaped else (1,) * len(entry.shape)
            dtype = getattr(torch, entry.dtype)
            if entry.kind == "weight":
                weights[entry.name] = torch.zeros(shape, dtype=dtype)
            elif entry.kind == "optimizer":
                key = entry.name.rpartition("/")[2]
                value = start[f"optimizer/{entry.name}"]
                single = math.prod(entry.shape) == 1
                first = value.detach().cpu().reshape(shape).clone() if single else torch.zeros(shape, dtype=dtype)
                self._layouts.setdefault(owner, {})[key] = first
        self._weights: dict[str, Tensor] = {
            name: weights[name]
            for names, known in zip(task.parameters, self._is_known, strict=True)
            if known
            for name in names
        }
        self._names = {weight: name for name, weight in self._weights.items()}
        groups = [
            {**_hyper(hyper), "params": [weights[name] for name in names]}
            for hyper, names in zip(task.groups, task.parameters, strict=True)
        ]
        try:
            # PyTorch's classes take one group after the other, so each group may have its own instance.
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
        self._brought = {
            name: f"the optimizer's {key!a:.100} of {name!a:.100} begins with what its class does not make and "
            "no step of this run has left; begin with a new optimizer"
            for name, weight in self._weights.items()
            for key in self._layouts.get(name, {})
            if not _may_begin(key, value := start[f"optimizer/{name}/{key}"], self._owner[weight].param_groups[0])
            and (key == _BASE or not _is_made(value, self._first(weight, key)))
        }
        self._taken: dict[tuple[Any, ...], tuple[UpdateForm, Program]] = {}
        self._reads: dict[tuple[Any, ...], list[int]] = {}

    @property
    def formulas(self) -> frozenset[str]:
        """Weights whose updates are those of a package, as far as its formula is followed."""
        return frozenset(self._names[weight] for weight, each in self._owner.items() if isinstance(each, Formula))

    def drop_formulas(self, reason: str) -> None:
        """From now on nothing is said of the updates of packages: one was another than its formula makes."""
        gone = self.formulas
        members = iter(self._optimizers)
        for number, known in enumerate(self._is_known):
            if known and isinstance(member := next(members), Formula):
                self._is_known[number] = False
                text = f"the arithmetic of optimizer {self._named[number][:100]!a} is not that of its formula: {reason}"
                names = member.param_groups[0].keys() - {"params"} - IMPLEMENTATION - SCHEDULES
                self.reasons.update(dict.fromkeys(names, text))
        self._optimizers = [each for each in self._optimizers if not isinstance(each, Formula)]
        self._owner = {weight: each for weight, each in self._owner.items() if not isinstance(each, Formula)}
        for name in gone:
            del self._names[self._weights.pop(name)]
        self.unknown |= gone
        self._taken.clear()

    @property
    def known(self) -> frozenset[str]:
        """Names of the hyper-parameters that the class has."""
        return frozenset(name for each in self._optimizers for name in each.defaults)

    def take(
        self,
        updates: Sequence[Update],
        groups: Sequence[Mapping[str, Any]],
        present: Collection[str],
        values: Sequence[Sequence[str]] = (),
    ) -> Program:
        """Take the updates of the next step.

        Args:
            groups: the step's hyper-parameters of each parameter group.
            present: weights for which the optimizer holds state when the step begins.
            values: what each update reads, as the transcript states it, for optimizers of ``READING``.

        Returns:
            What the class computes, as a program over ``state:weight/…``, ``state:optimizer/…`` and
            ``state:gradient/…``.

        Raises:
            EvidenceError: an update states another count of updates than there were.
            NotBound: the class refuses the hyper-parameters, or values that it reads are not stated.
        """
        self._settle(present)
        key = (tuple(updates), frozenset(present))
        try:
            stated = self._own_reads(key, updates, groups, values)
            if key in self._taken:
                form, program = self._taken[key]
                before, again = self.values(), self._run(updates, groups, stated, None)[0]
                if again.is_like(form):
                    return replace(program, scalars=tuple(again.scalars))
                self.put_back(before)
            capture = Capture(RecordedKeys(0, 0), WriteWatch(0))
            capture.updating = True
            capture.declare_inputs(self._held(), {})
            form, ranges = self._run(updates, groups, stated, capture)
            program = capture.program(dict(self._held()), {}, ranges)
        except OtherCount as error:
            raise EvidenceError(str(error)) from None
        except (*_FAILURES, CallerError, EvidenceError) as error:
            raise NotBound(_refusal(self._class, error)) from None
        self._taken[key] = form, program
        if len(self._taken) > _MOST_FORMS:
            del self._taken[next(iter(self._taken))]
        return program

    def _run(
        self,
        updates: Sequence[Update],
        groups: Sequence[Mapping[str, Any]],
        values: Sequence[Sequence[str]] | None,
        capture: Capture | None,
    ) -> tuple[UpdateForm, tuple[tuple[int, int], ...]]:
        """Take the updates, without stated values as if all were known; returns their form, and the calls of each."""
        form = UpdateForm()
        form.declare(self._held())
        ranges = []
        for update, read in zip(updates, [()] * len(updates) if values is None else values, strict=True):
            first = len(form.calls)
            gradients = self._prepare(update, groups)
            form.declare(gradients)
            if capture is not None:
                capture.declare_inputs(gradients, {})
            calls = UpdateCalls(form, capture, read)
            with calls:
                for each in self._optimizers:
                    calls.own = self._counts if values is not None and type(each) in READING else None
                    each.step()
            ranges.append((first, len(form.calls)))
        form.close(self._held())
        return form, tuple(ranges)

    def _own_reads(
        self,
        key: tuple[Any, ...],
        updates: Sequence[Update],
        groups: Sequence[Mapping[str, Any]],
        values: Sequence[Sequence[str]],
    ) -> list[Sequence[str]]:
        """What each update reads itself, after all that its closure read."""
        if READING.isdisjoint(map(type, self._optimizers)):
            return [() for _ in updates]
        if key not in self._reads:
            before = self.values()
            form, ranges = self._run(updates, groups, None, None)
            self.put_back(before)
            self._reads[key] = [sum(call[0] is ITEM for call in form.calls[first:last]) for first, last in ranges]
        return [each[max(len(each) - count, 0) :] for each, count in zip(values, self._reads[key], strict=True)]

    def _counts(self) -> set[int]:
        """Where the optimizers count their updates: of what is read, this is known here."""
        states = (state for each in self._optimizers for state in each.state.values())
        return {state["step"].data_ptr() for state in states if isinstance(state.get("step"), Tensor)}

    def values(self) -> _Values:
        """All values that an update changes."""
        with torch.no_grad():
            weights = {weight: weight.clone() for weight in self._weights.values()}
            states = [
                {
                    weight: {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
                    for weight, state in each.state.items()
                }
                for each in self._optimizers
            ]
        groups = [[dict(group) for group in each.param_groups] for each in self._optimizers]
        return weights, states, groups

    def put_back(self, copied: _Values) -> None:
        """Undo all updates since these were the values."""
        weights, states, groups = copied
        with torch.no_grad():
            for weight, value in weights.items():
                weight.copy_(value)
        for each, state, kept in zip(self._optimizers, states, groups, strict=True):
            each.state.clear()
            each.state.update(state)
            for group, before in zip(each.param_groups, kept, strict=True):
                group.clear()
                group.update(before)

    def _first(self, weight: Tensor, key: str) -> Any:
        """What the class makes of a weight's state before any update; None where it waits for the first."""
        made, [group] = self._owner[weight].state.get(weight, {}).get(key), self._owner[weight].param_groups
        value = group.get("initial_accumulator_value")
        if made is None or key != "sum" or value is None:
            return made
        return complex(value, value) if weight.is_complex() else value

    def _settle(self, present: Collection[str]) -> None:
        """Have state for just these weights: that of the start where none was made since."""
        for name, weight in self._weights.items():
            if name not in present:
                self._owner[weight].state.pop(weight, None)
            elif name in self._unmoved:
                if name in self._brought:
                    raise NotBound(self._brought[name])
                self._owner[weight].state[weight] = dict(self._layouts[name])
                self._unmoved.remove(name)

    def _prepare(self, update: Update, groups: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Give weights their gradients and groups their hyper-parameters; returns the gradients."""
        gradients = {}
        for name, weight in self._weights.items():
            weight.grad = None
            if name in update.weights:
                weight.grad = gradients[f"gradient/{name}"] = torch.ones_like(weight)
                self._unmoved.discard(name)
        own = [(each, group) for each in self._optimizers for group in each.param_groups]
        for (owner, group), hyper in zip(own, compress(groups, self._is_known), strict=True):
            kept = owner.KEPT if isinstance(owner, Formula) else ()
            group.update({name: value for name, value in _hyper(hyper).items() if name not in kept})
            if hyper.get("foreach") is None:  # then PyTorch chooses by where the weights lie
                group["foreach"] = update.foreach
        return gradients

    def _held(self) -> dict[str, Tensor]:
        held = {f"weight/{name}": weight for name, weight in self._weights.items()}
        states = [item for each in self._optimizers for item in each.state.items()]
        for weight, state in states:
            for key, value in state.items():
                if isinstance(value, Tensor):
                    held[f"optimizer/{self._names[weight]}/{key}"] = value
        return held


def _may_begin(key: str, begun: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether a tensor of an optimizer's state scales no update by more than the declared numbers do."""
    if key in _AVERAGES:
        return True
    rate = group.get("lr")
    most = {"step": math.inf, "mu_product": 1.0, "sum": math.inf, "step_size": rate, "eta": rate}.get(key)
    if not isinstance(most, int | float) or begun.is_complex() or not begun.numel():
        return False
    low, high = (float(each) for each in begun.double().aminmax())
    return 0.0 <= low <= high <= most and (key != "step" or low.is_integer())


def _is_made(begun: Tensor, made: Any) -> bool:
    """Whether a tensor of an optimizer's state holds what its class makes before any update, or zeros where it waits.

    Zeros are what most classes begin with, and a recipe's state lies there from the start. In the others' places, such
    as a rate or a size of steps, they make an update smaller.
    """
    return bool((begun == (0 if made is None else made)).all())


def _hyper(declared: Mapping[str, Any]) -> dict[str, object]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in declared.items()}


def _refusal(optimizer: str, error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{optimizer} refuses the declared hyper-parameters: {text[:200]!a}"
