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
from monitor.programs.trace import name_of, tensors_in

__all__ = ["charge_each", "is_awaited_inside"]

_LISTS = "aten._foreach_"


def is_awaited_inside(meter: Meter, func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether a chip may wait for a moment inside of a call of an operator on lists that is about to run.

    It moves at most what it is given once more.
    """
    if not name_of(func).startswith(_LISTS):
        return False
    return meter.is_awaited(Work(len(args[0]), 0, 2 * sum(each.nbytes for each in tensors_in(args))))


def charge_each(meter: Meter, work: Work, written: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Count a call on lists one tensor after another, for each an equal part of its work.

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
        meter.charge(work.share(number + 1, work.calls) - work.share(number, work.calls))
