"""Two finished runs in this process, as parties of a game (``referee`` states its law)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory

from firmware_sim.errors import CallerError
from firmware_sim.evidence import SigningKey
from inspector.dispute.game import Party, play
from inspector.dispute.prover import SigningProver
from inspector.dispute.provider import Provider
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Verdict
from inspector.wire.desk import Desk, Local
from monitor.transcript import RunFolder

__all__ = ["Disputant", "play_here", "settle"]

_SECONDS = 0
"""A party in this process has no deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disputant:
    """One lab's finished run: the verified folder, and the party that answers for it."""

    run: RunFolder
    prover: SigningProver


def settle(first: Disputant, second: Disputant, trust: Trust | None = None) -> Verdict:
    """Settle the dispute; the verdict's evidence holds what ``Referee.play`` says.

    Args:
        trust: what lab and inspector agreed on; runs without a recipe need it.

    Raises:
        CallerError: the runs are not of the same task, or not both finished.
    """
    return play_here(first, second, trust)[0]


def play_here(first: Disputant, second: Disputant, trust: Trust | None) -> tuple[Verdict, bytes]:
    """The same, with the game's evidence, which is signed by a referee's key that is made for it."""
    folders = [disputant.run.folder for disputant in (first, second)]
    if folders[0].resolve() == folders[1].resolve():
        raise CallerError("a run cannot be in dispute with itself")
    names = [folder.name for folder in folders]
    if names[0] == names[1]:
        names = list(map(str, folders))
    referee = SigningKey.generate()
    with TemporaryDirectory() as place:
        parties = []
        for number, (name, each) in enumerate(zip(names, (first, second), strict=True)):
            provider = Provider(each.run, each.prover)
            desk = Desk(Path(place, str(number)), provider.answer, each.prover.key, [referee.verifying])
            parties.append(Party(name=name, key=each.prover.key.verifying, transport=Local(desk)))
        return play(parties, trust, referee, seconds=_SECONDS, now=datetime.now(UTC))
