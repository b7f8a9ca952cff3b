"""The optimizers of a caller's loop as one: none, several, and those that an optimizer holds (SAM, Lookahead)."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from firmware_sim.errors import CallerError
from monitor.declaration.reference import CLASSES
from monitor.declaration.statement import class_name

__all__ = [
    "NoOptimizer",
    "Several",
    "groups_of",
    "load_groups",
    "one_optimizer",
    "scaler_of",
    "trial_copy",
    "trial_error",
    "try_step",
]


_NO_LOSS = torch.zeros(())


class NoOptimizer(Optimizer):
    """The optimizer of steps that only compute."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


class _Slots(MutableMapping[str, Any]):
    """What several optimizers keep for one parameter; an inner one's under its place, as ``base.momentum_buffer``."""

    def __init__(self, owners: Sequence[tuple[str, Optimizer]], parameter: Tensor) -> None:
        self._owners = owners
        self._parameter = parameter

    def _place(self, key: str) -> tuple[MutableMapping[str, Any], str]:
        prefix, owner = max((each for each in self._owners if key.startswith(each[0])), key=lambda each: len(each[0]))
        return owner.state[self._parameter], key.removeprefix(prefix)

    def __getitem__(self, key: str) -> Any:
        found, leaf = self._place(key)
        return found[leaf]

    def __setitem__(self, key: str, value: Any) -> None:
        found, leaf = self._place(key)
        found[leaf] = value

    def __delitem__(self, key: str) -> None:
        found, leaf = self._place(key)
        del found[leaf]

    def __iter__(self) -> Iterator[str]:
        return (
            prefix + key
            for prefix, owner in self._owners
            if self._parameter in owner.state
            for key in owner.state[self._parameter]
        )

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _States(MutableMapping[Tensor, Any]):
    """What several optimizers keep for their parameters, as one mapping."""

    def __init__(self, members: Sequence[tuple[str, Optimizer]]) -> None:
        self._members = members

    def __getitem__(self, parameter: Tensor) -> Any:
        owners = [
            each
            for each in self._members
            if any(parameter is mine for group in each[1].param_groups for mine in group["params"])
        ]
        if not owners:
            raise KeyError(parameter)
        return owners[0][1].state[parameter] if owners[-1][0] == "" else _Slots(owners, parameter)

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        self[parameter].update(value)

    def __delitem__(self, parameter: Tensor) -> None:
        for _, member in self._members:
            member.state.pop(parameter, None)

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in member.state for _, member in self._members)

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """Without making an entry, as the optimizers' own mappings do."""
        if parameter in self:
            return self[parameter]
        return default

    def __iter__(self) -> Iterator[Tensor]:
        return iter({parameter: None for _, member in self._members for parameter in member.state})

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Handles:
    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Take all of them away."""
        for handle in self._handles:
            handle.remove()


class Several:
    """Several optimizers as one with all their parameter groups, each of which is stepped by its owner.

    Args:
        roots: the optimizers that the caller gave; those that they hold belong to it too.

    Attributes:
        members: each with its place within the one that holds it, empty for a root; in the order in which their groups
            are declared. Of groups with the same parameters the outer optimizer's counts.
    """

    def __init__(self, roots: Sequence[Optimizer]) -> None:
        self.roots = tuple(roots)
        self.members = tuple(each for root in roots for each in _with_inner("", root))
        self.state = _States(self.members)

    @property
    def param_groups(self) -> list[dict[str, object]]:
        """All groups, member by member."""
        return [group for _, group in self._owned()]

    @property
    def class_names(self) -> list[str]:
        """Class of the owner of each group."""
        return [class_name(owner) for owner, _ in self._owned()]

    def _owned(self) -> Iterator[tuple[Optimizer, dict[str, object]]]:
        seen: set[int] = set()
        for prefix, member in self.members:
            for group in member.param_groups:
                mine = {id(parameter) for parameter in group["params"]}
                if not prefix or not mine <= seen:
                    yield member, group
                seen |= mine

    def step(self) -> None:
        """Step each, an inner one before its holder, which may drop gradients, so that each shows what it keeps."""
        for _, member in reversed(self.members):
            try:
                try_step(member)
            except Exception:  # as of one that calls its closure for more than gradients
                if not any(_held(member)):
                    raise

    def place(self, member: Optimizer) -> str:
        """Where an optimizer lies within the one that holds it; empty for a root."""
        return next(prefix for prefix, each in self.members if each is member)

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> _Handles:
        """On each member."""
        return _Handles([member.register_step_pre_hook(hook) for _, member in self.members])

    def register_step_post_hook(self, hook: Callable[..., Any]) -> _Handles:
        """On each member."""
        return _Handles([member.register_step_post_hook(hook) for _, member in self.members])


def _held(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """The optimizers that one holds, as attributes or in a list or dict that is one."""
    for name, value in vars(optimizer).items():
        parts: Any = {f"{name}.": value}
        if isinstance(value, list | tuple):
            parts = {f"{name}.{number}.": part for number, part in enumerate(value)}
        elif isinstance(value, dict):
            parts = {f"{name}.{key}.": part for key, part in value.items()}
        yield from ((place, part) for place, part in parts.items() if isinstance(part, Optimizer))


def _with_inner(prefix: str, optimizer: Optimizer, known: frozenset[int] = frozenset()) -> Iterator[tuple[str, Any]]:
    known |= {id(optimizer)}
    yield prefix, optimizer
    for place, inner in _held(optimizer):
        if id(inner) not in known and inner.state is not optimizer.state:
            yield from _with_inner(prefix + place, inner, known)


def groups_of(optimizer: Optimizer) -> list[dict[str, object]]:
    """The hyper-parameters of an optimizer's parameter groups, as they are."""
    return [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]


def load_groups(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Have these hyper-parameters in an optimizer with as many parameter groups."""
    for group, values in zip(optimizer.param_groups, groups, strict=True):
        group.update(values)


def trial_copy(optimizer: Optimizer, memo: dict[int, Any] | None = None) -> Optimizer:
    """A copy of an optimizer, with all that its class keeps in it, whose steps trigger no hook.

    ``copy.deepcopy`` leaves out what a class keeps apart from state and groups, and would copy the hooks of its steps.
    """
    if isinstance(optimizer, Several):
        return cast(Optimizer, Several([trial_copy(root) for root in optimizer.roots]))
    memo = {} if memo is None else memo
    kind = type(optimizer)
    twin = memo[id(optimizer)] = kind.__new__(kind)
    for _, inner in _held(optimizer):
        if id(inner) not in memo:
            trial_copy(inner, memo)
    kept = {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_optimizer_") and not (callable(value) and hasattr(kind, name))
    }
    twin.__setstate__(copy.deepcopy(kept, memo))
    return twin


def try_step(optimizer: Optimizer) -> None:
    """One step of a copy with the gradients that its parameters hold, whatever closure it asks for."""
    step: Any = optimizer.step
    asked = list(inspect.signature(step).parameters.values())
    if asked and asked[0].default is asked[0].empty and asked[0].kind is asked[0].POSITIONAL_OR_KEYWORD:
        step(lambda: _NO_LOSS)
    else:
        step()


def trial_error(optimizer: Optimizer, error: Exception) -> CallerError:
    """What to say of a trial step that failed."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    members = getattr(optimizer, "roots", [optimizer])
    kinds = "+".join(dict.fromkeys(type(member).__name__ for member in members))
    return CallerError(
        f"the state of optimizer {kinds} cannot be found out by a trial step: {text}; "
        "step() has to work on a copy where all gradients are dense zeros"
    )


def one_optimizer(given: object) -> Optimizer:
    """What a caller gave as optimizers, as one: none, one, or a list of them, each with those that it holds.

    A fused, capturable or foreach update of PyTorch's own classes is the same arithmetic as the plain one, by other
    operators; a recorded run takes those that every device has, so ``fused`` and ``capturable`` are switched off here.
    """
    if given is None:
        return NoOptimizer()
    roots: list[Any] = [_unwrapped(each) for each in (given if isinstance(given, list | tuple) else [given])]
    if not roots or not all(isinstance(root, Optimizer) for root in roots):
        return cast(Optimizer, roots[0] if len(roots) == 1 else given)
    all_ = Several(roots)
    for _, member in all_.members:
        if class_name(member) in CLASSES:
            for group in member.param_groups:
                group.update({name: False for name in ("fused", "capturable") if group.get(name)})
            member._step_supports_amp_scaling = False  # which a scaler asks of a fused update
    return cast(Optimizer, all_ if len(all_.members) > 1 else roots[0])


def _is_accelerated(optimizer: object) -> bool:
    return class_name(optimizer) == "accelerate.optimizer.AcceleratedOptimizer"


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer that Accelerate has prepared, which holds its state; any other as it is."""
    return optimizer.optimizer if _is_accelerated(optimizer) else optimizer


def scaler_of(given: Any) -> dict[str, object]:
    """The gradient scaler that Accelerate gave to an optimizer, if any, as an object of the state."""
    each = given if isinstance(given, list | tuple) else [given]
    found = next((one.scaler for one in each if _is_accelerated(one)), None)
    return {} if found is None else {"scaler": found}
