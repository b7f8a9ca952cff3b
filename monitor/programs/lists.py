"""Operators on lists (``_foreach_…``): a meter counts them tensor by tensor, and a chip may look in between.

They are executed as lists. Where a chip waits for a moment inside of one, what it wrote is put back and written again,
one tensor after another: so the bits are the list's, whoever looked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from firmware_sim import Meter, Work
from monitor.programs.trace import name_of

__all__ = ["charge_each", "is_awaited_inside"]

_LISTS = "aten._foreach_"
_ONE = Work(1, 0, 0)


def is_awaited_inside(meter: Meter, func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether a chip waits for a moment inside of a call of an operator on lists that is about to run."""
    return name_of(func).startswith(_LISTS) and meter.is_awaited(len(args[0]))


def charge_each(meter: Meter, work: Work, written: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Count a call on lists one tensor after another.

    Args:
        written: the tensors that it wrote, in order; none where it returns others.
        before: what they held before it.
    """
    after = [tensor.clone() for tensor in written]
    for tensor, old in zip(written, before, strict=True):
        tensor.copy_(old)
    for number in range(work.calls):
        if after:
            written[number].copy_(after[number])
        meter.charge(work - Work(work.calls - 1) if number == work.calls - 1 else _ONE)
