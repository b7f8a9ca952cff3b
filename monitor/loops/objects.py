"""The objects of a caller's loop as a recorder takes them: models, and what else holds tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from firmware_sim.errors import CallerError
from monitor.declaration.statement import BESIDE_MODEL
from monitor.numerics.kernels.bits import HALF

__all__ = ["Holder", "named_objects", "original", "tensors_held", "whole"]

_DEEPEST = 8


def original(model: object) -> nn.Module:
    """The module that was compiled; any other model as it is. A recorded step takes its operators one by one."""
    found = getattr(model, "_orig_mod", model)
    modules = found.modules() if isinstance(found, nn.Module) else ()
    if found is not model or any(getattr(each, "_compiled_call_impl", None) is not None for each in modules):
        warnings.warn("the model is compiled; its original is recorded, operator by operator", stacklevel=3)
    return cast(nn.Module, found)


class _Whole(nn.Module):
    """A model, and masters that its optimizer updates with it."""

    def __init__(self, model: nn.Module, others: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._held = (model, others)  # a tuple, so that it is no submodule

    def named_parameters(self, *given: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's, and the others."""
        yield from self._held[0].named_parameters(*given, **options)
        yield from cast(Mapping[str, nn.Parameter], self._held[1]).items()

    def named_buffers(self, *given: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """The model's."""
        return self._held[0].named_buffers(*given, **options)

    def named_modules(self, *given: Any, **options: Any) -> Iterator[Any]:
        """The model's."""
        yield from self._held[0].named_modules(*given, **options)

    def get_submodule(self, target: str) -> nn.Module:
        """The model's."""
        return self._held[0].get_submodule(target)


def whole(model: nn.Module, optimizer: Any) -> nn.Module:
    """A model with the FP32 masters of its half-precision weights that its optimizer updates, and it does not hold.

    They are called ``optimizer..GROUP.PLACE``: no tensor of a module has such a name.
    """
    if not isinstance(model, nn.Module):
        return model
    held = list(model.parameters())
    known, narrow = set(map(id, held)), {weight.shape for weight in held if weight.dtype in HALF}
    others = {
        f"{BESIDE_MODEL}{number}.{place}": tensor
        for number, group in enumerate(getattr(optimizer, "param_groups", ()))
        for place, tensor in enumerate(group["params"])
        if id(tensor) not in known and tensor.dtype == torch.float32 and tensor.shape in narrow
    }
    return _Whole(model, others) if others else model


def named_objects(given: Mapping[str, object] | Sequence[object]) -> dict[str, object]:
    """Objects by name; those of a list are called after their places. CallerError on anything else.

    A gradient scaler makes its tensors here, not in the first step; one that is switched off is none of the state.
    """
    if isinstance(given, Mapping):
        named = {str(name): thing for name, thing in given.items()}
    elif isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise CallerError(f"state is a {type(given).__name__}; give a list of objects, or a dict of them by name")
    else:
        named = {f"state.{number}": thing for number, thing in enumerate(given)}
    for thing in named.values():
        if isinstance(thing, GradScaler) and thing.is_enabled() and thing._scale is None:
            thing._lazy_init_scale_growth_tracker(torch.device(thing._device))
    return {
        name: thing for name, thing in named.items() if not (isinstance(thing, GradScaler) and not thing.is_enabled())
    }


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
                f"{name} is a {type(thing).__name__} that holds no tensor; take it off the list state=[…], or register "
                "what a module keeps in plain attributes as its buffers"
            )
        yield from found


def _held(name: str, thing: object, seen: set[int], depth: int) -> Iterator[Holder]:
    if id(thing) in seen or not depth:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield _in_place(name, thing)
    elif isinstance(thing, nn.Module):
        yield from _of_module(name, thing, seen, depth)
    else:
        container = _container_of(thing)
        for key in container if isinstance(container, dict) else range(len(container)):
            yield from _entry(f"{name}.{key}", container, key, seen, depth)


def _of_module(name: str, thing: nn.Module, seen: set[int], depth: int) -> Iterator[Holder]:
    for part, parameter in thing.named_parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield _in_place(f"{name}.{part}", parameter)
    for part, buffer in thing.named_buffers():
        owner, _, leaf = part.rpartition(".")
        if id(buffer) not in seen:
            yield from _entry(f"{name}.{part}", thing.get_submodule(owner)._buffers, leaf, seen, depth)
    for part, module in thing.named_modules(prefix=name):  # a metric counts in plain attributes
        for key in [key for key, value in vars(module).items() if isinstance(value, Tensor)]:
            yield from _entry(f"{part}.{key}", vars(module), key, seen, depth)


def _container_of(thing: object) -> dict[Any, Any] | list[Any]:
    """Where an object holds others: itself, or its attributes; empty where it holds none."""
    if isinstance(thing, dict | list):
        return thing
    is_own = type(thing).__module__ != "builtins" and hasattr(thing, "__dict__") and not isinstance(thing, type)
    return vars(thing) if is_own else []


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
