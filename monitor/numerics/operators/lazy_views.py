"""Lazy views: tensors whose values are the conjugate, or the negative, of what their memory holds.

``x.conj()`` returns a view with a mark, and PyTorch's kernels obey it when they read. Programs, traces and kernels here
know memory alone. So a session lets the mark through as what it is, no call at all, and whatever reads a marked tensor
reads the result of a call that conjugates or negates, made there and then. A view of a marked tensor is a marked view,
and a copy into one is a copy of the conjugate into its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.errors import UnsupportedOperator

__all__ = ["MARKS", "is_marked", "resolved", "without_complex_numbers"]

Make = Callable[..., Any]
_aten: Any = torch.ops.aten

MARKS = frozenset((_aten._conj.default, _aten._neg_view.default))
"""Operators that return a view with the other mark."""

_REMEDY = "a lazy view of a conjugate or a negative; use resolve_conj() or resolve_neg() first"


def is_marked(values: Iterable[Any]) -> bool:
    """Whether an argument is such a tensor, or a list with one."""
    return any(
        (value.is_conj() or value.is_neg())
        if isinstance(value, Tensor)
        else isinstance(value, list | tuple) and is_marked(value)
        for value in values
    )


def _memory(x: Tensor) -> Tensor:
    """The same memory without marks."""
    x = _aten._conj.default(x) if x.is_conj() else x
    return _aten._neg_view.default(x) if x.is_neg() else x


def _marked_as(x: Tensor, value: Any) -> Any:
    """A tensor, or a list of them, with the marks of another one."""
    if isinstance(value, list | tuple):
        return type(value)(_marked_as(x, each) for each in value)
    value = _aten._neg_view.default(value) if x.is_neg() else value
    return _aten._conj.default(value) if x.is_conj() else value


def _read(make: Make, x: Any) -> Any:
    """The value behind a lazy view, by recorded calls."""
    if isinstance(x, list | tuple):
        return type(x)(_read(make, each) for each in x)
    if not isinstance(x, Tensor) or not is_marked((x,)):
        return x
    out = _memory(x)
    out = make(_aten.neg.default, (out,)) if x.is_neg() else out
    return make(_aten.conj_physical.default, (out,)) if x.is_conj() else out


def resolved(make: Make, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """The result of a call with marked tensors, by calls without.

    Args:
        make: makes a call, given its operator, args and kwargs.

    Raises:
        UnsupportedOperator: it views a marked tensor as another type, or writes one other than by ``copy_``.
    """
    arguments = func._schema.arguments
    written = [
        args[place] if place < len(args) else kwargs.get(each.name)
        for place, each in enumerate(arguments)
        if each.alias_info is not None and each.alias_info.is_write
    ]
    if is_marked(written):
        target, source = args[:2] if func is _aten.copy_.default else (None, None)
        if not isinstance(source, Tensor) or source.dtype != target.dtype:
            raise UnsupportedOperator(str(func), _REMEDY)
        opposite = _marked_as(target, source)  # the conjugate of what is copied, or its negative
        make(func, (_memory(target), _read(make, opposite), *args[2:]), kwargs)
        return target
    first = args[0] if args else None
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
    if is_view and isinstance(first, Tensor):
        out = make(func, (_memory(first), *args[1:]), kwargs)
        if any(each.dtype != first.dtype for each in (out if isinstance(out, list | tuple) else [out])):
            raise UnsupportedOperator(str(func), _REMEDY)
        return _marked_as(first, out)
    values = [_read(make, each) for each in args]
    if func is _aten.clone.default and kwargs.get("memory_format", torch.preserve_format) == torch.preserve_format:
        return values[0]
    return make(func, tuple(values), {name: _read(make, each) for name, each in kwargs.items()})


_FULL = (_aten.full.default, _aten.full_like.default, _aten.new_full.default, _aten.scalar_tensor.default)


def without_complex_numbers(
    make: Make, func: OpOverload, args: Arguments, kwargs: Keywords
) -> Callable[[], Any] | None:
    """What makes a call with complex Python numbers by calls with real ones; None where it has none.

    Raises:
        UnsupportedOperator: the operator takes no tensor in a number's place.
    """
    if not any(isinstance(each, complex) for each in (*args, *kwargs.values())):
        return None
    device = next((each.device for each in args if isinstance(each, Tensor)), kwargs.get("device"))

    def tensor(value: Any) -> Any:
        if not isinstance(value, complex):
            return value
        options = {"dtype": torch.float32, "device": device}
        parts = [make(_aten.full.default, ([], part), options) for part in (value.real, value.imag)]
        return make(_aten.complex.default, tuple(parts))

    def filled() -> Any:
        parts = [
            make(func, tuple(getattr(each, part) if isinstance(each, complex) else each for each in args), options)
            for part in ("real", "imag")
        ]
        return make(_aten.complex.default, tuple(parts))

    if func in _FULL:
        if kwargs.get("dtype", torch.complex64) not in (None, torch.complex64):
            raise UnsupportedOperator(str(func), f"complex operands of type {kwargs['dtype']}; use complex64")
        options = {**kwargs, "dtype": torch.float32}
        return filled
    name = {"Scalar": "Tensor"}.get(func._overloadname, func._overloadname)
    twin = getattr(func.overloadpacket, name, None) if name == "Tensor" else None
    if twin is None or any(isinstance(each, complex) for each in kwargs.values()):
        raise UnsupportedOperator(str(func), "a complex number; make it a tensor by torch.complex first")
    return lambda: make(twin, tuple(map(tensor, args)), {name: tensor(each) for name, each in kwargs.items()})
