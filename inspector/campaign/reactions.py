"""How a lab that watches the inspections changes its run: control variables that both engines obey.

All arrays have one entry for each trial, so the same code drives one world of agents and a thousand aggregated ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from inspector.campaign.checks import at_least, at_most, whole

__all__ = ["Control", "HideInInspected", "PauseWhenDrawn", "QuitWhenDrawn", "Reaction", "ShrinkWhenDrawn"]

FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class Control:
    """The lab's state for each trial.

    Attributes:
        clock: days of the original plan that are done.
        scale: share of the planned chips at work; the plan advances at this speed.
        pause: periods left to wait.
        stopped: the run was given up.
        drawn: involved chips drawn so far.
    """

    clock: FloatArray
    scale: FloatArray
    pause: IntArray
    stopped: NDArray[np.bool_]
    drawn: IntArray

    @classmethod
    def fresh(cls, trials: int) -> Control:
        """Return the state at day 0."""
        return cls(
            clock=np.zeros(trials),
            scale=np.ones(trials),
            pause=np.zeros(trials, np.int64),
            stopped=np.zeros(trials, np.bool_),
            drawn=np.zeros(trials, np.int64),
        )

    def take(self, index: IntArray) -> Control:
        """Return the states at ``index``."""
        return Control(
            clock=self.clock[index],
            scale=self.scale[index],
            pause=self.pause[index],
            stopped=self.stopped[index],
            drawn=self.drawn[index],
        )

    def advance(self, period_days: float) -> FloatArray:
        """Return the days of plan that the coming period does; 0 where the lab pauses or has stopped."""
        working = (self.pause == 0) & ~self.stopped
        return np.where(working, self.scale * period_days, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction(ABC):
    """A rule applied after each inspection that did not end the run."""

    @property
    def hides_in_inspected(self) -> bool:
        """Whether the work moves to chips that were inspected already."""
        return False

    @abstractmethod
    def react(self, control: Control, hits: IntArray) -> None:
        """Change ``control`` in place after an inspection that drew ``hits`` involved chips."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseWhenDrawn(Reaction):
    """After an involved chip was drawn, no work for ``periods`` periods."""

    periods: int = 1

    def __post_init__(self) -> None:
        whole("pause-when-drawn.periods", self.periods, 1)

    def react(self, control: Control, hits: IntArray) -> None:
        control.pause[:] = np.where(hits > 0, self.periods, np.maximum(control.pause - 1, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class QuitWhenDrawn(Reaction):
    """The run is given up once ``limit`` involved chips were drawn in total."""

    limit: int = 1

    def __post_init__(self) -> None:
        whole("quit-when-drawn.limit", self.limit, 1)

    def react(self, control: Control, hits: IntArray) -> None:
        control.stopped |= control.drawn >= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkWhenDrawn(Reaction):
    """After an inspection that drew involved chips, the run goes on with 1/factor of its chips, and so more slowly."""

    factor: float = 2.0

    def __post_init__(self) -> None:
        at_least("shrink-when-drawn.factor", self.factor, 1)
        at_most("shrink-when-drawn.factor", self.factor, 1e6)

    def react(self, control: Control, hits: IntArray) -> None:
        control.scale[hits > 0] /= self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class HideInInspected(Reaction):
    """The work moves to inspected chips, which pays only where a chip is never drawn twice (``redraw = false``)."""

    @property
    def hides_in_inspected(self) -> bool:
        return True

    def react(self, control: Control, hits: IntArray) -> None:
        return None
