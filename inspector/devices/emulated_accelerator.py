"""An emulated accelerator: a torch device whose memory lies apart from the host's, computed by this processor.

A training on a graphics card takes other ways than one on a CPU: the eager engines replace the fused ones, tensors
of two devices do not mix, the backward pass runs in a separate thread, torch chooses other operators (lists in
optimizers, dropout in one piece), and values reach the host as copies. All of it happens here, on a machine without
such a card. The arithmetic is this processor's, and no figure taken here says how fast a card is.

It is built on torch's registration of a backend in Python, which torch calls experimental.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from firmware_sim import simulate_device
from firmware_sim.errors import DeviceError
from monitor.numerics.arguments import Arguments, Keywords

__all__ = ["NAME", "EmulatedAccelerator"]

NAME = "emulated"
"""Of the torch device."""

_LIBRARY = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
_CROSSING = frozenset({"aten.copy_.default", "aten._foreach_copy_.default"})
"""Operators that write tensors of one device to another."""
_INDEXED = frozenset({"aten.index.Tensor", "aten.index_put.default", "aten.index_put_.default"})
"""Operators whose indices may lie on the host."""


@functools.cache
def _register() -> torch.device:
    """Makes the device known to torch, once in a process."""
    try:
        from torch.utils import backend_registration

        class Backend(backend_registration._DummyBackendModule):
            def get_amp_supported_dtype(self) -> list[torch.dtype]:
                """What activation checkpointing asks, even on the host."""
                return []

        backend_registration._setup_privateuseone_for_python_backend(NAME, Backend())
        _claim_kernels()
        simulate_device(_Apart, lambda tensor: tensor.held)
        return torch.device(NAME, 0)
    except (ImportError, AttributeError, RuntimeError, TypeError) as error:
        raise DeviceError(f"this torch cannot emulate an accelerator: {error}") from None


def _claim_kernels() -> None:
    """Keep operators in one piece that have kernels on real devices and a composition for all others."""
    for operator in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        if operator.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(
            operator, "CompositeImplicitAutograd"
        ):
            _LIBRARY.impl(operator.removeprefix("aten::"), _unreachable, "PrivateUse1")  # type: ignore[no-untyped-call]


def _unreachable(*_: object, **__: object) -> None:
    raise RuntimeError("the emulated accelerator was left while a tensor of it was in use")


class _Apart(Tensor):
    """A tensor of the accelerator. What it holds is a tensor of the host that nothing else sees."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Self:
        out: Self = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=int(held.storage_offset()),
            dtype=held.dtype,
            device=_register(),
        )
        torch._C._set_conj(out, held.is_conj())
        torch._C._set_neg(out, held.is_neg())
        out.held = held
        return out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Arguments = (), kwargs: Keywords | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _hold(self, other: _Apart) -> None:
        """What ``tensor.data = other`` does, within an operator too, where torch calls no override."""
        with torch._C.DisableTorchFunctionSubclass():
            Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.held = other.held

    data = property(Tensor.data.__get__, _hold)  # type: ignore[attr-defined]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Any, args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            out = self.detach().clone()
            is_parameter = isinstance(self, nn.Parameter)
            memo[id(self)] = nn.Parameter(out, self.requires_grad) if is_parameter else out
        copied: Tensor = memo[id(self)]
        return copied

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.held!r} on {self.device}"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def tolist(self) -> Any:
        """As torch has it for the tensors of real devices."""
        return self.held.tolist()

    def data_ptr(self) -> int:
        """As torch has it for the tensors of real devices."""
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """As torch has it for the tensors of real devices; views share it."""
        return self.held.untyped_storage()


class EmulatedAccelerator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, ``torch.device("emulated")`` is there. A session entered later lies above it and calls into it."""

    def __init__(self) -> None:
        """DeviceError where this version of torch cannot do it."""
        super().__init__()  # type: ignore[no-untyped-call]
        _register()

    def __enter__(self) -> Self:
        torch._C._set_only_lift_cpu_tensors(True)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        # torch.tensor makes its tensor on the host and moves it by an operator: a setting of each thread.
        torch._C._set_only_lift_cpu_tensors(True)
        return _run(func, args, kwargs or {})


def _run(func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    leaves: list[Any] = []
    _each((args, kwargs), leaves.append)
    apart = [leaf for leaf in leaves if isinstance(leaf, _Apart)]
    wanted = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    if not apart and (wanted is None or wanted.type != NAME):
        return func(*args, **kwargs)
    name = _name(func)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if 0 < len(apart) < len(tensors) and name not in _CROSSING:
        _refuse_mixture(func, args, kwargs, tensors)
    host_args, host_kwargs = _each((args, kwargs), _on_host)
    out = func(*host_args, **host_kwargs)
    if name == "aten.copy_.default":
        return args[0]
    if wanted is not None and wanted.type != NAME:
        return out.clone() if any(out is tensor.held for tensor in apart) else out
    owners = {id(tensor.held): tensor for tensor in apart}
    return _each(out, lambda result: _returned(result, owners))


_name = functools.cache(str)
"""Of an operator."""


def _each(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same lists, tuples and dicts of what the function makes of everything in them."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_each(one, function) for one in value])
    if kind is dict:
        return {key: _each(one, function) for key, one in value.items()}
    return function(value)


def _refuse_mixture(func: OpOverload, args: Arguments, kwargs: Keywords, tensors: list[Tensor]) -> None:
    """A number on the host may be read together with tensors of the accelerator, and indices may lie there; no more."""
    name = _name(func)
    checked = [args[0], *args[2:3]] if name in _INDEXED else tensors
    written: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            _each(args[place] if place < len(args) else kwargs.get(argument.name), written.append)
    must = [*written, args[0]] if name in _INDEXED else written
    for tensor in checked:
        is_host = isinstance(tensor, Tensor) and not isinstance(tensor, _Apart)
        if is_host and (tensor.dim() or any(tensor is other for other in must)):
            raise RuntimeError(f"{name} mixes tensors of {tensor.device} and {NAME}")


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, _Apart):
        return leaf.held
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == NAME else leaf


def _returned(result: Any, owners: dict[int, _Apart]) -> Any:
    """A result as the accelerator's tensor; an argument that was written comes back as itself."""
    if not isinstance(result, Tensor):
        return result
    owner = owners.get(id(result))
    if owner is None:
        return _Apart(result)
    if (owner.shape, owner.stride()) != (result.shape, result.stride()):
        raise RuntimeError(
            f"the emulated accelerator cannot resize or turn a tensor in place, to {tuple(result.shape)}"
        )
    return owner
