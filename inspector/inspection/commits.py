"""What an honest host makes a chip write, and when: memory first, then each step's work and its head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from firmware_sim import (
    BIRTH,
    EMPTY_MEMORY,
    KEPT_BYTES,
    NO_RUN,
    NO_WORK,
    LogCheckpoint,
    LogPosition,
    LogRecord,
    Quote,
    RecordKind,
    Unaudited,
    Work,
)
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import NEWBORN, Roofline, Standing

__all__ = [
    "Beacons",
    "CommitOrder",
    "HeldResults",
    "Law",
    "MeteredWork",
    "Needs",
    "Pace",
    "SignsOfLife",
    "SnapshotMoment",
    "is_empty_snapshot",
]


def is_empty_snapshot(record: LogRecord) -> bool:
    """Tell whether a snapshot was taken of a chip without memory, for no run."""
    return record.digest == EMPTY_MEMORY.value and record.run_id == NO_RUN


class Law(Protocol):
    """Reads a chip's records one by one, from its birth or from a checkpoint on: `since`, or the host's `standing`."""

    def take(self, record: LogRecord) -> None:
        """Check one record; EvidenceError says what is wrong with it."""


class CommitOrder:
    """Reads a chip's records one by one and refuses those that an honest host would not have made it write.

    - A run's memory is attached once in each boot, before anything else is said of the run.
    - Heads come for step 0, 1, 2, … in this order. After a boot they may go back to a step that was committed before,
      since the run resumes from its last checkpoint.
    """

    def __init__(self, chip: str, standing: Standing = NEWBORN) -> None:
        self._chip = chip
        self._attached = {standing.attached} - {NO_RUN}
        self._last = {run: heard.last for run, heard in standing.runs.items()}
        self._resumed = set(self._last) - (set() if standing.newest is None else self._attached)

    def take(self, record: LogRecord) -> None:
        """Check one record; EvidenceError says what is out of order."""
        if record.kind is RecordKind.BOOT:
            self._attached.clear()
            self._resumed = set(self._last)
        elif record.kind is RecordKind.REGIONS:
            if record.run_id in self._attached:
                raise _error(self._chip, record, "the run's memory was attached again in the same boot")
            self._attached.add(record.run_id)
        elif record.kind is RecordKind.COMMIT:
            self._commit(record)

    def _commit(self, record: LogRecord) -> None:
        last = self._last.get(record.run_id, -1)
        resumes = record.run_id in self._resumed and record.step <= last
        self._resumed.discard(record.run_id)
        self._last[record.run_id] = record.step
        if record.run_id not in self._attached:
            raise _error(self._chip, record, f"step {record.step} was committed before the run's memory was attached")
        if record.step != last + 1 and not resumes:
            raise _error(self._chip, record, f"step {record.step} was committed after step {last}")


class SnapshotMoment:
    """A snapshot is evidence about the moment at which it was taken, which the host cannot choose.

    Its coordinate is the newest step that was committed in this boot, of the run whose memory was attached last. A
    chip without memory shows it for no run, and only before any memory was attached.
    """

    def __init__(self, chip: str, standing: Standing = NEWBORN) -> None:
        self._chip = chip
        self._attached = None if standing.attached == NO_RUN else standing.attached
        self._newest = {} if standing.newest is None else {standing.attached: standing.newest}

    def take(self, record: LogRecord) -> None:
        """Check one record; EvidenceError says which other moment a snapshot claims."""
        if record.kind is RecordKind.BOOT:
            self._attached = None
            self._newest.clear()
        elif record.kind is RecordKind.REGIONS:
            self._attached = record.run_id
        elif record.kind is RecordKind.COMMIT:
            self._newest[record.run_id] = record.step
        elif record.kind is RecordKind.SNAPSHOT:
            self._snapshot(record)

    def _snapshot(self, record: LogRecord) -> None:
        if self._attached is None:
            if not is_empty_snapshot(record):
                raise _error(self._chip, record, "a snapshot shows memory that was not attached in this boot")
        elif record.run_id != self._attached:
            raise _error(self._chip, record, "a snapshot names another run than the one whose memory is attached")
        elif (newest := self._newest.get(record.run_id)) is None:
            raise _error(self._chip, record, f"step {record.step} was not committed before its snapshot")
        elif record.step != newest:
            raise _error(
                self._chip, record, f"the snapshot claims step {record.step}, but step {newest} was the newest then"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the steps of one run need of one of its chips.

    Attributes:
        share: the chip's bytes of the state, and those of all its chips.
        of: work of a committed step on all of them together.
        most: the highest counts of any program of the run.
        made: bytes of all results of a committed step on all of them together.
        allowed: work on the state that no program explains, after the newest committed step.
    """

    share: tuple[int, int]
    of: Callable[[int], Work]
    most: Work
    made: Callable[[int], int]
    allowed: Work = NO_WORK


class MeteredWork:
    """Between any two commits a chip's meter counts what the step of the second one needs, no more and no less.

    That is its program's work, and what the lab says that other operators did before it. Between a commit and another
    record, such as a quote, there may have been some of these, of which the next commit would tell; and before a
    snapshot a part of the step.

    Memory is attached when it holds the state of the step that is committed next, so that this one needs no more work
    of the chip: it is step 0, or one that the chip has heard of before. What the meter counts while the chip holds no
    declared run's memory is explained by nothing. A meter that is off is told of once, until memory is attached again.

    Args:
        runs: the declared runs in which the chip takes part, by run id.

    Attributes:
        untold: allowed work behind the last commit before the chip was shut down or got other memory; no step tells it.
        behind: the same behind the newest commit, of which a step may tell that is still to come.
    """

    def __init__(
        self, chip: str, runs: Mapping[bytes, Needs], since: LogCheckpoint = BIRTH, standing: Standing = NEWBORN
    ) -> None:
        self._chip = chip
        self._runs = runs
        self._heard = {run: heard.most for run, heard in standing.runs.items()}
        self.untold = self.behind = NO_WORK
        self._since_boot()
        needs, newest = runs.get(standing.attached), standing.newest
        self._before = Work.from_bytes(since.work) if needs is None else standing.before
        self._take_over(needs)
        if needs is not None and newest is not None and standing.counted is not None:
            self._needed = sum(map(needs.of, range(standing.counted, newest + 1)), NO_WORK)
            self._is_first = False

    def _since_boot(self) -> None:
        self._before = self._needed = NO_WORK  # of the chip when its memory was attached; of the steps since then
        self._take_over(None)
        self._is_first = True
        self._is_off = False

    def _take_over(self, needs: Needs | None) -> None:
        self._share = (1, 1) if needs is None else needs.share
        self._most, self._allowed = (NO_WORK, NO_WORK) if needs is None else (needs.most, needs.allowed)

    def take(self, record: LogRecord) -> None:
        """Check one record; EvidenceError says how far the meter is from what was needed.

        Unaudited: the power went in a step of which nothing is known but that it was longer than any other.
        """
        if record.kind in (RecordKind.BOOT, RecordKind.REGIONS):
            self.untold, self.behind = self.untold + self.behind, NO_WORK
        if record.kind is RecordKind.BOOT:
            self._since_boot()
        needs = self._runs.get(record.run_id)
        if record.kind is RecordKind.COMMIT and needs is not None:
            heard = self._heard.get(record.run_id, 0)
            self._needed += NO_WORK if self._is_first and record.step <= heard else needs.of(record.step)
            self._heard[record.run_id] = max(heard, record.step)
            self._is_first = False
        expected, found = self._before + self._needed.share(*self._share), record.work
        if record.kind is RecordKind.SNAPSHOT and expected <= found <= self._longest():
            return  # in the middle of a step, of which the next commit tells
        fits = found == expected
        if not fits and record.kind is not RecordKind.COMMIT:
            fits = expected <= found <= self._before + (self._needed + self._allowed).share(*self._share)
        if record.kind not in (RecordKind.BOOT, RecordKind.REGIONS):
            told = not fits or record.kind is RecordKind.POWER_GAP  # as a finding, or as a power cut
            self.behind = NO_WORK if told else found - expected
        was_off, self._is_off = self._is_off, not fits
        if record.kind is RecordKind.REGIONS:
            self._before, self._needed, self._is_first, self._is_off = found, NO_WORK, True, False
            self._take_over(needs)
        if fits or was_off:
            return
        if record.kind is RecordKind.POWER_GAP:
            self._after_gap(record, expected)
            return
        more, less = expected <= found, found <= expected
        amount = f"{found - expected} more than" if more else f"{expected - found} less than"
        what = amount if more or less else f"{found} where not"
        raise _error(self._chip, record, f"the meter counts {what} the {expected} that the committed steps need")

    def _longest(self) -> Work:
        """What the meter counts at most before the next commit, whatever that step is."""
        return self._before + (self._needed + self._most + self._allowed).share(*self._share)

    def _after_gap(self, record: LogRecord, expected: Work) -> None:
        """The step in which the power went was never committed: whatever it was, it needs no more than any other."""
        if expected <= record.work <= self._longest():
            return
        raise Unaudited(
            f"chip {self._chip}, record {record.counter}: when the power went its meter had counted "
            f"{record.work - expected} since the last committed step, more than any step needs"
        )


class HeldResults:
    """Beside its declared state a chip holds no more than what the committed step made, and ``KEPT_BYTES``.

    Args:
        runs: the declared runs in which the chip takes part, by run id.
    """

    def __init__(self, chip: str, runs: Mapping[bytes, Needs], standing: Standing = NEWBORN) -> None:
        self._chip = chip
        self._runs = runs
        self._allow(standing.attached, standing.newest)

    def _allow(self, run: bytes, step: int | None) -> None:
        """What may be held from a committed step on, or where that is None from when its run's memory was attached."""
        needs = self._runs.get(run)
        made = 0 if needs is None or step is None else needs.made(step)
        self._most = None if needs is None else (made + KEPT_BYTES) * needs.share[0] // needs.share[1]

    def take(self, record: LogRecord) -> None:
        """Check one record; EvidenceError says how much is held. Of memory of no declared run other laws tell."""
        if record.kind in (RecordKind.REGIONS, RecordKind.COMMIT):
            self._allow(record.run_id, record.step if record.kind is RecordKind.COMMIT else None)
        seen = record.kind in (RecordKind.COMMIT, RecordKind.QUOTE)
        if seen and self._most is not None and record.op > self._most:
            what = f"{record.op} bytes of results are held beside the state, more than the {self._most} that a step may"
            raise _error(self._chip, record, what)


class Beacons:
    """A chip works no longer than agreed from one beacon to the next; before the first and after the last not at all.

    What is missing was perhaps not sent, so that it accuses nobody and leaves the verdict open.
    """

    def __init__(self, chip: str, seconds: int, since: LogCheckpoint = BIRTH) -> None:
        self._chip = chip
        self._seconds = seconds
        self._last = since.beacon or None
        self._work = Work.from_bytes(since.work)
        self._worked = False  # since the last beacon, in whatever boot; at a checkpoint it has not

    def take(self, record: LogRecord) -> None:
        """Check one record; Unaudited says for how long the chip worked without a beacon."""
        if record.kind is RecordKind.BOOT:
            self._work = NO_WORK
        self._worked |= record.work != self._work
        self._work = record.work
        if record.kind is RecordKind.BEACON:
            last, self._last, worked, self._worked = self._last, record.step, self._worked, False
            if worked and last is not None and record.step - last > self._seconds:
                raise self._open(record, f"it worked in {record.step - last} seconds without a beacon")
        elif record.kind is RecordKind.COMMIT and self._last is None:
            self._last = 0  # said once
            raise self._open(record, "it took part in a run before its first beacon")
        elif record.kind is RecordKind.QUOTE and self._worked:
            raise self._open(record, "it worked after its last beacon")

    def _open(self, record: LogRecord, what: str) -> Unaudited:
        return Unaudited(f"chip {self._chip}, record {record.counter}: {what}; {self._seconds} seconds are agreed")


class Pace:
    """From one beacon to the next a chip counts no more work than its device can do in that time.

    A beacon is signed for its place in the log. So what the meter had counted at the record before that place was done
    by then, and what it has counted since it recorded an earlier beacon was done after that. A second is allowed for
    the fractions that beacons do not tell.

    Args:
        roofline: what the chip's device does in a second at most.
    """

    def __init__(self, chip: str, roofline: Roofline, since: LogCheckpoint = BIRTH) -> None:
        self._chip = chip
        self._roofline = roofline
        self._time = since.beacon or None
        self._begun = self._counted = Work.from_bytes(since.work)  # in this boot
        self._earlier = NO_WORK  # in boots before it

    def take(self, record: LogRecord) -> None:
        """Check one record; EvidenceError says how long the work takes for which there was no time."""
        if record.kind is RecordKind.BOOT:
            self._earlier, self._begun = self._earlier + self._counted - self._begun, NO_WORK
        time, work = self._time, self._earlier + self._counted - self._begun
        self._counted = record.work
        if record.kind is RecordKind.BEACON:
            self._time, self._begun, self._earlier = record.step, record.work, NO_WORK
            seconds = self._roofline.seconds(work)
            if time is not None and seconds > record.step - time + 1:
                what = f"the meter counts {work} in the {record.step - time} seconds between two beacons, "
                raise _error(self._chip, record, f"{what}and its device takes {seconds:.4g} seconds for that at least")


class SignsOfLife:
    """From one sign of life of a chip to the next, at work or not, no more time passes than is agreed.

    A chip that was put back to a copy of itself looks as if it had slept since the copy was made. Signs of life are the
    verifier's: beacons, the last live challenge that it remembers, and the one that is answered now. Missing ones
    accuse nobody and leave the verdict open.

    Args:
        last: where the chip was known to be at an earlier inspection; what came before was judged then.
        until: the answer to the challenge, which was made at ``now``, in seconds since 1970.
    """

    def __init__(
        self,
        chip: str,
        seconds: int,
        *,
        last: LogPosition | None,
        until: Quote,
        now: int,
        since: LogCheckpoint = BIRTH,
    ) -> None:
        self._chip = chip
        self._seconds = seconds
        self._seen = 0 if last is None else last.size
        self._last = max(since.beacon, 0 if last is None else last.time)
        self._ends = until.log_size - 1
        self._now = now

    def take(self, record: LogRecord) -> None:
        """Check one record; Unaudited says for how long there was no sign."""
        if record.counter >= self._seen and record.kind is RecordKind.BEACON:
            self._sign(record, record.step)
        if record.counter == self._ends:
            if not self._last:
                raise self._open(record, "no beacon or earlier challenge says where it was before this one")
            self._sign(record, self._now)

    def _sign(self, record: LogRecord, time: int) -> None:
        last, self._last = self._last, max(time, self._last)
        if last and time - last > self._seconds:
            raise self._open(record, f"for {time - last} seconds nobody asked it or showed it a beacon")

    def _open(self, record: LogRecord, what: str) -> Unaudited:
        told = f"a copy of it may have worked meanwhile, and {self._seconds} seconds are agreed"
        return Unaudited(f"chip {self._chip}, record {record.counter}: {what}: {told}")


def _error(chip: str, record: LogRecord, what: str) -> EvidenceError:
    return EvidenceError(f"chip {chip}, record {record.counter}: {what}")
