"""The objects of a caller's loop as a recorder takes them: models, optimizers, and what else holds tensors."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from firmware_sim.errors import CallerError
from monitor.declaration.reference import CLASSES
from monitor.declaration.statement import class_name

__all__ = [
    "Holder",
    "NoOptimizer",
    "Several",
    "named_objects",
    "one_optimizer",
    "original",
    "tensors_held",
    "trial_copy",
]

_DEEPEST = 8


class NoOptimizer(Optimizer):
    """Stands for the optimizer of steps that only compute."""

    def __init__(self) -> None:
        super().__init__([{"params": []}], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


class _States(MutableMapping[Tensor, Any]):
    """What several optimizers keep for their parameters, as one mapping."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, parameter: Tensor) -> MutableMapping[Tensor, Any]:
        for optimizer in self._optimizers:
            if any(parameter is each for group in optimizer.param_groups for each in group["params"]):
                return optimizer.state
        raise KeyError(parameter)

    def __getitem__(self, parameter: Tensor) -> Any:
        return self._of(parameter)[parameter]

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        self._of(parameter)[parameter] = value

    def __delitem__(self, parameter: Tensor) -> None:
        del self._of(parameter)[parameter]

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in optimizer.state for optimizer in self._optimizers)

    def get(self, parameter: Tensor, default: Any = None) -> Any:
        """Without making an entry, as the optimizers' own mappings do."""
        for optimizer in self._optimizers:
            if parameter in optimizer.state:
                return optimizer.state[parameter]
        return default

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for optimizer in self._optimizers for parameter in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)


class _Handles:
    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Take all of them away."""
        for handle in self._handles:
            handle.remove()


class Several:
    """Several optimizers as one with all their parameter groups, each of which is stepped by its owner.

    Attributes:
        members: in the order in which their groups are declared.
    """

    def __init__(self, members: Sequence[Optimizer]) -> None:
        self.members = tuple(members)
        self.state = _States(self.members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All groups, member by member."""
        return [group for member in self.members for group in member.param_groups]

    @property
    def class_names(self) -> list[str]:
        """Class of the owner of each group."""
        return [class_name(member) for member in self.members for _ in member.param_groups]

    def step(self) -> None:
        """Step each."""
        for member in self.members:
            member.step()

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> _Handles:
        """On each member."""
        return _Handles([member.register_step_pre_hook(hook) for member in self.members])

    def register_step_post_hook(self, hook: Callable[..., Any]) -> _Handles:
        """On each member."""
        return _Handles([member.register_step_post_hook(hook) for member in self.members])


def trial_copy(optimizer: Optimizer) -> Optimizer:
    """A copy of an optimizer, with all that its class keeps in it, whose steps nobody hears of.

    ``copy.deepcopy`` leaves out what a class keeps beside state and groups, and would copy who listens to its steps.
    """
    if isinstance(optimizer, Several):
        return cast(Optimizer, Several([trial_copy(member) for member in optimizer.members]))
    kind = type(optimizer)
    twin = kind.__new__(kind)
    kept = {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_optimizer_") and not (callable(value) and hasattr(kind, name))
    }
    twin.__setstate__(copy.deepcopy(kept, {id(optimizer): twin}))
    return twin


def one_optimizer(given: object) -> Optimizer:
    """What a caller gave as optimizers, as one: none, one, or a list of them.

    A fused or foreach update of PyTorch's own classes is the same arithmetic as the plain one, by other operators; a
    recorded run takes those that every device has, so ``fused`` is switched off here.
    """
    members: list[Any] = [_unwrapped(each) for each in (given if isinstance(given, list | tuple) else [given])]
    for member in members:
        if isinstance(member, Optimizer) and class_name(member) in CLASSES:
            for group in member.param_groups:
                if group.get("fused"):
                    group["fused"] = False
    if given is None:
        return NoOptimizer()
    if len(members) > 1 and all(isinstance(member, Optimizer) for member in members):
        return cast(Optimizer, Several(members))
    return cast(Optimizer, members[0] if len(members) == 1 else given)


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer that Accelerate has prepared, which holds its state; any other as it is."""
    return optimizer.optimizer if class_name(optimizer) == "accelerate.optimizer.AcceleratedOptimizer" else optimizer


def original(model: object) -> nn.Module:
    """The module that was compiled; any other model as it is. A recorded step takes its operators one by one."""
    found = getattr(model, "_orig_mod", model)
    modules = found.modules() if isinstance(found, nn.Module) else ()
    if found is not model or any(getattr(each, "_compiled_call_impl", None) is not None for each in modules):
        warnings.warn("the model is compiled; its original is recorded, operator by operator", stacklevel=3)
    return cast(nn.Module, found)


def named_objects(given: Mapping[str, object] | Sequence[object]) -> dict[str, object]:
    """Objects by name; those of a list are called after their places. CallerError on anything else."""
    if isinstance(given, Mapping):
        return {str(name): thing for name, thing in given.items()}
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise CallerError(f"state is a {type(given).__name__}; give a list of objects, or a dict of them by name")
    return {f"state.{number}": thing for number, thing in enumerate(given)}


@dataclass(frozen=True, slots=True)
class Holder:
    """How an object holds one tensor."""

    name: str
    get: Callable[[], Tensor | None]
    put: Callable[[Tensor], None]


def tensors_held(objects: Mapping[str, object], known: Sequence[Tensor]) -> Iterator[Holder]:
    """Each tensor of these objects: of modules, dicts, lists, and attributes; but for ``known`` ones.

    Raises:
        CallerError: an object holds no tensor.
    """
    seen = {id(tensor) for tensor in known}
    for name, thing in objects.items():
        found = list(_held(name, thing, seen, _DEEPEST))
        if not found:
            raise CallerError(
                f"{name} is a {type(thing).__name__} that holds no tensor; take it off the list state=[…]"
            )
        yield from found


def _held(name: str, thing: object, seen: set[int], depth: int) -> Iterator[Holder]:
    if id(thing) in seen or not depth:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield _in_place(name, thing)
    elif isinstance(thing, nn.Module):
        for part, parameter in thing.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield _in_place(f"{name}.{part}", parameter)
        for part, buffer in thing.named_buffers():
            owner, _, leaf = part.rpartition(".")
            if id(buffer) not in seen:
                yield from _entry(f"{name}.{part}", thing.get_submodule(owner)._buffers, leaf, seen, depth)
    elif isinstance(thing, dict):
        for key in thing:
            yield from _entry(f"{name}.{key}", thing, key, seen, depth)
    elif isinstance(thing, list):
        for index in range(len(thing)):
            yield from _entry(f"{name}.{index}", thing, index, seen, depth)
    elif type(thing).__module__ != "builtins" and hasattr(thing, "__dict__") and not isinstance(thing, type):
        for key in vars(thing):
            yield from _entry(f"{name}.{key}", vars(thing), key, seen, depth)


def _entry(name: str, container: Any, key: Any, seen: set[int], depth: int) -> Iterator[Holder]:
    """An entry of a dict or list; a tensor there may be replaced by another one from step to step."""
    value = container[key]
    if not isinstance(value, Tensor):
        yield from _held(name, value, seen, depth - 1)
        return
    if id(value) in seen:
        return
    seen.add(id(value))

    def get() -> Tensor | None:
        found = container[key]
        return found if isinstance(found, Tensor) else None

    def put(place: Tensor) -> None:
        container[key] = place

    yield Holder(name, get, put)


def _in_place(name: str, tensor: Tensor) -> Holder:
    def put(place: Tensor) -> None:
        with torch.no_grad():
            tensor.data = place

    return Holder(name, lambda: tensor, put)
