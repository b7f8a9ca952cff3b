"""The learning rates of schedulers that other libraries bring, as a declared schedule."""

from __future__ import annotations

from firmware_sim.errors import CallerError
from monitor.declaration.schedules import Schedule

__all__ = ["schedule_of"]


def schedule_of(scheduler: object, steps: int) -> Schedule | None:
    """The schedule that a scheduler follows; None where its rates are not one list of factors."""
    try:
        return Schedule.of_scheduler(scheduler, steps=steps)
    except CallerError:
        return None
