"""The table of what a lab can do: each action is a name and a number from which it draws its details."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.adversary.world import World

__all__ = ["ACTIONS", "PHASES", "Action", "action", "perform"]

Body = Callable[[World, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing that a lab does.

    Attributes:
        phase: when: ``before`` the run, ``training`` or ``finished``.
        rows: rows of the lies that it may tell; empty for an honest or merely odd action.
        kinds: the kinds of run in which it can be done.
        honest: whether an honest lab may do it.
    """

    name: str
    phase: str
    body: Body
    rows: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("loop", "preset")
    honest: bool = False


ACTIONS: dict[str, Action] = {}


def action(
    phase: str, *rows: str, kinds: tuple[str, ...] = ("loop", "preset"), honest: bool = False
) -> Callable[[Body], Body]:
    """Enter a function into the table under its own name."""

    def enter(body: Body) -> Body:
        ACTIONS[body.__name__] = Action(
            name=body.__name__, phase=phase, body=body, rows=rows, kinds=kinds, honest=honest
        )
        return body

    return enter


PHASES = ("before", "training", "finished")
"""Of a run, in their order."""


def perform(world: World, name: str, pick: int) -> bool:
    """Let the lab do it, after whatever must come before; tells whether the action had its place there."""
    entry = ACTIONS[name]
    if world.scene.kind not in entry.kinds or PHASES.index(entry.phase) < PHASES.index(world.phase):
        return False
    world.advance(entry.phase)
    if entry.phase == "training":
        entry.body(world, pick)
    else:
        try:
            world.attempt(lambda: entry.body(world, pick))
        except (OSError, LookupError, ValueError) as error:  # what the lab wanted to edit is not there
            world.refused.append(str(error))
    return True
