"""The learning rates of schedulers that other libraries bring, as a declared schedule."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from firmware_sim import limits
from monitor.declaration.schedules import Schedule

__all__ = ["at_full_rate", "schedule_of"]


def schedule_of(scheduler: object, steps: int) -> Schedule | None:
    """The factors of each step's learning rate as a table; None where they are not one list of factors."""
    if not isinstance(scheduler, LambdaLR) or not 1 <= steps <= limits.SCHEDULE.most:
        return None
    tables = {tuple(float(factor(step)) for step in range(steps)) for factor in scheduler.lr_lambdas}
    return Schedule.of("table", factors=tables.pop()) if len(tables) == 1 else None


@contextlib.contextmanager
def at_full_rate(optimizer: Any) -> Iterator[None]:
    """Show the learning rates that the factors apply to, not those of the first step."""
    now = [group["lr"] for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = group.get("initial_lr", group["lr"])
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, now, strict=True):
            group["lr"] = rate
