"""What one lab may take up on another party's disk in a round, so that no lab takes the space of the others."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from firmware_sim import limits
from firmware_sim.errors import EvidenceError
from inspector.inspection.trust import Trust, signer_of
from inspector.inspection.verdict import Reason
from inspector.rounds.world import World
from monitor.files import write_whole

__all__ = ["BUDGET", "LEAST", "Budget", "OverBudget", "Spending", "clear", "forget", "no_room", "note"]

LEAST = limits.BUNDLE_BYTES.most
"""Bytes of the longest message: whose head or answer is refused counts as silent, so there is room for one."""

BUDGET = "budget"
"""Guard of runs for which a party had no room."""

_NOTES = "over-budget"


class OverBudget(EvidenceError):
    """A lab's messages and runs take up more than one lab may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Of each lab in a round.

    Attributes:
        bytes: of messages and opened runs together; None for an equal share of what the disk has free, of which one
            more share stays free, and for ``LEAST`` at least.
        files: of opened runs.
    """

    bytes: int | None = None
    files: int = 1 << 20

    def spending(self, world: World, party: str, lab: str) -> Spending:
        """What a lab has taken up so far in the newest round by its messages, and what it may at most."""
        home, pattern = world.home(party), f"{world.round:04d}-*"
        places = [home / name / lab for name in ("inbox", "held")]
        sizes = [path.stat().st_size for place in places for path in place.glob(pattern)]
        most = self.bytes
        if most is None:
            share = (shutil.disk_usage(home).free + sum(sizes)) // (len(world.trust().labs) + 1)
            most = max(share, LEAST)
        return Spending(lab=lab, most_bytes=most, most_files=self.files, bytes=sum(sizes))


@dataclass(slots=True, kw_only=True)
class Spending:
    """Counts what comes from one lab.

    Attributes:
        bytes: so far.
    """

    lab: str
    most_bytes: int
    most_files: int
    bytes: int = 0
    _files: set[Path] = field(default_factory=set)

    def take(self, path: Path, length: int) -> None:
        """Count a file, each place once; OverBudget, before anything of it comes, where that is too much."""
        if path in self._files:
            return
        if len(self._files) >= self.most_files:
            raise OverBudget(
                f"{self.lab} opens more files than the {self.most_files} that this party takes from one lab"
            )
        self.hold(length)
        self._files.add(path)

    def hold(self, length: int) -> None:
        """Count so many bytes; OverBudget where that is too much."""
        if (total := self.bytes + length) > self.most_bytes:
            raise OverBudget(
                f"the files of {self.lab} would take {total} bytes in this round, but this party takes at most "
                f"{self.most_bytes} from one lab"
            )
        self.bytes += length


def note(world: World, party: str, head: str, why: str) -> None:
    """Keep, for the verdict of this round, that a run was not fetched: there was no room for it here."""
    folder = world.home(party) / _NOTES
    folder.mkdir(exist_ok=True)
    write_whole(folder / f"{world.round:04d}-{head}", why.encode())


def forget(world: World, party: str, head: str) -> None:
    """Take the note back: the run has come whole."""
    (world.home(party) / _NOTES / f"{world.round:04d}-{head}").unlink(missing_ok=True)


def no_room(world: World, party: str, heads: Sequence[bytes], trust: Trust) -> list[Reason]:
    """Which of these runs were not fetched in this round, which is no refusal of their labs."""
    notes = (world.home(party) / _NOTES).glob(f"{world.round:04d}-*")
    why = {path.name.partition("-")[2]: path for path in notes}
    found = []
    for head in heads:
        digest = hashlib.sha256(head).hexdigest()
        if digest in why:
            lab, manifest = signer_of(head, trust)
            text = (
                f"run {manifest.run[:16]}… could not be fetched completely: {why[digest].read_text(encoding='utf-8')}"
            )
            found.append(Reason(guard=BUDGET, text=text, where={"lab": lab, "run_id": manifest.run}))
    return found


def clear(incoming: Path, number: int) -> None:
    """Delete drafts of runs that came in earlier rounds, and were never whole."""
    with os.scandir(incoming) as entries:
        for each in entries:
            if each.is_dir(follow_symlinks=False) and not each.name.startswith(f"{number:04d}-"):
                shutil.rmtree(each.path, ignore_errors=True)
