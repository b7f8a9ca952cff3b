"""The work of a program's calls, as the meter of a chip that runs them counts it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firmware_sim import NO_WORK, Work, work_of
from monitor.programs.calls import argument, is_view, operator_of

__all__ = ["call_work"]


def call_work(call: Mapping[str, Any]) -> Work:
    """The work of one call in a program's form; none for one that returns views."""
    if is_view(operator_of(call["operator"])):
        return NO_WORK
    inputs = [(place["dtype"], place["shape"]) for place in call["sources"]]
    outputs = [(layout["dtype"], layout["shape"]) for layout in call["results"]]
    return work_of(call["operator"], inputs, outputs, transposed=argument(call, "transposed") is True)
