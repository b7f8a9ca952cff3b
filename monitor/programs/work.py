"""The work and the results of a program's calls, as the meter of a chip that runs them counts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Any

from torch._ops import OpOverload

from firmware_sim import DTYPE_SIZES, NO_WORK, Work, work_of
from monitor.programs.calls import argument, is_view, operator_of

__all__ = ["call_work", "made_bytes", "makes"]


def call_work(call: Mapping[str, Any]) -> Work:
    """The work of one call in a program's form; none for one that returns views."""
    operator = call["operator"]
    if _returns_views(operator):
        return NO_WORK
    inputs = [(place["dtype"], place["shape"]) for place in call["sources"]]
    outputs = [(layout["dtype"], layout["shape"]) for layout in call["results"]]
    transposed = _may_be_transposed(operator) and argument(call, "transposed") is True
    return work_of(operator, inputs, outputs, transposed=transposed)


@lru_cache(maxsize=4096)
def makes(func: OpOverload) -> bool:
    """Whether an operator returns memory of its own: it neither returns views nor writes what it is given."""
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
    return any(argument.name == "transposed" for argument in operator_of(operator)._schema.arguments)
