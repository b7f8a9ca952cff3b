"""From an overload as a program calls it to its row: functional, in place or ``out=``; and its fused kernel."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from monitor.numerics.arguments import Arguments, Direct, Keywords
from monitor.numerics.backend import CountedBackend
from monitor.numerics.operators.row import Row
from monitor.numerics.operators.table import operator_table
from monitor.numerics.operators.variants import functional_variant

__all__ = [
    "Found",
    "find",
    "functional_name",
    "fused_kernels",
    "is_composite",
    "is_counted",
    "overload_named",
    "remedy_for",
    "remedy_for_tensors",
    "row_named",
    "take_apart",
]

_ASIDE = ("profiler", "prim")
"""Namespaces of calls that compute nothing: marks in a trace, and asking a tensor where it lies."""

_REMEDIES = {
    "_thnn_fused": "record a recurrent layer on a CPU, or write its cell with plain operators",
    "_fused_": "build the optimizer with fused=False",
    "mkldnn": "leave the layer's choice of kernels to the recorder; under native numerics, switch oneDNN off for it",
    "linalg_": "use another factorisation: cholesky, lu, qr, eigh and svd of real matrices are supported",
    "quantize": "round straight through in place of quantised operators: x + (x.round() - x).detach()",
    "nested": "pad the parts to one length (monitor.padded)",
    "sparse": "use dense tensors; an embedding with sparse=False",
    "complex": "compute with real and imaginary parts as two real tensors",
    "higher_order": "write its operators as they are: torch.where or Python's if for torch.cond, "
    "scaled_dot_product_attention with a mask for flex_attention",
    "scaled_dot_product": "leave the choice of its kernel to the session, without sdpa_kernel",
    "linear_cross_entropy": "call linear_cross_entropy with options=None, which takes the loss in one piece",
    "_grad": "draw with sample() and train on log_prob: random draws of this kind have no gradient here",
    "_cudnn": "switch cuDNN off for this operator",
}


@dataclass(frozen=True, slots=True)
class Found:
    """A row, how the overload spells it, and the overload whose arguments the row takes."""

    row: Row
    spelling: Literal["functional", "in place", "out"]
    functional: OpOverload


@functools.cache
def _in_place() -> dict[str, str]:
    """Functional names of those in-place overloads whose own name does not tell."""
    return {row.in_place: row.name for row in operator_table().values() if row.in_place}


def functional_name(name: str) -> str | None:
    """``aten.add_.Tensor`` → ``aten.add.Tensor``; None for a name that is not in place."""
    if name in _in_place():
        return _in_place()[name]
    namespace, operator, overload = name.split(".", 2)
    if not operator.endswith("_") or operator.endswith("__"):
        return None
    return f"{namespace}.{operator[:-1]}.{overload}"


@functools.cache
def is_composite(func: OpOverload) -> bool:
    """Whether PyTorch defines an operator by others."""
    found: bool = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    return found


def take_apart(func: OpOverload, args: Arguments, kwargs: Keywords) -> Any:
    """The result of a composite operator, by the operators that autograd sees of it.

    ``func.decompose`` takes what compilers do instead: a dropout that returns a copy, or an RNN that leaves it out.
    """
    return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


@functools.cache
def find(func: OpOverload) -> Found | None:
    """The row that governs an overload; None where it has none."""
    name, table = str(func), operator_table()
    if name in table:
        return Found(table[name], "functional", func)
    row = table.get(functional_name(name) or "")
    if row is not None:
        return Found(row, "in place", func)
    functional = functional_variant(func)
    row = table.get(str(functional))
    return None if functional is None or row is None else Found(row, "out", functional)


@functools.cache
def is_counted(func: OpOverload) -> bool:
    """Tell whether a call is part of a step."""
    return func.namespace not in _ASIDE and row_named(str(func)).counted


def row_named(name: str) -> Row:
    """The row of a functional overload; one without any fact where the table has none."""
    return operator_table().get(name) or Row(name=name, kind="decomposed")


def remedy_for(name: str) -> str:
    """Remedy for an operator without a row."""
    for part, remedy in _REMEDIES.items():
        if part in name:
            return remedy
    return "compute it before the step and pass the result in the batch, or write it with other operators"


def remedy_for_tensors(values: Iterable[object]) -> str:
    """Remedy for the first of these values that is no dense tensor with values; empty where all are."""
    for value in values:
        if isinstance(value, list | tuple) and (remedy := remedy_for_tensors(value)):
            return remedy
        if isinstance(value, torch.device):
            value = torch.empty(0, device=value) if value.type == "meta" else None
        if not isinstance(value, Tensor):
            continue
        if is_traceable_wrapper_subclass(value) or value.is_nested:
            return _REMEDIES["nested"]
        if value.layout != torch.strided:
            return _REMEDIES["sparse"]
        if value.is_meta:
            return "compute with tensors that have values, not on the meta device"
    return ""


def overload_named(name: str) -> OpOverload | None:
    """The overload of ATen of a name such as ``aten.mm.default``; None where this PyTorch has none."""
    _, operator, overload = name.split(".")
    found = getattr(getattr(torch.ops.aten, operator, None), overload, None)
    return found if isinstance(found, OpOverload) else None


@functools.cache
def _fused_rows(exact: bool) -> tuple[tuple[OpOverload, Row], ...]:
    """Overloads of this PyTorch that have fused kernels, in every controlled numerics or under ``exact`` alone."""
    fused = [row for row in operator_table().values() if row.fused is not None and row.fused.exact == exact]
    named = [(row.name, row) for row in fused if row.fused and row.fused.spelling != "in place"]
    named += [(row.overload_in_place, row) for row in fused if row.fused and row.fused.spelling != "functional"]
    return tuple((func, row) for name, row in named if (func := overload_named(name)) is not None)


@functools.cache
def _shared_kernels() -> Mapping[OpOverload, Direct]:
    return {func: row.fused.make(func, None, row.code) for func, row in _fused_rows(False) if row.fused}


def fused_kernels(exact: CountedBackend | None) -> Mapping[OpOverload, Direct]:
    """The fused kernels of a session's calls: those of every controlled numerics, and with an exact backend its own."""
    if exact is None:
        return _shared_kernels()
    own = {func: row.fused.make(func, exact, row.code) for func, row in _fused_rows(True) if row.fused}
    return {**_shared_kernels(), **own}
