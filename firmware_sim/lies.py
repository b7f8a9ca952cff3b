"""How a lie is described: once, next to the code that tells it (`firmware_sim.dishonest_chips`, `monitor.lab`)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from firmware_sim.errors import CallerError

__all__ = ["Chance", "Lie", "Scenery", "find_lie"]


class Chance(enum.Enum):
    """The law by which one inspection catches a lie; a lying chip is the lab's first."""

    ALWAYS = "always"
    NEVER = "never: what no evidence covers, or no draw reaches"
    STEP = "where the segment of the lie's step is replayed"
    REST = "where a segment from the lie's step on is replayed"
    HELD = "where a snapshot falls into idle ticks in which all chips hold another model"
    SHOWN = "where a snapshot shows the stale state, or what follows from it"
    CHIP = "where the lying chip is drawn"
    SNAPSHOT = "where the lying chip is drawn and a snapshot is due"
    SECOND_SNAPSHOT = "where the lying chip is drawn and two snapshots are due"
    HALF = "where one of the second half of the chips is drawn"
    APART = "one inspection of one run does not decide it"


class Scenery(enum.Enum):
    """What a lab records to tell a lie."""

    RUN = "any run"
    EVALUATIONS = "a loop with evaluations"
    PRESET = "a preset, whose data it replaces"
    TWO_RUNS = "two runs on the same chips"
    HANDED_OVER = "any run; the lie is in what is handed over, and no guard finds it"
    APART = "more than one recording; tests tell it by themselves"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lie:
    """One lie of a chip or a lab (Shavit 2023, sections 3 to 5).

    Attributes:
        name: as a command line takes it.
        text: what the liar does, in one line.
        chance: how often one inspection should catch it.
        found_by: names of the guards of an inspection (`inspector.inspection.guards`) that see it: at least one gives
            the reason, and with all of them off the lie passes. None are named where no guard can be off.
        scenery: what it takes to tell it.
        options: of the recording that it takes, as a recorder names them.
        aliases: earlier names.
    """

    name: str
    text: str
    chance: Chance
    found_by: frozenset[str] = frozenset()
    scenery: Scenery = Scenery.RUN
    options: Mapping[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()


_AnyLie = TypeVar("_AnyLie", bound=Lie)


def find_lie(lies: Mapping[str, _AnyLie], name: str) -> _AnyLie:
    """Return the lie of that name, or of that earlier name; CallerError with the names that exist."""
    for lie in lies.values():
        if name == lie.name or name in lie.aliases:
            return lie
    raise CallerError(f"unknown lie {name!r:.100}; there are {', '.join(lies)}")
