"""The work of a program's calls, as the meter of a chip that runs them counts it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from firmware_sim import NO_WORK, Work, work_of
from monitor.programs.calls import argument, is_view, operator_of

__all__ = ["call_work"]


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
def _returns_views(operator: str) -> bool:
    return is_view(operator_of(operator))


@lru_cache(maxsize=4096)
def _may_be_transposed(operator: str) -> bool:
    return any(argument.name == "transposed" for argument in operator_of(operator)._schema.arguments)
