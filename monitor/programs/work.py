"""The work and the results of a program's calls, as the meter of a chip that runs them counts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from firmware_sim import DTYPE_SIZES, NO_WORK, Operand, Work, work_of
from firmware_sim.operations import UNCOUNTED
from monitor.programs.calls import argument, is_view, operator_of
from monitor.programs.trace import name_of, result_tensors, tensors_in, written_arguments

__all__ = ["call_work", "is_uncounted", "live_work", "made_bytes", "makes"]


def call_work(call: Mapping[str, Any]) -> Work:
    """The work of one call in a program's form; none for one that returns views."""
    operator = call["operator"]
    if _returns_views(operator):
        return NO_WORK
    inputs = [(place["dtype"], place["shape"]) for place in call["sources"]]
    outputs = [(layout["dtype"], layout["shape"]) for layout in call["results"]]
    transposed = _may_be_transposed(operator) and argument(call, "transposed") is True
    dims = argument(call, "dim") if _is_transform(operator) else ()
    return work_of(operator, inputs, outputs, transposed=transposed, dims=dims)


def live_work(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: object) -> Work:
    """The work of a call that has just been made; where its shapes fit no product, bytes alone count."""
    if is_view(func):
        return NO_WORK
    inputs = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
    written = written_arguments(func, args, kwargs)
    outputs = [*result_tensors(out, written), *written]
    at = _place_of_transposed(func)
    transposed = at is not None and len(args) > at and args[at] is True
    dims = args[1] if _is_transform(name_of(func)) and len(args) > 1 else ()
    try:
        return work_of(name_of(func), _operands(inputs), _operands(outputs), transposed=transposed, dims=dims)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return Work(1, 0, sum(each.nbytes for each in (*inputs, *outputs)))


def _is_transform(operator: str) -> bool:
    return operator.startswith("aten._fft_")


def _operands(tensors: Iterable[Tensor]) -> list[Operand]:
    return [(str(each.dtype).removeprefix("torch."), each.shape) for each in tensors]


@lru_cache(maxsize=4096)
def is_uncounted(func: OpOverload) -> bool:
    """Whether an operator multiplies, and nothing counts how often."""
    return name_of(func).split(".")[1].rstrip("_") in UNCOUNTED


@lru_cache(maxsize=4096)
def makes(func: OpOverload) -> bool:
    """Whether an operator returns new memory: it neither returns views nor writes what it is given."""
    return not func._schema.is_mutable and not is_view(func)


def made_bytes(calls: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of all results of calls in a program's form."""
    made = (layout for call in calls if makes(operator_of(call["operator"])) for layout in call["results"])
    return sum(prod(layout["shape"]) * DTYPE_SIZES[layout["dtype"]] for layout in made)


@lru_cache(maxsize=4096)
def _returns_views(operator: str) -> bool:
    return is_view(operator_of(operator))


@lru_cache(maxsize=4096)
def _may_be_transposed(operator: str) -> bool:
    return _place_of_transposed(operator_of(operator)) is not None


@lru_cache(maxsize=4096)
def _place_of_transposed(func: OpOverload) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("transposed") if "transposed" in names else None
