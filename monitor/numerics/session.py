"""One controlled training step: every ATen call of forward, backward and optimizer passes through here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Protocol, Self, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from firmware_sim.errors import CallerError, ChipwitnessError
from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.backend import Backend
from monitor.numerics.errors import UnsupportedOperator
from monitor.numerics.exact.backend import ExactBackend
from monitor.numerics.kernels.bits import HALF, canonical_nan, check_subnormals
from monitor.numerics.operators import (
    Row,
    find,
    is_counted,
    remedy_for,
    remedy_for_tensors,
)
from monitor.numerics.operators.complex_numbers import takes_complex
from monitor.numerics.operators.compositions import SPELLED, composition, entered, spell
from monitor.numerics.operators.lazy_views import MARKS, is_marked, resolved, without_complex_numbers
from monitor.numerics.operators.lists import are_apart, one_by_one, writes_list
from monitor.numerics.operators.lookup import fused_kernels, is_composite, take_apart
from monitor.numerics.operators.variants import split_outputs
from monitor.numerics.operators.widening import apply_widened, takes_half, types_of
from monitor.numerics.rounding.backend import RoundedBackend
from monitor.numerics.statistics import Statistics
from monitor.numerics.strides import with_canonical_strides
from monitor.numerics.switches import plain_kernels, plain_operators

__all__ = ["NUMERICS", "MakesCall", "Numerics", "Observer", "Session"]

Numerics = Literal["native", "rounded", "exact"]
NUMERICS: tuple[Numerics, ...] = ("native", "rounded", "exact")

MakesCall = Callable[[int, Arguments, Keywords], Any]
"""Makes a call of one operator, given its number in the step, args and kwargs."""

Tolerate = Callable[[CallerError, OpOverload, Arguments, Keywords], Any]

Answer = Callable[[OpOverload, Arguments, Keywords], Any]

_ITEM = "aten._local_scalar_dense.default"


class Observer(Protocol):
    """Sees every ATen call of the step, before decomposition."""

    def before(self, index: int, func: OpOverload, args: Arguments, kwargs: Keywords) -> None:
        """The call is about to run; in-place operators have not written yet."""

    def after(self, index: int, func: OpOverload, args: Arguments, kwargs: Keywords, out: object) -> None:
        """The call has run; the observer may change the tensors of ``out`` in place."""


def _require_float32(name: str, values: Iterable[Any], or_bf16: bool) -> None:
    """Order-sensitive operators are specified for FP32 operands; half-precision ones have been widened but for some."""
    for value in values:
        if isinstance(value, Tensor):
            taken = value.dtype == torch.float32 or (or_bf16 and value.dtype == torch.bfloat16)
            if value.dtype.is_floating_point and not taken:
                raise UnsupportedOperator(name, f"{value.dtype} operands; use float32, bfloat16 or float16")
        elif isinstance(value, list | tuple):
            _require_float32(name, value, or_bf16)


def _unheard(number: int, count: int) -> None:
    """No observer counts what is written."""


@functools.cache
def _name(func: OpOverload) -> str:
    """``str(func)``, which PyTorch composes anew for each call."""
    return str(func)


def _has_empty(args: Arguments) -> bool:
    return any(isinstance(value, Tensor) and not value.numel() for value in args)


def _apart(out: Any, operands: Iterable[Any]) -> Any:
    """Results; one that lies in the memory of an operand is copied, as ATen's results never lie there."""
    if isinstance(out, list | tuple):
        return type(out)(_apart(each, operands) for each in out) if type(out) in (list, tuple) else out
    if not isinstance(out, Tensor):
        return out
    lies = any(isinstance(each, Tensor) and torch._C._is_alias_of(out, each) for each in operands)  # type: ignore[attr-defined]
    return out.clone() if lies else out


def _write(target: Any, result: Any) -> None:
    """Store the functional result of an in-place operator under the rules of PyTorch's in-place operators."""
    if isinstance(target, Tensor):
        if result.shape != target.shape:
            raise CallerError(
                f"an in-place result has shape {tuple(result.shape)}, but its tensor has shape {tuple(target.shape)}"
            )
        if not torch.can_cast(result.dtype, target.dtype):
            raise CallerError(f"an in-place result has type {result.dtype}, but its tensor has type {target.dtype}")
        target.copy_(result)
        return
    for one, value in zip(target, result, strict=True):
        _write(one, value)


def _write_outputs(name: str, outputs: Arguments, result: Any) -> Any:
    """Store results in ``out=`` tensors and return those, as ATen does where shapes agree."""
    results = (result,) if len(outputs) == 1 else tuple(result)
    for output, value in zip(outputs, results, strict=True):
        ours, theirs = types_of(value), types_of(output)
        if ours != theirs and HALF & {ours, theirs}:
            raise UnsupportedOperator(name, f"a result of type {ours} for out= of type {theirs}; convert it afterwards")
        if isinstance(output, Tensor) and output.shape != value.shape:
            raise UnsupportedOperator(name, "a tensor of out= that would have to grow; copy its result instead")
        _write(output, value)
    return outputs[0] if len(outputs) == 1 else outputs


class Session(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Controls one training step while entered; use ``recording`` or ``replaying`` to build one.

    Attributes:
        numerics: ``native``, ``rounded`` or ``exact``.
        statistics: counts of the step.
        log: after exit, the canonical rounding log; empty for native and exact.
        tolerate: makes the result of a call that is refused, to collect all refusals; by default none.
        answer: makes the results of calls in place of torch's own kernels, under native numerics; by default none.
        wrote_part: receives the number of each tensor of a list as a call has written it, and the list's length; by
            default the observer's method of that name, if it has one.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        numerics: Numerics,
        backend: Backend | None,
        statistics: Statistics,
        observer: Observer | None,
        keys: Callable[[], int] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keys = keys
        self.numerics = numerics
        self.statistics = statistics
        self._backend = backend
        self._observer = observer
        self._kernels = plain_kernels if backend is not None else plain_operators if observer is not None else None
        exact = backend if isinstance(backend, ExactBackend) else None
        self._fused = {} if backend is None else fused_kernels(exact)
        self._depth = 0
        self._is_aside = False
        self._state: Literal["new", "open", "closed", "failed"] = "new"
        self.tolerate: Tolerate | None = None
        self.answer: Answer | None = None
        self.wrote_part: Callable[[int, int], None] = getattr(observer, "wrote_part", _unheard)

    @property
    def log(self) -> bytes:
        """Canonical log of a step that ended without an error."""
        if self._state != "closed":
            raise CallerError("the log can only be read after the step of this session has ended without an error")
        return self._backend.log() if isinstance(self._backend, RoundedBackend) else b""

    def entries_of(self, call: int) -> bytes:
        """Log entries of one ATen call, in the form that ``execute`` takes."""
        if not 0 <= call < self.statistics.calls:
            raise CallerError(f"the step had {self.statistics.calls} calls, so there is no call {call}")
        return self._backend.log_of(call) if isinstance(self._backend, RoundedBackend) else b""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While it is open, calls are no part of the step: they run as if there were no session."""
        before, self._is_aside = self._is_aside, True
        try:
            yield
        finally:
            self._is_aside = before

    @property
    def is_observed(self) -> bool:
        """Whether something sees every call."""
        return self._observer is not None

    @contextmanager
    def direct(self, calls: int | None = None) -> Iterator[Self]:
        """While it is open, ``operator`` or ``call`` makes the calls of a step, and nothing else is part of it.

        A program whose calls are known pays no dispatch this way.

        Args:
            calls: how many ``operator`` makes.
        """
        self._open()
        try:
            yield self
        except BaseException as error:
            self._close(type(error))
            raise
        self.statistics.calls = self.statistics.calls if calls is None else calls
        self._close(None)

    def operator(self, func: OpOverload) -> MakesCall:
        """What makes any call of one operator, given its number, args and kwargs, whose tensors' strides are canonical.

        A call that changes nothing but memory, such as one that returns a view, may be left out.
        """

        def numbered(index: int, args: Arguments, kwargs: Keywords) -> Any:
            self.statistics.calls = index
            return self.call(func, args, kwargs)

        if self._observer is not None or _name(func) == _ITEM:
            return numbered
        if self._backend is None:
            make = self._each if writes_list(func) else self._natively
            return lambda index, args, kwargs: make(func, args, kwargs)
        found = find(func)
        is_parted = writes_list(func)
        if found is not None and found.row.kind == "exact" and found.spelling != "out" and not is_parted:
            return lambda index, args, kwargs: func(*args, **kwargs)
        backend, name, fused, apply = self._backend, _name(func), self._fused.get(func), self._apply
        if found is not None and found.spelling == "functional":
            apply = functools.partial(self._functional, found.row)

        def controlled(index: int, args: Arguments, kwargs: Keywords) -> Any:
            self.statistics.calls = index + 1
            backend.begin_call(index, name)
            if is_parted:
                return self._each(func, args, kwargs)
            out = NotImplemented if fused is None else fused(args, kwargs)
            return apply(func, args, kwargs) if out is NotImplemented else out

        return controlled

    def __enter__(self) -> Self:
        self._open()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._close(kind)

    def _open(self) -> None:
        if self._state != "new":
            raise CallerError("this session has already controlled one training step; build a new one for the next")
        self._check_subnormals()
        self._state = "open"
        if self._kernels is not None:
            self._kernels.__enter__()

    def _close(self, kind: type[BaseException] | None) -> None:
        if self._kernels is not None:
            self._kernels.__exit__()
        self._state = "failed"
        if kind is None:
            self._check_subnormals()
            if isinstance(self._backend, RoundedBackend):
                self._backend.finish()
            self._state = "closed"

    def _check_subnormals(self) -> None:
        """Native elementwise operators obey this thread's flush-to-zero setting; DeviceError where it is on."""
        if self._backend is not None:
            check_subnormals(torch.device("cpu"))

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Arguments = (), kwargs: Keywords | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_aside:
            return func(*args, **kwargs)
        if not isinstance(func, OpOverload):  # an operator of operators, such as torch.cond
            raise UnsupportedOperator(str(func), remedy_for("higher_order"))
        if not is_counted(func):
            return func(*args, **kwargs)
        if self._backend is not None or self._observer is not None:
            if func in MARKS:
                return func(*args, **kwargs)
            if is_marked((*args, *kwargs.values())):
                return resolved(self._made, func, args, kwargs)
            if not self._depth and (spelled := without_complex_numbers(self._made, func, args, kwargs)) is not None:
                return spelled()
        return self._made(func, args, kwargs, types)

    def _made(self, func: OpOverload, args: Arguments = (), kwargs: Keywords | None = None, types: Any = ()) -> Any:
        """The result of a call whose tensors are what their memory holds."""
        kwargs = kwargs or {}
        if self._depth:
            return self._apply(func, args, kwargs)
        is_jagged = bool(types) and any(each.__name__ == "NestedTensor" for each in types)
        if self._backend is not None or self._observer is not None:
            if func in SPELLED:
                return spell(self, func, args, kwargs)
            is_whole = not is_jagged and find(func) is None and is_composite(func)  # as inference mode leaves it
            if is_whole and not remedy_for_tensors((*args, *kwargs.values())):
                with entered(self):
                    return take_apart(func, args, kwargs)
        try:
            if is_jagged:  # it asks back for all that it is asked
                raise UnsupportedOperator(_name(func), remedy_for("nested"))
            return self.call(func, args, kwargs)
        except CallerError as error:
            if self.tolerate is None:
                raise
            return self.tolerate(error, func, args, kwargs)

    def call(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
        """Make the next call of the step; one that fails, and writes no argument, is none.

        Autocast has asked for its casts before, as calls of their own; what a call is made of is not cast once more.
        """
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():
                return self.call(func, args, kwargs)
        index, out = self.statistics.calls, None
        self.statistics.calls += 1
        try:
            if self._backend is not None:
                self._backend.begin_call(index, _name(func))
                if not func._schema.is_mutable:
                    args = with_canonical_strides(args)
                    kwargs = {name: with_canonical_strides(value) for name, value in kwargs.items()}
            if self._observer is not None:
                self._observer.before(index, func, args, kwargs)
            apply = self._each if writes_list(func) else self._apply
            out = apply(func, args, kwargs)
            if self._observer is not None:
                self._observer.after(index, func, args, kwargs, out)
        except Exception as error:
            if not (func._schema.is_mutable or isinstance(error, ChipwitnessError)):
                self.statistics.calls = index  # it made and wrote nothing, and a loop that catches the error goes on
            if not isinstance(error, RuntimeError):  # that is also what PyTorch has not implemented, and endless calls
                raise
            remedy = remedy_for_tensors((*args, *kwargs.values(), out))
            if not remedy or (self._backend is None and self._observer is None):
                raise
            raise UnsupportedOperator(_name(func), remedy) from None
        return out

    def _apply(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
        name = _name(func)
        if name == _ITEM:
            value = func(*args, **kwargs) if self.answer is None else self.answer(func, args, kwargs)
            self.statistics.items.append((self.statistics.calls - 1, value))
            return value
        if self._backend is None:
            return self._natively(func, args, kwargs)
        if (fused := self._fused.get(func)) is not None:
            out = fused(args, kwargs)
            if out is not NotImplemented:
                return out
        found = find(func)
        if found is None:
            is_prim = func.namespace == "prims" and self._depth  # what PyTorch's decompositions come down to
            definition = cast(Any, func).impl_aten if is_prim else func.decompose
            return self._compose(func, args, kwargs, definition)
        if found.spelling == "functional":
            return self._functional(found.row, func, args, kwargs)
        if found.spelling == "in place":
            out = self._functional(found.row, func, args, kwargs, types=types_of(args[0]))
            if out is not args[0]:
                _write(args[0], out)
            return None if isinstance(args[0], list) else args[0]
        inputs, outputs = split_outputs(func, found.functional, kwargs)
        written = _write_outputs(name, outputs, self._functional(found.row, found.functional, args, inputs))
        return written if func._schema.returns else None

    def _each(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> None:
        """Write the tensors of a list one after another: what is between two operators is between any two of them."""
        count, found = max(len(args[0]), 1), None if self._backend is None else find(func)
        if found is not None and not are_apart(args):
            raise UnsupportedOperator(
                _name(func), "a list with one tensor at two places; loop over the tensors instead"
            )
        if found is not None and found.spelling == "in place" and found.row.kind != "exact" and args[0]:
            made = self._functional(found.row, func, args, kwargs, types=types_of(args[0]))
            for number, (tensor, value) in enumerate(zip(args[0], made, strict=True)):
                _write(tensor, value)
                self.wrote_part(number, count)
            return
        whole = self.answer is not None or not args[0]
        for number, (some, named) in enumerate([(args, kwargs)] if whole else one_by_one(args, kwargs)):
            self._apply(func, some, named)
            for part in range(count) if whole else [number]:
                self.wrote_part(part, count)

    def _natively(self, func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
        """Without control, but for random operators where a step has keys: every device must draw the same."""
        if self.answer is not None:
            return self.answer(func, args, kwargs)
        found = find(func)
        if self._keys is not None and torch.Tag.nondeterministic_seeded in func.tags and found is not None:
            statistics = Statistics()
            with Session("exact", ExactBackend(statistics, self._keys), statistics, None, self._keys):
                return func(*args, **kwargs)
        return _set(found.row, func(*args, **kwargs)) if found is not None else func(*args, **kwargs)

    def _functional(self, row: Row, func: OpOverload, args: Arguments, kwargs: Keywords, types: Any = None) -> Any:
        """Result of a row of the table; only native in-place kernels write to their argument here."""
        if row.kind == "exact":
            return _set(row, func(*args, **kwargs))
        if takes_complex((*args, *kwargs.values())):
            return self._in_complex(row, func, *args, **kwargs)
        if takes_half(row, args, kwargs):
            run, exact = functools.partial(self._in_fp32, row, func), self.numerics == "exact"
            return apply_widened(row, func, run, args, kwargs, types, two_digits=exact)
        return self._in_fp32(row, func, *args, **kwargs)

    def _in_complex(self, row: Row, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Result of a row with complex operands, which it takes by its own code or not at all."""
        if row.complex is None:
            raise UnsupportedOperator(_name(func), "complex operands; " + remedy_for("complex"))
        out = row.complex(self._backend, *args, **kwargs)
        out = out if func._schema.is_mutable else _apart(out, args)
        canonical_nan(out)
        return out

    def _in_fp32(self, row: Row, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
        """Result of a row whose half-precision operands, if any, have been widened."""
        name = _name(func)
        if row.kind == "arithmetic":
            out = func(*args, **kwargs)
        elif row.kind == "decomposed":
            definition = composition(row, func)
            if definition is None:
                raise UnsupportedOperator(name, remedy_for(name))
            out = self._compose(func, args, kwargs, definition)
        else:
            if row.formats == "FP32":
                _require_float32(name, args, row.has_two_digits)
            if row.native_if_empty and name == row.name and _has_empty(args):
                return func(*args, **kwargs)
            assert self._backend is not None
            out = row.run(self._backend, *args, **kwargs)
        if row.kind != "arithmetic" and not func._schema.is_mutable:
            out = _apart(out, args)
        if not row.settled:
            canonical_nan(out)
        return out

    def _compose(self, func: OpOverload, args: Arguments, kwargs: Keywords, definition: Callable[..., Any]) -> Any:
        """Run an operator that PyTorch itself defines by other operators, each of which comes back here."""
        self._depth += 1
        try:
            with entered(self):
                out = definition(*args, **kwargs)
        finally:
            self._depth -= 1
        if out is NotImplemented:
            raise UnsupportedOperator(str(func), remedy_for(str(func)))
        return out


def _set(row: Row, out: Any) -> Any:
    """What an operator returned; memory that it leaves as it was found holds zeros, as wherever a step is repeated."""
    return out.zero_() if row.unset else out
