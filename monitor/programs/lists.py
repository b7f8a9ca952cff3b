"""Operators on lists (``_foreach_…``): a meter counts them tensor by tensor, and so they write."""

from __future__ import annotations

from functools import lru_cache

from firmware_sim import Meter, Work
from monitor.numerics.operators.lists import writes_list

__all__ = ["charge", "charge_part", "writes_list"]


@lru_cache(maxsize=4096)
def _parts(work: Work, count: int) -> tuple[Work, ...]:
    return tuple(work.share(number + 1, count) - work.share(number, count) for number in range(count))


def charge(meter: Meter, work: Work) -> None:
    """Count a call that has been made; one on lists as a call for each tensor."""
    if work.calls <= 1:
        meter.charge(work)
        return
    for part in _parts(work, work.calls):
        meter.charge(part)


def charge_part(meter: Meter, work: Work, number: int, count: int) -> None:
    """Count one of ``count`` equal parts of a call on lists."""
    meter.charge(_parts(work, count)[number])
