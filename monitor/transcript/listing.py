"""The files of a run by path: looked up in the record of the journal that a path belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from firmware_sim.errors import EvidenceError
from monitor.programs.program import MAXIMUM_PROGRAMS
from monitor.transcript.journal import Journal
from monitor.transcript.layout import CREATION, closing_record, is_allowed, program_of, program_path, record_of
from monitor.transcript.record import Entry

__all__ = ["Listing"]

_PROGRAM = b'"programs/'


class Listing(Mapping[str, Entry]):
    """Entry of each file that a run holds; none is kept in memory.

    Args:
        steps: number of the last step that the manifest counts.
        absent: tells of a listed file that the run does not hold, and need not.
        check: called with every entry that is looked up; EvidenceError if it is longer than it may be.
    """

    def __init__(
        self, journal: Journal, steps: int, absent: Callable[[str], bool], check: Callable[[str, Entry], None]
    ) -> None:
        self._journal = journal
        self._steps = steps
        self._absent = absent
        self._check = check
        self._programs: dict[str, int] | None = None

    def __getitem__(self, path: str) -> Entry:
        entry = self.listed(path)
        if entry is None or self._absent(path):
            raise KeyError(path)
        self._check(path, entry)
        return entry

    def __iter__(self) -> Iterator[str]:
        for record in self._journal:
            yield from (path for path in record.files if not self._absent(path))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def listed(self, path: str) -> Entry | None:
        """Entry of a file that the journal lists, held or not."""
        index = self.record_of(path)
        return None if index is None else self._journal.record(index).files.get(path)

    def record_of(self, path: str) -> int | None:
        """Number of the one record in which a path may be listed; None if the run has no such record."""
        if not is_allowed(path):
            return None
        index, closing = record_of(path), closing_record(self._steps)
        program = program_of(path)
        if program is not None:
            index = self.programs.get(program_path(program), closing)
        elif path.startswith("chips/"):
            index = closing
        elif index is None:
            index = CREATION
        return index if index < len(self._journal) else None

    @property
    def programs(self) -> Mapping[str, int]:
        """The record in which each program is first listed; EvidenceError if there are too many."""
        if self._programs is None:
            found: dict[str, int] = {}
            last = len(self._journal) - 1
            hints = self._journal.find(_PROGRAM)
            for index in hints if hints[-1:] == [last] else [*hints, last]:
                for path in self._journal.record(index).files:
                    if path.startswith("programs/"):
                        found.setdefault(path, index)
                if len(found) > MAXIMUM_PROGRAMS:
                    raise EvidenceError(f"a run has at most {MAXIMUM_PROGRAMS} programs, not {len(found)}")
            self._programs = found
        return self._programs
