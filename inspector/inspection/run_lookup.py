"""The runs that an inspection is given: each is known by what it is and who signed it, whatever its folder is called.

Names of folders are for the eye. Their labs distinguish two that are alike, then by the beginnings of their ids,
and by their places among the arguments where no known party has signed them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from firmware_sim import limits
from firmware_sim.errors import EvidenceError, Unreadable
from inspector.inspection.forks import signer_of
from inspector.inspection.trust import Trust
from monitor.transcript import RunFolder
from monitor.transcript.export import handed_over
from monitor.transcript.layout import MANIFEST

__all__ = ["GivenRun", "given_runs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRun:
    """A run folder that was given: the run, or why it could not be opened.

    Attributes:
        where: ``run`` for the eye, and as far as a registered lab has signed its head ``run_id`` and ``lab``: no one
            else is to blame for what is found of it.
    """

    where: dict[str, str]
    found: RunFolder | EvidenceError | Unreadable

    def open(self) -> RunFolder:
        """The run; EvidenceError or Unreadable where it could not be opened."""
        if not isinstance(self.found, RunFolder):
            raise self.found
        return self.found


def given_runs(folders: Sequence[Path], trust: Trust, open_folder: Callable[[Path], RunFolder]) -> list[GivenRun]:
    """Open runs, and name them so that no two are called alike.

    Raises:
        CallerError: there is no such folder.
    """
    found = [_opened(folder, open_folder) for folder in folders]
    known = [_signed(folder, each, trust) for folder, each in zip(folders, found, strict=True)]
    names = [folder.name for folder in folders]
    signs = [
        [f" of {each['lab']}" if each else "" for each in known],
        [f" ({each['run_id'][:8]}…)" if each else "" for each in known],
        [f" (run {place} of {len(folders)})" for place in range(1, len(folders) + 1)],
    ]
    for sign in signs:
        alike = Counter(names)
        names = [name + more if alike[name] > 1 else name for name, more in zip(names, sign, strict=True)]
    for name, each in zip(names, found, strict=True):
        if isinstance(each, RunFolder):
            each.name = name
    return [
        GivenRun(where={"run": name, **who}, found=each) for name, who, each in zip(names, known, found, strict=True)
    ]


def _opened(folder: Path, open_folder: Callable[[Path], RunFolder]) -> RunFolder | EvidenceError | Unreadable:
    try:
        return open_folder(folder)
    except (EvidenceError, Unreadable) as error:
        return error


def _signed(folder: Path, found: RunFolder | EvidenceError | Unreadable, trust: Trust) -> dict[str, str]:
    """Id and lab of a run, by its head alone where the rest cannot be read; nothing if no known lab signed."""
    if isinstance(found, RunFolder):
        return {"run_id": found.manifest.run, "lab": found.metadata.lab}
    try:
        lab, manifest = signer_of(limits.read_file(folder / MANIFEST, limits.MANIFEST_BYTES), trust)
    except (OSError, EvidenceError):
        handed = handed_over(folder, trust.labs)
        return {} if handed is None else {"run_id": handed.run, "lab": handed.lab}
    return {"run_id": manifest.run, "lab": lab}
