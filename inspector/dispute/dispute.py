"""Runs in this process as parties of a game or a tournament (``referee`` and ``tournament`` state their laws)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from firmware_sim.errors import CallerError
from firmware_sim.evidence import SigningKey
from inspector.dispute.arena import play_tournament
from inspector.dispute.game import Party, Terms, play
from inspector.dispute.prover import SigningProver
from inspector.dispute.provider import desk_of
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Verdict
from inspector.wire.desk import Local
from monitor.transcript import RunFolder

__all__ = ["Disputant", "play_here", "settle", "settle_all"]

_SECONDS = 0
"""A party in this process has no deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disputant:
    """One lab's run: the verified folder, and the party that answers for it."""

    run: RunFolder
    prover: SigningProver


def settle(first: Disputant, second: Disputant, trust: Trust | None = None) -> Verdict:
    """Settle the dispute; the verdict's evidence holds what ``Referee.play`` says.

    Args:
        trust: what lab and inspector agreed on; runs without a recipe need it.

    Raises:
        CallerError: both are one run.
    """
    return play_here(first, second, trust)[0]


def play_here(first: Disputant, second: Disputant, trust: Trust | None, *, branching: int = 2) -> tuple[Verdict, bytes]:
    """The same, with the game's evidence, which is signed by a referee's key that is made for it."""
    referee, now = SigningKey.generate(), datetime.now(UTC)
    with _seated([first, second], referee) as parties:
        return play(parties, trust, referee, seconds=_SECONDS, now=now, branching=branching)


def settle_all(disputants: Sequence[Disputant], trust: Trust | None, *, branching: int = 2) -> tuple[Verdict, bytes]:
    """A tournament between several runs (``Tournament.play``), and its evidence; CallerError as above."""
    referee, now, terms = SigningKey.generate(), datetime.now(UTC), Terms(seconds=_SECONDS, branching=branching)
    with _seated(disputants, referee) as parties:
        return play_tournament(parties, trust, referee, terms, now=now)


@contextmanager
def _seated(disputants: Sequence[Disputant], referee: SigningKey) -> Iterator[list[Party]]:
    """Parties that answer in this process; by the names of their folders, or where these are alike by their paths."""
    folders = [each.run.folder for each in disputants]
    if len({folder.resolve() for folder in folders}) != len(folders):
        raise CallerError("a run cannot be in dispute with itself")
    names = [folder.name for folder in folders]
    if len(set(names)) != len(names):
        names = list(map(str, folders))
    with TemporaryDirectory() as place:
        parties = []
        for number, (name, each) in enumerate(zip(names, disputants, strict=True)):
            others = [other.run for other in disputants if other is not each]
            desk = desk_of(each.run, each.prover, Path(place, str(number)), [referee.verifying], others)
            parties.append(Party(name=name, key=each.prover.key.verifying, transport=Local(desk)))
        yield parties
