"""One controlled training step: every ATen call of forward, backward and optimizer passes through here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from firmware_sim.errors import CallerError, EvidenceError

from ._backend import Backend
from ._exact_backend import ExactBackend
from .errors import UnsupportedOperator
from .operators import Rule, functional_name, functional_of_out, operator_table, remedy_for
from .operators.decomposed import decomposition
from .rounding.engine import RoundedBackend
from .rounding.policy import Bound, Policy
from .statistics import Statistics

__all__ = ["NUMERICS", "Numerics", "Observer", "Session", "execute", "recording", "replaying"]

Numerics = Literal["native", "rounded", "exact"]
NUMERICS: tuple[Numerics, ...] = ("native", "rounded", "exact")

_ITEM = "aten._local_scalar_dense.default"
_UNCOUNTED = frozenset({"aten.detach.default", "aten.alias.default"})
"""Aliases without arithmetic that autograd makes or spares as references to saved tensors come and go."""


class Observer(Protocol):
    """Sees every ATen call of the step, before decomposition."""

    def before(self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The call is about to run; in-place operators have not written yet."""

    def after(self, index: int, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        """The call has run; the observer may change the tensors of ``out`` in place."""


def _canonical_nan(out: Any) -> None:
    """Give every NaN the bits 0x7FC00000; a processor may choose sign and payload."""
    if isinstance(out, Tensor):
        if out.dtype.is_floating_point and out.numel() and not math.isfinite(float(out.sum())):
            out.masked_fill_(out.isnan(), float("nan"))
    elif isinstance(out, list | tuple):
        for value in out:
            _canonical_nan(value)


def _require_float32(name: str, values: Iterable[Any]) -> None:
    """Order-sensitive operators are specified for FP32 operands alone."""
    for value in values:
        if isinstance(value, Tensor):
            if value.dtype.is_floating_point and value.dtype != torch.float32:
                raise UnsupportedOperator(
                    name, f"{value.dtype} operands; switch autocast off and keep to torch.float32"
                )
            if value.dtype.is_complex:
                raise UnsupportedOperator(name, "complex operands; use real ones")
        elif isinstance(value, list | tuple):
            _require_float32(name, value)


def _write(target: Any, result: Any) -> None:
    """Store the functional result of an in-place operator under the rules of PyTorch's in-place operators."""
    if isinstance(target, Tensor):
        if result.shape != target.shape:
            raise CallerError(f"in-place result of shape {tuple(result.shape)} for a {tuple(target.shape)} tensor")
        if not torch.can_cast(result.dtype, target.dtype):
            raise CallerError(f"in-place result of type {result.dtype} for a {target.dtype} tensor")
        target.copy_(result)
        return
    for one, value in zip(target, result, strict=True):
        _write(one, value)


class Session(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Controls one training step while entered; use ``recording`` or ``replaying`` to build one.

    Attributes:
        numerics: ``native``, ``rounded`` or ``exact``.
        statistics: counts of the step.
        log: after exit, the canonical rounding log; empty for native and exact.
    """

    def __init__(
        self, numerics: Numerics, backend: Backend | None, statistics: Statistics, observer: Observer | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numerics = numerics
        self.statistics = statistics
        self._backend = backend
        self._observer = observer
        self._table: dict[str, Rule] = operator_table()
        self._depth = 0
        self._state: Literal["new", "open", "closed", "failed"] = "new"
        self._log = b""

    @property
    def log(self) -> bytes:
        """Canonical log of a step that ended without an error."""
        if self._state != "closed":
            raise CallerError("a session has a log only after its step has ended without an error")
        return self._log

    def entries_of(self, call: int) -> bytes:
        """Log entries of one ATen call, in the form that ``execute`` takes."""
        if not 0 <= call < self.statistics.calls:
            raise CallerError(f"the step had {self.statistics.calls} calls; there is no call {call}")
        return self._backend.log_of(call) if isinstance(self._backend, RoundedBackend) else b""

    def __enter__(self) -> Self:
        if self._state != "new":
            raise CallerError("a session controls one training step; build another for the next")
        self._state = "open"
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._state = "failed"
        if kind is None:
            if isinstance(self._backend, RoundedBackend):
                self._backend.finish()
                self._log = self._backend.log()
            self._state = "closed"

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "profiler" or str(func) in _UNCOUNTED:
            return func(*args, **kwargs)
        if self._depth:
            return self._apply(func, args, kwargs)
        index = self.statistics.calls
        self.statistics.calls += 1
        if self._backend is not None:
            self._backend.begin_call(index, str(func))
        if self._observer is not None:
            self._observer.before(index, func, args, kwargs)
        out = self._apply(func, args, kwargs)
        if self._observer is not None:
            self._observer.after(index, func, args, kwargs, out)
        return out

    def _apply(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = str(func)
        if name == _ITEM:
            value = func(*args, **kwargs)
            self.statistics.items.append((self.statistics.calls - 1, value))
            return value
        if self._backend is None:
            return func(*args, **kwargs)
        rule = self._table.get(name)
        target: Any = None
        if rule is None:
            rule, target = self._writing_rule(name, args, kwargs)
        if rule is None:
            return self._compose(func, args, kwargs, func.decompose)
        if rule.kind == "exact" or (rule.kind == "arithmetic" and "out" not in kwargs):
            out = func(*args, **kwargs)
            if rule.kind == "arithmetic":
                _canonical_nan(out)
            return out
        if rule.kind == "refused":
            raise UnsupportedOperator(name, rule.remedy)
        inputs = {key: value for key, value in kwargs.items() if key != "out"}
        if rule.kind == "decomposed":
            found = decomposition(func)
            if found is None:
                raise UnsupportedOperator(name, remedy_for(name))
            out = self._compose(func, args, inputs, found)
        else:
            if not rule.any_format:
                _require_float32(name, args)
            out = rule.run(self._backend, *args, **inputs)
        if not rule.settled:
            _canonical_nan(out)
        if target is None:
            return out
        _write(target, out)
        return None if isinstance(target, list) else target

    def _writing_rule(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Rule | None, Any]:
        """The functional rule behind an in-place or ``out=`` overload, and what it writes to."""
        functional = functional_name(name)
        if functional is not None and functional in self._table:
            return self._table[functional], args[0]
        functional = functional_of_out(name)
        if functional is not None and self._table[functional].kind == "implemented":
            return self._table[functional], kwargs["out"]
        return None, None

    def _compose(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], definition: Callable[..., Any]
    ) -> Any:
        """Run an operator that PyTorch itself defines by other operators, each of which comes back here."""
        self._depth += 1
        try:
            with self._again():
                out = definition(*args, **kwargs)
        finally:
            self._depth -= 1
        if out is NotImplemented:
            raise UnsupportedOperator(str(func), remedy_for(str(func)))
        return out

    def _again(self) -> _Reentered:
        return _Reentered(self)


class _Reentered:
    """Pushes the mode again while one of its own calls runs."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        TorchDispatchMode.__enter__(self._session)  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        TorchDispatchMode.__exit__(self._session, *error)  # type: ignore[no-untyped-call]


def _build(numerics: str, log: bytes | None, policy: Policy, bound: Bound, observer: Observer | None) -> Session:
    if numerics not in NUMERICS:
        raise CallerError(f"unknown numerics {numerics!r}; choose {', '.join(NUMERICS)}")
    statistics = Statistics()
    backend: Backend | None = None
    if numerics == "rounded":
        backend = RoundedBackend(policy, bound, statistics, log)
    elif log:
        raise EvidenceError(f"{numerics} numerics have an empty rounding log; this one has {len(log)} bytes")
    if numerics == "exact":
        backend = ExactBackend(statistics)
    return Session(numerics, backend, statistics, observer)


_POLICY = Policy()
_BOUND = Bound()


def recording(
    numerics: str, *, policy: Policy = _POLICY, bound: Bound = _BOUND, observer: Observer | None = None
) -> Session:
    """A session that records one training step (forward, backward, optimizer)."""
    return _build(numerics, None, policy, bound, observer)


def replaying(
    numerics: str, log: bytes, *, policy: Policy = _POLICY, bound: Bound = _BOUND, observer: Observer | None = None
) -> Session:
    """A session that repeats one training step under its log; all entries must be used by the time it ends.

    Raises:
        EvidenceError: the log is malformed, now or while the step runs (LogContradiction).
    """
    return _build(numerics, log, policy, bound, observer)


def resolve(func_name: str) -> OpOverload:
    """The ATen overload of a name such as ``aten.mm.default``, if the operator table admits it.

    Raises:
        UnsupportedOperator: the table has no such row.
    """
    parts = func_name.split(".")
    known = operator_table()
    if len(parts) != 3 or not (func_name in known or functional_name(func_name) in known):
        raise UnsupportedOperator(func_name, "a referee executes operators of the table only")
    packet = getattr(torch.ops.aten, parts[1], None)
    overload = getattr(packet, parts[2], None)
    if not isinstance(overload, OpOverload):
        raise UnsupportedOperator(func_name, "this PyTorch has no such operator")
    return overload


def execute(
    numerics: str,
    func_name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    entries: bytes | None,
    policy: Policy = _POLICY,
    bound: Bound = _BOUND,
) -> Any:
    """Outputs of one ATen call, as a referee computes them.

    Args:
        numerics: as for ``recording``.
        func_name: ATen overload, such as ``aten.mm.default``.
        args: positional arguments; in-place operators write into them.
        kwargs: keyword arguments.
        entries: the call's part of a rounding log (``Session.entries_of``); None takes this device's own decisions.
        policy: as for ``recording``.
        bound: as for ``recording``.

    Raises:
        UnsupportedOperator: the name is not in the operator table.
        EvidenceError: the entries are malformed or contradict the arithmetic.
    """
    func = resolve(func_name)
    with _build(numerics, entries, policy, bound, None):
        return func(*args, **kwargs)
