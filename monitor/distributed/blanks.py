"""Tensors without values, and what operators make of them: tensors that lie in memory as the exact ones would.

A blank tensor has a type, a shape, strides, and memory that views of it share; it says that it lies on the host, so
that PyTorch takes the same operators as with values. What it would hold is nowhere, and reading it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from firmware_sim.errors import CallerError
from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.declared import execute, recording
from monitor.numerics.session import Observer, Session
from monitor.numerics.strides import canonical_strides
from monitor.numerics.switches import plain_kernels
from monitor.programs.calls import ITEM
from monitor.programs.flop import makes
from monitor.programs.trace import name_of, reach, tensors_in, written_arguments

__all__ = ["Blank", "Blanks"]

_HOST, _NOWHERE = torch.device("cpu"), torch.device("meta")
_WHICH_DEVICE = torch.ops.prim.device.default
_MOST_RESULTS = 1 << 14


class Blank(Tensor):
    """A tensor of the host without values; made of one on the meta device, whose memory it shares."""

    @staticmethod
    def __new__(cls, form: Tensor) -> Blank:
        made: Blank = Tensor._make_subclass(cls, form, False, dispatch_device=True, device_for_backend_keys=_HOST)
        return made

    @classmethod
    def like(cls, tensor: Tensor) -> Blank:
        """One of a tensor's type and shape, row by row, in new memory."""
        return cls(torch.empty(tensor.shape, dtype=tensor.dtype, device=_NOWHERE))

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _HOST

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: OpOverload, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        if func is _WHICH_DEVICE:
            return _HOST
        if makes(func):
            raise CallerError(
                f"the step's program depends on the values of tensors, not only on their shapes: {func} reads values"
            )
        return _on_forms(func, args, kwargs or {})


class Blanks:
    """Answers the calls of native sessions in which tensors are blank.

    Where nothing that an operator takes is blank, it is computed by exact numerics. That is how an optimizer counts its
    updates: what it makes of numbers alone, and of one element, has a value. Whatever else is made of numbers is blank.

    How the exact operators lay their results in memory depends on how their arguments lie, and not on values. So each
    is tried once for such arguments, on zeros.

    Attributes:
        reads: values that ranks have read from now on, in order; None where none is known.
    """

    def __init__(self) -> None:
        self.reads: list[Any] | None = None
        self._results: dict[Any, Any] = {}
        self._keys: Callable[[], int] = lambda: 0
        self._counts = False

    @contextmanager
    def session(self, observer: Observer | None = None, keys: Callable[[], int] = lambda: 0) -> Iterator[Session]:
        """A session, entered, whose calls are answered here; each random operator takes one of ``keys``."""
        session = recording("native", observer=observer)
        session.answer, self._keys = self.answer, keys
        with plain_kernels, session:
            yield session

    def begin_update(self, *_: object) -> None:
        """An optimizer's update begins."""
        self._counts = True

    def end_update(self, *_: object) -> None:
        """It has ended."""
        self._counts = False

    def answer(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
        """What a call returns, values where nothing that it takes is blank.

        Raises:
            CallerError: it writes what only arithmetic gives into a tensor that holds numbers.
            NotImplementedError, RuntimeError: values decide what comes out.
        """
        tensors = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        if name_of(func) == ITEM:
            return self._read(func, *args)
        if not any(isinstance(each, Blank) for each in tensors):
            return self._of_values(func, args, kwargs, is_new=not tensors)
        written = written_arguments(func, args, kwargs)
        if not all(isinstance(each, Blank) for each in written):
            raise CallerError(
                f"{func} writes a computed result into a tensor that was made from plain numbers; make that tensor "
                "from a computed one instead, for example with torch.zeros_like"
            )
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._keys()
        if not makes(func) and not written:
            return _on_forms(func, args, kwargs)
        return self._known(func, args, kwargs, written)

    def _read(self, func: OpOverload, tensor: Tensor) -> Any:
        """The value of a tensor, of a blank one as others read it; CallerError where they have not."""
        read = self.reads.pop(0) if self.reads else None
        return read if isinstance(tensor, Blank) and read is not None else func(tensor)

    def _of_values(self, func: OpOverload, args: Arguments, kwargs: Keywords, *, is_new: bool) -> Any:
        """The result of a call that takes nothing blank."""
        if is_new and any(argument.name == "device" for argument in func._schema.arguments):
            form = func(*args, **{**kwargs, "device": _NOWHERE})
            if not (self._counts and form.numel() == 1):
                if torch.Tag.nondeterministic_seeded in func.tags:
                    self._keys()
                return Blank(form)
        return execute("exact", func, args, kwargs, entries=None, keys=self._keys)

    def _known(self, func: OpOverload, args: Arguments, kwargs: Keywords, written: list[Tensor]) -> Any:
        """What a call returns that returns no views: new memory, or what it has written."""
        key = func, _outline((args, sorted(kwargs.items())))
        if key not in self._results:
            if len(self._results) >= _MOST_RESULTS:
                self._results.clear()
            if written:
                before = [_place(each) for each in written]
                out = _on_forms(func, args, kwargs)
                if before != [_place(each) for each in written]:
                    return out  # now they lie otherwise, and the holders of their views have to see it
                places = {id(each): place for place, each in enumerate(written)}
                self._results[key] = _changed(out, lambda each: places[id(each)])
            else:
                self._results[key] = _changed(_tried(func, args, kwargs), _Layout)
        return _result(self._results[key], written)


class _Layout:
    """How a tensor lies in its own memory; CallerError unless it is the host's."""

    __slots__ = ("_dtype", "_shape", "_stride")

    def __init__(self, tensor: Tensor) -> None:
        if tensor.device.type not in ("cpu", "meta"):
            raise CallerError(f"a step on {tensor.device} has to be executed to find its program; train on the host")
        self._dtype, self._shape, self._stride = tensor.dtype, tensor.shape, tensor.stride()

    def blank(self) -> Blank:
        return Blank(torch.empty_strided(self._shape, self._stride, dtype=self._dtype, device=_NOWHERE))


def _result(known: Any, written: Sequence[Tensor]) -> Any:
    """A result of which is known how its tensors lie, or which of the written ones they are."""
    if isinstance(known, _Layout):
        return known.blank()
    if isinstance(known, list | tuple):
        return type(known)([_result(each, written) for each in known])
    return written[known] if isinstance(known, int) else known


def _changed(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Arguments or results of a call, with something else in place of each tensor."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_changed(each, change) for each in value])
    if isinstance(value, dict):
        return {name: _changed(each, change) for name, each in value.items()}
    return value


def _outline(value: Any) -> Any:
    """What decides how results lie: all of a call's arguments but values of tensors, and all fractions are as one.

    A program's steps may give them other values (``monitor.programs.program``); whole numbers may choose another way,
    as powers do.
    """
    if isinstance(value, Tensor):
        return value.dtype, value.shape, canonical_strides(value)
    if isinstance(value, list | tuple):
        return tuple(map(_outline, value))
    if isinstance(value, float):
        return value.hex() if value.is_integer() or not isfinite(value) else float
    return type(value), value


def _tried(func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """Tensors that lie as the call's results do.

    Raises:
        NotImplementedError, RuntimeError: values decide what comes out.
    """
    named = {**_changed(kwargs, _form), **({"device": _NOWHERE} if kwargs.get("device") else {})}
    forms = func(*_changed(args, _form), **named)
    try:
        return execute("exact", func, *_changed((args, kwargs), _zeros), entries=None, keys=lambda: 0)
    except (CallerError, RuntimeError):
        return forms  # zeros are no arguments for it, such as places that must differ: PyTorch's own rule has to do


def _zeros(tensor: Tensor) -> Tensor:
    shape, stride = list(tensor.shape), list(tensor.stride())
    return torch.zeros(reach(shape, stride), dtype=tensor.dtype).as_strided(shape, stride)


def _form(tensor: Tensor) -> Tensor:
    """What lies as a tensor does, on the meta device: a blank one's memory, or such as a tensor with values has."""
    if not isinstance(tensor, Blank):
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_NOWHERE)
    form = torch.empty(0, dtype=tensor.dtype, device=_NOWHERE)
    with torch._C._DisableTorchDispatch():
        return form.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _on_forms(func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """What a call returns as PyTorch lays it out; views share memory, and what is written is what was given."""
    given: dict[int, tuple[Tensor, Tensor]] = {}

    def unwrapped(tensor: Tensor) -> Tensor:
        form = _form(tensor)
        given[id(form)] = form, tensor
        return form

    out = func(*_changed(args, unwrapped), **_changed(kwargs, unwrapped))
    for form, tensor in given.values():
        if isinstance(tensor, Blank) and _place(form) != _place(tensor):
            with torch._C._DisableTorchDispatch():
                tensor.as_strided_(*_place(form))
    return _changed(out, lambda each: given[id(each)][1] if id(each) in given else Blank(each))


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset()
