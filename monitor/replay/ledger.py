"""A chip's ledger: to which run, and to which kind of work, all belongs that its meter has counted.

Between two records of its log a chip works for the run whose memory was attached last, and for no other. What the meter
counts is each declared step once, and in addition what no one can replay: steps that were repeated after a boot,
operators outside programs, what ran behind the last step, and up to a step at each power cut. Nor can anybody tell
whether calls ran whose results a program neither commits nor reads. That is *slack*: it could have been any work.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from itertools import accumulate

from firmware_sim import BIRTH, NO_RUN, NO_WORK, LogCheckpoint, LogRecord, RecordKind, Roofline, Unaudited, Work
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import NEWBORN, Standing
from monitor.declaration.statement import Declaration
from monitor.replay.steps import execution_of
from monitor.transcript import WRITE, Leaf

__all__ = [
    "EXCUSED_FLOP",
    "SLACK",
    "Book",
    "Kind",
    "Ledger",
    "Needs",
    "attached_from",
    "excused_work",
    "ledger_error",
    "needs_of",
    "total",
]


class Kind(StrEnum):
    """Kinds of work."""

    DECLARED = "declared"
    """Programs of training steps, each once."""
    EVALUATIONS = "evaluations"
    """Programs of evaluations, and of what loops do between steps, each once."""
    DEAD = "dead"
    """Work of either whose results nothing used that was committed or read: no replay tells whether it was done."""
    REPEATS = "repeats"
    """Steps that were committed before, again after a boot."""
    BACK = "back"
    """Those of them before the checkpoint to which a boot has to go back."""
    OUTSIDE = "beside"
    """Operators outside programs that a step reports."""
    BEHIND = "behind"
    """Operators behind a step of which no later one tells."""
    CUTS = "cuts"
    """A part of a step, at each power cut."""
    UNEXPLAINED = "unexplained"
    """What no honest host makes a chip do."""


SLACK = tuple(Kind)[2:]
"""The kinds that no one can replay."""
EXCUSED_FLOP = 10**15
"""What a boot repeats is excused up to so many FLOP, and what takes as long as these."""


def total(works: Iterable[Work]) -> Work:
    """The sum."""
    return sum(works, NO_WORK)


def _least(one: Work, other: Work) -> Work:
    return Work(min(one.calls, other.calls), min(one.flop, other.flop), min(one.moved, other.moved))


def attached_from(newest: int, every: int) -> int:
    """The step from which a boot has to go on, or a later one, where a chip has committed ``newest``.

    A checkpoint comes with the step after its own, of which the chip may not have heard; and it leaves out what the
    next step overwrites, so that only the state after that one is whole.
    """
    checkpoint = max(newest - 2, 0) // every * every
    return checkpoint + (checkpoint > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the steps of one run need of one of its chips.

    Attributes:
        share: the chip's bytes of the state, and those of all its chips.
        program: work of a committed step's program on all of them together.
        dead: the part of it whose results are used for nothing that the step commits or reads.
        outside: of the operators outside programs that it reports.
        trains: whether it is a training step; an evaluation is none, nor is a write between steps.
        most: the highest counts of any program of the run.
        made: bytes of all results of a committed step on all of them together.
        allowed: work on the state that no program explains, after a committed step.
        every: steps from one checkpoint to the next.
        steps: how many are committed.
    """

    share: tuple[int, int]
    program: Callable[[int], Work]
    most: Work
    made: Callable[[int], int]
    dead: Callable[[int], Work] = lambda step: NO_WORK
    outside: Callable[[int], Work] = lambda step: NO_WORK
    trains: Callable[[int], bool] = lambda step: True
    allowed: Callable[[int], Work] = lambda step: NO_WORK
    every: int = 1
    steps: int = 0

    def of(self, step: int) -> Work:
        """All work of a committed step on all chips together."""
        return self.program(step) + self.outside(step)

    def excused(self, roofline: Roofline) -> Work:
        """The most of one boot's repeats, and of the cut before them, that counts against no limit, on this chip."""
        trained = [step for step in range(1, self.steps + 1) if self.trains(step)] or range(1, self.steps + 1)
        most = excused_work(total(map(self.program, trained)), len(trained), self.every, self.steps)
        _, longest = roofline.least(roofline.time(Work(0, EXCUSED_FLOP, 0)))
        return _least(most, Work(most.calls, EXCUSED_FLOP, longest)).share(*self.share)


def excused_work(declared: Work, trained: int, every: int, steps: int) -> Work:
    """What one boot may repeat: the steps of a segment, or all of a shorter run, and two more of mean size.

    Args:
        declared: of so many training steps together.
        every: steps from one checkpoint to the next.
        steps: how many are committed.
    """
    times = min(every, steps) + 2
    counts = (count * times // max(trained, 1) for count in (declared.calls, declared.flop, declared.moved))
    return Work(*counts)


def _no_writes(leaves: Sequence[Leaf]) -> list[int]:
    """Of each step itself, or where it is a write the newest one before it that is none."""
    kept: list[int] = []
    for leaf in leaves:
        kept.append(kept[-1] if leaf.kind == WRITE and kept else leaf.step)
    return kept


def needs_of(
    declared: Declaration,
    share: tuple[int, int],
    leaves: Sequence[Leaf],
    works: Mapping[str, Work],
    dead: Mapping[str, Work],
    made: Mapping[str, int] | None = None,
) -> Needs:
    """What a run's steps need of a chip with a share of its state.

    Args:
        leaves: steps 0 … committed.
        works: what each program's calls are for a meter.
        dead: the part of it whose results are used for nothing that a step commits or reads.
        made: bytes of all results of each program's calls.
    """
    last = len(leaves) - 1
    trained = [leaf.step for leaf in leaves[1:] if leaf.trains]
    totals = list(accumulate((execution_of(leaf).outside for leaf in leaves[1:]), initial=NO_WORK))
    allowance = declared.allowance

    def allowed(step: int) -> Work:
        """What is left of the allowance that began with the last training step."""
        step = min(step, last)
        begun = step if not trained else trained[at - 1] if (at := bisect_right(trained, step)) else 0
        return allowance.left(totals[step] - totals[begun])

    def named(step: int) -> str | None:
        return execution_of(leaves[step]).program if 0 < step <= last else None

    kept = _no_writes(leaves)

    def results(step: int) -> int:
        """A write follows a step whose results are still there."""
        names = {named(step), named(kept[step])} if 0 < step <= last else set()
        return sum(made[name] for name in names if name is not None) if made is not None else 0

    counts = list(zip(*map(astuple, works.values()), strict=True))
    return Needs(
        share=share,
        program=lambda step: NO_WORK if (name := named(step)) is None else works[name],
        dead=lambda step: NO_WORK if (name := named(step)) is None else dead[name],
        outside=lambda step: execution_of(leaves[step]).outside if 0 < step <= last else NO_WORK,
        trains=frozenset(trained).__contains__,
        made=results,
        most=Work(*map(max, counts)) if counts else NO_WORK,
        allowed=allowed,
        every=declared.checkpoint_every,
        steps=last,
    )


@dataclass(slots=True, kw_only=True)
class Book:
    """What a chip's meter has counted of one run.

    Attributes:
        counts: by kind.
        restarts: the two largest amounts of a power cut and of the repeats in the boot after it.
        restart: the same since the run's memory was attached last.
    """

    counts: dict[Kind, Work] = field(default_factory=lambda: dict.fromkeys(Kind, NO_WORK))
    restarts: list[Work] = field(default_factory=list)
    restart: Work = NO_WORK

    def add(self, kind: Kind, work: Work) -> None:
        """Book some work."""
        self.counts[kind] += work
        if kind in (Kind.REPEATS, Kind.CUTS):
            self.restart += work

    def close(self) -> None:
        """The run's memory is attached no more."""
        self.restarts, self.restart = self.largest(), NO_WORK

    def largest(self, most: Work | None = None) -> list[Work]:
        """The two largest restarts, each of them no more than ``most``."""
        every = [each if most is None else _least(each, most) for each in (*self.restarts, self.restart)]
        return sorted((each for each in every if each != NO_WORK), key=lambda work: (work.moved, work.flop))[:-3:-1]

    def share(self, most: Work) -> float:
        """Its slack as the larger share of what was declared, without what two restarts are excused, each ``most``."""
        rest, measure = self.slack.left(total(self.largest(most))), self.measure
        pairs = ((rest.flop, measure.flop), (rest.moved, measure.moved))
        return max((some / whole if whole else math.inf for some, whole in pairs if some), default=0.0)

    @property
    def slack(self) -> Work:
        """What could have been anything."""
        return total(self.counts[kind] for kind in SLACK)

    @property
    def measure(self) -> Work:
        """What slack is compared with: the training steps, or in a run that has none its recorded steps."""
        trained = self.counts[Kind.DECLARED]
        return self.counts[Kind.EVALUATIONS] if trained == NO_WORK else trained

    def to_works(self) -> tuple[Work, ...]:
        """What ``from_works`` reads."""
        padded = [*self.restarts, NO_WORK, NO_WORK][:2]
        return (*self.counts.values(), *padded, self.restart)

    @classmethod
    def from_works(cls, works: Sequence[Work]) -> Book:
        """A book that was kept; EvidenceError if it has another length. One of before knew no dead work."""
        if len(works) == len(Kind) + 2:
            at = list(Kind).index(Kind.DEAD)
            works = [*works[:at], NO_WORK, *works[at:]]
        if len(works) != len(Kind) + 3:
            raise EvidenceError("the ledger in a log checkpoint is malformed")
        *counts, first, second, restart = works
        kept = [each for each in (first, second) if each != NO_WORK]
        return cls(counts=dict(zip(Kind, counts, strict=True)), restarts=kept, restart=restart)


class Ledger:
    """Reads a chip's records one by one, and books what its meter counts between them.

    Between any two commits the meter counts what the step of the second one needs, no more and no less: its program's
    work, and what the lab says that other operators did before it. Between a commit and another record, such as a
    quote, there may have been some of these, of which the next commit would tell; and before a snapshot a part of the
    step.

    Memory is attached when it holds the state of the step that is committed next, so that this one needs no more work
    of the chip: it is step 0, or one that the chip has heard of before. What the meter counts while the chip holds no
    declared run's memory is explained by nothing. A meter that is off is reported once, until memory is attached again.

    Args:
        runs: the declared runs in which the chip takes part, by run id.

    Attributes:
        books: by run id.
        repeated: snapshots, by record number, that were taken while steps were repeated.
    """

    def __init__(
        self, chip: str, runs: Mapping[bytes, Needs], since: LogCheckpoint = BIRTH, standing: Standing = NEWBORN
    ) -> None:
        self._chip = chip
        self._runs = runs
        self._heard = {run: heard.most for run, heard in standing.runs.items()}
        self.books = {run: Book.from_works(works) for run, works in standing.books.items()}
        self.repeated: set[int] = set()
        self._newest_of: bytes | None = None  # the run that committed a step last of which the chip had not heard
        needs, newest = runs.get(standing.attached), standing.newest
        self._since_boot()
        self._before = Work.from_bytes(since.work) if needs is None else standing.before
        self._run, self._needs = standing.attached, needs
        if needs is not None and newest is not None and standing.counted is not None:
            self._needed = total(map(needs.of, range(standing.counted, newest + 1)))
            self._is_first, self._newest = False, newest
            self._from = attached_from(self._heard[self._run], needs.every)
            self._excess = Work.from_bytes(since.work).left(self._expected)

    def _since_boot(self) -> None:
        self._before = self._needed = NO_WORK  # of the chip when its memory was attached; of the steps since then
        self._run, self._needs = NO_RUN, None
        self._newest, self._from = 0, 0
        self._excess = NO_WORK
        self._is_first, self._is_off = True, False

    @property
    def _share(self) -> tuple[int, int]:
        return (1, 1) if self._needs is None else self._needs.share

    @property
    def _expected(self) -> Work:
        """What the meter has to count by now."""
        return self._before + self._needed.share(*self._share)

    def _most(self, *more: Work) -> Work:
        """What it counts at most, with so much more on all chips together."""
        return self._before + (self._needed + total(more)).share(*self._share)

    def _book(self) -> Book:
        return self.books.setdefault(self._run, Book())

    def _take_step(self, kind: Kind, work: Work) -> None:
        before = self._expected
        self._needed += work
        self._book().add(kind, self._expected - before)

    def take(self, record: LogRecord) -> None:
        """Check one record; EvidenceError says how far the meter is from what was needed.

        Unaudited: the power went in a step of which nothing is known but that it was longer than any other; or what
        ran behind the last step of a run did so after another run had gone on.
        """
        if record.kind is RecordKind.BOOT:
            problem = self._settle()
            self._since_boot()
            self._count(record)
            if problem:
                raise Unaudited(f"chip {self._chip}, record {record.counter}: {problem}")
            return
        if record.kind is RecordKind.COMMIT and record.run_id == self._run and self._needs is not None:
            self._commit(record.step, self._needs)
        self._count(record)

    def close(self) -> None:
        """Book what ran behind the last record's step: nothing reports it yet."""
        self._settle()

    def _settle(self) -> str:
        """Memory is attached no more: what its run did behind its last step, no step tells. Returns what is odd."""
        excess, self._excess = self._excess, NO_WORK
        if excess != NO_WORK:
            self._book().add(Kind.UNEXPLAINED if self._is_off else Kind.BEHIND, excess)
        if self._run in self.books:
            self._book().close()
        if excess == NO_WORK or self._is_off or self._newest_of in (None, self._run):
            return ""
        return (
            f"its meter had counted {excess} after step {self._newest} of a run, when another run had already continued"
        )

    def _cut(self) -> None:
        """The power went: what ran since the last record's step was a part of the next one."""
        excess = self._excess
        if self._run in self.books:
            self._book().close()
        if excess != NO_WORK:
            self._book().add(Kind.CUTS, excess)
        self._since_boot()

    def _commit(self, step: int, needs: Needs) -> None:
        heard = self._heard.get(self._run, 0)
        if self._is_first and step <= heard:
            self._from = attached_from(heard, needs.every)  # memory holds that step's state already
        elif step <= heard:
            self._take_step(Kind.BACK if step <= self._from else Kind.REPEATS, needs.of(step))
        else:
            self._newest_of = self._run
            dead = needs.dead(step)
            self._take_step(Kind.DECLARED if needs.trains(step) else Kind.EVALUATIONS, needs.program(step).left(dead))
            self._take_step(Kind.DEAD, dead)
            self._take_step(Kind.OUTSIDE, needs.outside(step))
        self._heard[self._run] = max(heard, step)
        self._newest, self._is_first = step, False

    def _count(self, record: LogRecord) -> None:
        needs, kind, expected, found = self._needs, record.kind, self._expected, record.work
        longest = expected if needs is None else self._most(needs.most, needs.allowed(self._newest))
        if kind is RecordKind.SNAPSHOT:
            if self._newest < self._heard.get(self._run, 0):
                self.repeated.add(record.counter)
            if expected <= found <= longest:
                return  # in the middle of a step, of which the next commit tells
        fits = found == expected
        if not fits and kind is not RecordKind.COMMIT and needs is not None:
            fits = expected <= found <= self._most(needs.allowed(self._newest))
        was_off, self._is_off = self._is_off, not fits
        self._excess = found.left(expected)
        if kind is RecordKind.POWER_GAP:
            self._cut()
            if not was_off and not expected <= found <= longest:
                raise Unaudited(
                    f"chip {self._chip}, record {record.counter}: when the power failed, its meter had counted "
                    f"{found - expected} since the last committed step, which is more than any step needs"
                )
            return
        problem = ""
        if kind is RecordKind.REGIONS:
            problem = self._settle()
            self._before, self._needed, self._is_first, self._is_off = found, NO_WORK, True, False
            self._run, self._needs, self._newest = record.run_id, self._runs.get(record.run_id), record.step
        if fits and problem:
            raise Unaudited(f"chip {self._chip}, record {record.counter}: {problem}")
        if fits or was_off:
            return
        raise ledger_error(self._chip, record, _compared(found, expected))


def _compared(found: Work, needed: Work) -> str:
    counted = f"the meter counts {found}"
    if needed <= found:
        counted = f"the meter counts another {found - needed}"
    elif found <= needed:
        counted = f"the meter lacks {needed - found}"
    return f"the committed steps need {needed}; {counted}"


def ledger_error(chip: str, record: LogRecord, what: str) -> EvidenceError:
    """A finding about one record."""
    return EvidenceError(f"chip {chip}, record {record.counter}: {what}")
