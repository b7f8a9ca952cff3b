"""A model and its optimizer in chip memory: adopted once, bound again after each step.

Gradients and optimizer state are not always there (``zero_grad`` drops them, the first ``step`` makes them); in memory
each has its place from the start, zeros while it is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from firmware_sim.errors import CallerError
from monitor.declaration.statement import StateEntry
from monitor.loops.objects import tensors_held
from monitor.loops.optimizers import Several, trial_copy, trial_error, try_step
from monitor.sharding import Layout, ShardedMemory, StateDigest

__all__ = ["FROM_THE_START", "LoopState"]

FROM_THE_START = "give it from the start all that will ever learn, frozen by requires_grad_(False) until then"


@dataclass(frozen=True, slots=True)
class _Binding:
    """How the caller's objects hold one tensor of the state."""

    get: Callable[[], Tensor | None]
    bind: Callable[[Tensor], None]


class LoopState:
    """All weights, buffers, gradients and optimizer state of a run, as views into sharded memory.

    Args:
        shares: how many equal parts of it each chip holds.
        objects: what else holds tensors that the steps write, by name; these count as buffers.
        complete: the optimizer holds all the state that it will ever have, so that no trial step need show it.

    Attributes:
        entries: the tensors, in the order of memory.
        model: whose parameters and buffers these are.
        numbers: names of what the optimizer keeps other than tensors, which no memory of a chip holds.

    Raises:
        CallerError: a tensor that cannot be adopted, or a buffer with another tensor's name; it is named.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        shares: Sequence[int],
        *,
        complete: bool = False,
        objects: Mapping[str, object] | None = None,
    ) -> None:
        self.model = model
        self._objects = objects or {}
        self._optimizer = optimizer
        self._names = _parameter_names(model, optimizer)
        forthcoming: dict[tuple[str, str], Tensor] = {}
        self.numbers: tuple[str, ...] = ()
        if not complete:
            forthcoming, self.numbers = _forthcoming(optimizer, self._names)
        tensors, self._bindings = self._find(forthcoming)
        for (kind, name), tensor in tensors.items():
            _require_own(f"{kind} {name}", tensor)
        self.entries = tuple(
            StateEntry(kind=kind, name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            for (kind, name), tensor in tensors.items()
        )
        types = {(entry.kind, entry.name): (entry.dtype, entry.shape) for entry in self.entries}
        self._keys: dict[str, list[str]] = {name: [] for name in self._names.values()}
        for entry in self.entries:
            if entry.kind == "optimizer":
                owner, _, slot = entry.name.rpartition("/")
                self._keys[owner].append(slot)
        self.memory = ShardedMemory(tensors, Layout.shared(types, shares))
        absent = {key for key, binding in self._bindings.items() if binding.get() is None}
        with torch.no_grad():
            for key, binding in self._bindings.items():
                if key not in absent:
                    binding.bind(self.memory.tensors[key])

    def current(self) -> dict[str, Tensor | None]:
        """Each tensor of the state as the caller's objects hold it now, under ``kind/name``.

        Raises:
            CallerError: the optimizer holds state of a parameter that it did not have before, or a tensor is sparse.
        """
        for parameter in self._optimizer.state:
            if parameter not in self._names:
                raise CallerError(f"the optimizer got a new parameter after the recorder was made; {FROM_THE_START}")
        found = {f"{kind}/{name}": binding.get() for (kind, name), binding in self._bindings.items()}
        for name, tensor in found.items():
            if tensor is not None:
                _require_dense(tensor)
                _require_own(name, tensor)
        return found

    def strays(self) -> list[str]:
        """Names of tensors that no longer lie in chip memory."""
        strays = []
        for (kind, name), binding in self._bindings.items():
            tensor, place = binding.get(), self.memory.tensors[kind, name]
            if tensor is not None and not _same_place(tensor, place):
                strays.append(f"{kind}/{name}")
        return strays

    def settle(self) -> None:
        """Move whatever a step has made anew into chip memory, and let the caller's objects hold it there."""
        with torch.no_grad():
            held = {key: binding.get() for key, binding in self._bindings.items()}
            moved = {
                key: tensor.detach().clone()
                for key, tensor in held.items()
                if tensor is not None and not _same_place(tensor, self.memory.tensors[key])
            }
            for key, tensor in moved.items():
                place = self.memory.tensors[key]
                if tensor.dtype != place.dtype or tensor.shape != place.shape:
                    raise CallerError(f"{'/'.join(key)} changed to {tensor.dtype}{list(tensor.shape)} in a step")
                place.copy_(tensor)
                self._bindings[key].bind(place)
            for key, value in held.items():
                if value is None:
                    self.memory.tensors[key].zero_()

    def hold_gradient(self, parameter: nn.Parameter, name: str) -> None:
        """Copy a gradient that was just made into memory, by an operator of the step, and let the parameter hold that.

        One that a graph leads to stays where it is until the step ends, and so does one that does not fit.

        Args:
            name: the parameter's.
        """
        gradient, place = parameter.grad, self.memory.tensors.get(("gradient", name))
        if gradient is None or gradient.requires_grad or type(gradient) is not Tensor:
            return
        if place is None or _same_place(gradient, place):  # of no declared parameter: refused as the step ends
            return
        if (gradient.dtype, gradient.shape, gradient.layout) == (place.dtype, place.shape, place.layout):
            with torch.no_grad():
                parameter.grad = place.copy_(gradient)

    def place_of(self, optimizer: Optimizer) -> str:
        """What the names of an optimizer's state begin with: where it lies in one that holds it."""
        return self._optimizer.place(optimizer) if isinstance(self._optimizer, Several) else ""

    def absent(self) -> dict[tuple[Tensor, str], str]:
        """Names of what the optimizer does not hold of its state now, by parameter and key."""
        return {
            (owner, key): f"{name}/{key}"
            for owner, name in self._names.items()
            for key in self._keys[name]
            if not isinstance(self._optimizer.state.get(owner, {}).get(key), Tensor)
        }

    def inputs(self) -> dict[str, Tensor]:
        """What operators may find in memory, under ``kind/name``: what there is, and room for every gradient."""
        places = self.memory.export()
        return {
            name: places[name]
            for name, tensor in self.current().items()
            if tensor is not None or name.startswith("gradient/")
        }

    def require_start(self, committed: StateDigest) -> None:
        """CallerError unless memory holds the state that a run began with."""
        if self.memory.digest() != committed:
            raise CallerError("the model or the optimizer does not hold the state that the run began with")

    def hold(self, present: set[str]) -> None:
        """Let the caller's objects hold these tensors of the state, and no other gradient or optimizer state."""
        for parameter in self.model.parameters():
            parameter.grad = None
        self._optimizer.state.clear()
        with torch.no_grad():
            for (kind, name), binding in self._bindings.items():
                if f"{kind}/{name}" in present:
                    binding.bind(self.memory.tensors[kind, name])

    def _find(
        self, forthcoming: dict[tuple[str, str], Tensor]
    ) -> tuple[dict[tuple[str, str], Tensor], dict[tuple[str, str], _Binding]]:
        tensors: dict[tuple[str, str], Tensor] = {}
        bindings: dict[tuple[str, str], _Binding] = {}
        for name, parameter in self.model.named_parameters():
            tensors["weight", name] = parameter.detach()
            bindings["weight", name] = _Binding(_getter(parameter), _data_setter(parameter))
        for name, buffer in self.model.named_buffers():
            _check_free(name, tensors)
            tensors["buffer", name] = buffer.detach()
            bindings["buffer", name] = self._buffer(name)
        for holder in tensors_held(self._objects, [*self.model.parameters(), *self.model.buffers()]):
            held = holder.get()
            assert held is not None
            _check_free(holder.name, tensors)
            tensors["buffer", holder.name] = held.detach()
            bindings["buffer", holder.name] = _Binding(holder.get, holder.put)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad or parameter in self._names:  # a frozen one may learn later
                gradient = parameter.grad
                tensors["gradient", name] = torch.zeros_like(parameter) if gradient is None else gradient.detach()
                bindings["gradient", name] = _gradient(parameter)
        for owner, name in self._names.items():
            keys = [key for member, key in forthcoming if member == name]
            keys += [key for key in self._optimizer.state.get(owner, {}) if key not in keys]
            for key in keys:
                value = self._optimizer.state.get(owner, {}).get(key, forthcoming.get((name, key)))
                if isinstance(value, Tensor):
                    tensors["optimizer", f"{name}/{key}"] = value.detach()
                    bindings["optimizer", f"{name}/{key}"] = self._slot(owner, key)
        return {key: tensor.detach() for key, tensor in tensors.items()}, bindings

    def _buffer(self, name: str) -> _Binding:
        owner, _, leaf = name.rpartition(".")
        module = self.model.get_submodule(owner)

        def get() -> Tensor | None:
            return module._buffers.get(leaf)

        def bind(place: Tensor) -> None:
            buffer = module._buffers[leaf]
            assert buffer is not None
            buffer.data = place

        return _Binding(get, bind)

    def _slot(self, parameter: Tensor, key: str) -> _Binding:
        state: dict[Tensor, Any] = self._optimizer.state

        def get() -> Tensor | None:
            value = state.get(parameter, {}).get(key)
            return value if isinstance(value, Tensor) else None

        def bind(place: Tensor) -> None:
            state[parameter][key] = place

        return _Binding(get, bind)


def _check_free(name: str, tensors: Collection[tuple[str, str]]) -> None:
    """CallerError if a weight or buffer has the name of a buffer that comes: in a model's file it replaces one."""
    for kind in ("weight", "buffer"):
        if (kind, name) in tensors:
            raise CallerError(
                f"buffer {name!a:.100} has the name of {kind} {name!a:.100}; give it another where the model registers "
                'it, or in state={"name": …}'
            )


def _getter(tensor: Tensor) -> Callable[[], Tensor | None]:
    return lambda: tensor


def _data_setter(tensor: Tensor) -> Callable[[Tensor], None]:
    def bind(place: Tensor) -> None:
        tensor.data = place

    return bind


def _gradient(parameter: Tensor) -> _Binding:
    def bind(place: Tensor) -> None:
        parameter.grad = place

    return _Binding(lambda: parameter.grad, bind)


def _require_dense(tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise CallerError(f"a tensor of shape {list(tensor.shape)} in the state has become sparse; keep it dense")


def _require_own(name: str, tensor: Tensor) -> None:
    """CallerError if a tensor of the state is a lazy view of a conjugate or a negative."""
    if tensor.is_conj() or tensor.is_neg():
        raise CallerError(f"{name} is a lazy view of a conjugate; let the state hold its resolve_conj()")


def _same_place(tensor: Tensor, place: Tensor) -> bool:
    _require_dense(tensor)
    return (
        tensor.data_ptr() == place.data_ptr()
        and tensor.shape == place.shape
        and tensor.stride() == place.stride()
        and tensor.dtype == place.dtype
    )


def _updated(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[Tensor, str]:
    """Name of each parameter that the optimizer updates."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[Tensor, str] = {}
    for parameter in _updated(optimizer):
        if parameter not in names:
            shape = tuple(parameter.shape)
            raise CallerError(
                f"the optimizer updates a parameter of shape {shape} that the model does not hold; give the "
                "recorder one module that holds all, such as nn.ModuleList([model, nn.ParameterList(others)])"
            )
        found[parameter] = names[parameter]
    for owner in optimizer.state:
        if owner not in found:
            raise CallerError(f"the optimizer keeps state for {owner!r}, which is none of its parameters")
    return found


def _forthcoming(
    optimizer: Optimizer, names: dict[Tensor, str]
) -> tuple[dict[tuple[str, str], Tensor], tuple[str, ...]]:
    """State that the optimizer will make in its first step, as zeros by (parameter, key), and what is no tensor.

    It is found on a copy of the optimizer.
    """
    if any(isinstance(member, torch.optim.SparseAdam) for member in getattr(optimizer, "roots", [optimizer])):
        raise CallerError(
            "SparseAdam takes sparse gradients, which cannot be recorded; write torch.optim.Adam instead, and "
            "nn.Embedding(…, sparse=False)"
        )
    try:
        twin = trial_copy(optimizer)
        for parameter in _updated(twin):
            parameter.grad = torch.zeros_like(parameter)
        try_step(twin)
    except CallerError:
        raise
    except Exception as error:
        raise trial_error(optimizer, error) from None
    found: dict[tuple[str, str], Tensor] = {}
    numbers: list[str] = []
    for parameter, copied in zip(_updated(optimizer), _updated(twin), strict=True):
        for key, value in twin.state.get(copied, {}).items():
            if isinstance(value, Tensor):
                found[names[parameter], key] = torch.zeros_like(value)
            elif value is not None:
                numbers.append(f"{key} of {names[parameter]}")
    return found, tuple(numbers)
