"""Sessions and single calls under the numerics that a run declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, cast

from torch._ops import OpOverload

from firmware_sim.errors import CallerError, EvidenceError
from monitor.numerics.arguments import Arguments, Keywords
from monitor.numerics.backend import Backend
from monitor.numerics.errors import UnsupportedOperator
from monitor.numerics.exact.backend import ExactBackend
from monitor.numerics.operators import (
    find,
    remedy_for,
)
from monitor.numerics.operators.lookup import overload_named
from monitor.numerics.rounding import codec
from monitor.numerics.rounding.backend import RoundedBackend
from monitor.numerics.rounding.bounds import Bound, Formats, bound_named
from monitor.numerics.session import NUMERICS, Numerics, Observer, Session
from monitor.numerics.statistics import Statistics

__all__ = [
    "DECLARABLE",
    "bound_of",
    "entries_in",
    "execute",
    "groups_in",
    "logged_calls",
    "recording",
    "referee",
    "replaying",
    "resolve",
    "written",
]


DECLARABLE = (*NUMERICS, "rounded-probabilistic", "rounded-calibrated")
"""What a run may declare: ``rounded`` alone has worst-case bounds."""


def _build(
    declared: str,
    log: bytes | None,
    formats: Formats,
    bound: Bound,
    observer: Observer | None,
    keys: Callable[[], int] | None = None,
) -> Session:
    """A session for declared numerics; the kind of bound that they name goes before that of ``bound``."""
    if declared not in DECLARABLE:
        raise CallerError(f"unknown numerics {declared!r}; choose {', '.join(DECLARABLE)}")
    numerics: Numerics = "rounded" if declared.startswith("rounded-") else cast(Numerics, declared)
    if numerics != declared:
        kept = {name: getattr(bound, name) for name in ("check", "contradictions", "is_referee")}
        bound = dataclasses.replace(bound_of(declared), **kept)
    statistics = Statistics()
    backend: Backend | None = None
    if numerics == "rounded":
        backend = RoundedBackend(formats, bound, statistics, log, keys)
    elif log:
        raise EvidenceError(f"{numerics} numerics have an empty rounding log; this one has {len(log)} bytes")
    if numerics == "exact":
        backend = ExactBackend(statistics, keys)
    return Session(numerics, backend, statistics, observer, keys)


_FORMAT = Formats()


_BOUND = Bound()


def recording(
    numerics: str,
    *,
    formats: Formats = _FORMAT,
    bound: Bound = _BOUND,
    observer: Observer | None = None,
    keys: Callable[[], int] | None = None,
) -> Session:
    """A session that records one training step (forward, backward, optimizer).

    Args:
        numerics: of DECLARABLE.
        formats: formats of ``rounded``.
        bound: error bound of plain ``rounded``; the other names give their own.
        observer: sees every ATen call.
        keys: gives random operators their keys, in [0, 2^63); with None torch's CPU generator does.
    """
    return _build(numerics, None, formats, bound, observer, keys)


def replaying(
    numerics: str,
    log: bytes,
    *,
    formats: Formats = _FORMAT,
    bound: Bound = _BOUND,
    observer: Observer | None = None,
    keys: Callable[[], int] | None = None,
) -> Session:
    """A session that repeats one training step under its log; all entries must be used by the time it ends.

    Raises:
        EvidenceError: the log is malformed, now or while the step runs (LogContradiction).
    """
    return _build(numerics, log, formats, bound, observer, keys)


def resolve(func_name: str) -> OpOverload:
    """The ATen overload of a name such as ``aten.mm.default``, if the operator table admits it.

    Raises:
        UnsupportedOperator: this PyTorch has no such operator, or the table no row for it.
    """
    overload = overload_named(func_name) if func_name.count(".") == 2 else None
    if overload is None or str(overload) != func_name or find(overload) is None:
        raise UnsupportedOperator(func_name, remedy_for(func_name))
    return overload


def execute(
    numerics: str,
    func: OpOverload | str,
    args: Arguments,
    kwargs: Keywords,
    *,
    entries: bytes | None,
    formats: Formats = _FORMAT,
    bound: Bound = _BOUND,
    keys: Callable[[], int] | None = None,
) -> Any:
    """Outputs of one ATen call, as a referee computes them.

    Args:
        numerics: as for ``recording``.
        func: ATen overload, or the name of a row of the operator table, such as ``aten.mm.default``.
        args: positional arguments; in-place operators write into them.
        kwargs: keyword arguments.
        entries: the call's part of a rounding log (``Session.entries_of``); None takes this device's own decisions.
        formats: as for ``recording``.
        bound, keys: as for ``recording``.

    Raises:
        UnsupportedOperator: the operator table does not admit it.
        EvidenceError: the entries are malformed or contradict the arithmetic.
    """
    if isinstance(func, str):
        func = resolve(func)
    with _build(numerics, entries, formats, bound, None, keys):
        return func(*args, **kwargs)


def referee(
    numerics: str,
    func: OpOverload,
    args: Arguments,
    kwargs: Keywords,
    *,
    entries: bytes,
    keys: Callable[[], int] | None = None,
) -> tuple[Any, bool]:
    """``execute`` for a recorder and a replayer that objects to a log: neither is trusted.

    Returns the outputs, and whether no honest replayer can object to the entries.

    Raises:
        EvidenceError: no honest recorder can have written the entries.
    """
    session = _build(numerics, entries, _FORMAT, Bound(is_referee=True), None, keys)
    with session:
        out = func(*args, **kwargs)
    return out, not session.statistics.open


def entries_in(declared: str, log: bytes, call: int) -> bytes:
    """The part of a step's rounding log that is about one call, in the form that ``execute`` takes.

    Raises:
        EvidenceError: the log is malformed.
    """
    return written(declared, groups_in(declared, log, call))


def groups_in(declared: str, log: bytes, call: int) -> list[codec.Group]:
    """The same, not encoded."""
    return [dataclasses.replace(group, call=0) for group in _groups(declared, log) if group.call == call]


def written(declared: str, groups: Iterable[codec.Group]) -> bytes:
    """The log that consists of these groups, in order; numerics without rounding have an empty one."""
    return codec.encode(groups, _FORMAT, bound_of(declared)) if declared.startswith("rounded") else b""


def logged_calls(declared: str, log: bytes) -> frozenset[int]:
    """The calls about which a step's rounding log says something; EvidenceError if it is malformed."""
    return frozenset(group.call for group in _groups(declared, log))


def _groups(declared: str, log: bytes) -> list[codec.Group]:
    if declared.startswith("rounded"):
        return codec.decode(log, _FORMAT, bound_of(declared))
    if log:
        raise EvidenceError(f"{declared} numerics have an empty rounding log; this one has {len(log)} bytes")
    return []


def bound_of(declared: str) -> Bound:
    """The error bound that declared numerics of this kind take."""
    return _BOUND if declared == "rounded" else bound_named(declared.removeprefix("rounded-"))
