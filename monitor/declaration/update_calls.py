"""The calls that an optimizer's update makes, as it is run: in which order, on what, with which numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.operators import is_counted
from monitor.programs.capture import UNSET, Capture, made_of_number, numbered, parse_value
from monitor.programs.trace import described, name_of, tensors_in

__all__ = ["ITEM", "Contradicted", "NotBound", "OtherCount", "UpdateCalls", "UpdateForm"]


ITEM = torch.ops.aten._local_scalar_dense.default


class NotBound(Exception):
    """A step's arithmetic cannot be compared with its declared hyper-parameters; the text says why."""


class Contradicted(NotBound):
    """An update computes with other operators or arguments than the declared hyper-parameters give."""


class UpdateForm:
    """The calls of updates, without what only a program needs: equal for updates that differ in scalars alone.

    Attributes:
        calls: of each the operator, its arguments without scalars, and which tensors it takes.
        scalars: the fractional numbers among the arguments, in order, as ``Program.scalars``.
        constants: tensors that no call, state or gradient is, such as those made of a Python number: by their bytes.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.scalars: list[str] = []
        self.constants: list[tuple[int, torch.dtype, bytes]] = []
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []
        self._names: list[tuple[str, int]] = []
        self._end: list[tuple[str, Any]] = []

    def declare(self, tensors: Mapping[str, Tensor]) -> None:
        """Say what exists before an update."""
        self._names += [(name, self._number(tensor)) for name, tensor in tensors.items()]

    def before(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> None:
        """Note a call."""
        func, args, kwargs = made_of_number(func, args, self._knows) or (func, args, kwargs)
        tensors: list[Tensor] = []
        words = [self._word(value, tensors) for value in args]
        words += [f"{name}={self._word(value, tensors)}" for name, value in sorted(kwargs.items())]
        places = []
        for tensor in tensors:
            known = len(self._numbers)
            places.append(self._place(tensor))
            if len(self._numbers) > known:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self.constants.append((known, tensor.dtype, whole.numpy().tobytes()))
        self.calls.append((func, tuple(words), tuple(places)))

    def _word(self, value: Any, tensors: list[Tensor]) -> str:
        """An argument as text; its tensors and fractional numbers are kept apart."""
        if isinstance(value, Tensor):
            tensors.append(value)
            return "tensor"
        if isinstance(value, float):
            self.scalars.append(value.hex())
            return "scalar"
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._word(item, tensors) for item in value)}]"
        return repr(numbered(described(value, tensors), self.scalars))

    def after(self, out: object) -> None:
        """Note what the call made."""
        for tensor in tensors_in(out):
            self._number(tensor)

    def close(self, tensors: Mapping[str, Tensor]) -> None:
        """Say what the state is in the end."""
        self._end = [(name, self._place(tensor)) for name, tensor in tensors.items()]
        self._kept.clear()
        self._numbers.clear()

    def is_like(self, other: UpdateForm) -> bool:
        """Whether both lead to programs that differ in their scalars alone."""
        mine = self.calls, self.constants, self._names, self._end
        return mine == (other.calls, other.constants, other._names, other._end)

    def _knows(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._numbers

    def _place(self, tensor: Tensor) -> tuple[Any, ...]:
        where = self._number(tensor), tensor.storage_offset()
        return (*where, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def _number(self, tensor: Tensor) -> int:
        """The number of a tensor's memory, in the order in which memory was first seen."""
        address = tensor.untyped_storage()._cdata
        if address not in self._numbers:
            self._kept.append(tensor)  # so that its address is given to no other
        return self._numbers.setdefault(address, len(self._numbers))


class OtherCount(Exception):
    """A transcript states another count of updates than there were."""


class UpdateCalls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a form, and a capture if there is one, the calls that a session would show it.

    Attributes:
        own: where values lie that are known; of all others the stated ones are read. None if all are known.
    """

    def __init__(self, form: UpdateForm, capture: Capture | None, stated: Sequence[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._form, self._capture, self._stated = form, capture, iter(stated)
        self.own: Callable[[], Collection[int]] | None = None

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_counted(func):
            return func(*args, **kwargs)
        index = len(self._form.calls)
        self._form.before(func, args, kwargs)
        if self._capture is not None:
            self._capture.before(index, func, args, kwargs)
        out = func(*args, **kwargs)
        if name_of(func) in UNSET:
            out.zero_()
        if func is ITEM:
            out = self._read(args[0], out)
        self._form.after(out)
        if self._capture is not None:
            self._capture.after(index, func, args, kwargs, out)
        return out

    def _read(self, tensor: Tensor, known: Any) -> Any:
        """What an update reads: the stated value, where it is not known."""
        stated = next(self._stated, None)
        if self.own is None:
            return known
        if stated is None:
            raise NotBound("the transcript does not state the values that the optimizer's updates read")
        value = parse_value(stated)
        if tensor.data_ptr() not in self.own():
            return value
        if value != known:
            raise OtherCount(f"an update states that it is number {value!r:.40}, but it is number {known!r}")
        return known
