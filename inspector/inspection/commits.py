"""What an honest host makes a chip write, and when: memory first, then each step's work and its head."""

from __future__ import annotations

from collections.abc import Mapping
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
from firmware_sim.evidence import NEWBORN, Roofline, Standing
from monitor.replay.ledger import Needs, ledger_error

__all__ = [
    "Beacons",
    "CommitOrder",
    "HeldResults",
    "Law",
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

    - A run's memory is attached once in each boot, before anything else is said of the run, and heads come of the run
      whose memory was attached last. Once a run is closed its memory is not attached again.
    - Heads come for step 0, 1, 2, … in this order. After a boot they may go back to a step that was committed before,
      since the run resumes from its last checkpoint.

    Args:
        closed: by run id, how many records the log had when the run was closed.
    """

    def __init__(self, chip: str, standing: Standing = NEWBORN, closed: Mapping[bytes, int] | None = None) -> None:
        self._chip = chip
        self._closed = closed or {}
        self._attached = {standing.attached} - {NO_RUN}
        self._latest = standing.attached
        self._last = {run: heard.last for run, heard in standing.runs.items()}
        self._resumed = set(self._last) - (set() if standing.newest is None else self._attached)

    def take(self, record: LogRecord) -> None:
        """Check one record; EvidenceError says what is out of order."""
        if record.kind is RecordKind.BOOT:
            self._attached.clear()
            self._resumed = set(self._last)
        elif record.kind is RecordKind.REGIONS:
            again, self._latest = record.run_id in self._attached, record.run_id
            self._attached.add(record.run_id)
            if again:
                raise ledger_error(self._chip, record, "the run's memory was attached again in the same boot")
            self._check_open(record)
        elif record.kind is RecordKind.COMMIT:
            self._commit(record)

    def _check_open(self, record: LogRecord) -> None:
        if record.counter >= self._closed.get(record.run_id, record.counter + 1):
            what = "the memory of a run was attached again after the run had been closed"
            raise ledger_error(self._chip, record, what)

    def _check_latest(self, record: LogRecord) -> None:
        if record.run_id != self._latest:
            what = f"step {record.step} of a run was committed while another run's memory was attached"
            raise ledger_error(self._chip, record, what)

    def _commit(self, record: LogRecord) -> None:
        last = self._last.get(record.run_id, -1)
        resumes = record.run_id in self._resumed and record.step <= last
        self._resumed.discard(record.run_id)
        self._last[record.run_id] = record.step
        if record.run_id not in self._attached:
            what = f"step {record.step} was committed before the run's memory was attached"
            raise ledger_error(self._chip, record, what)
        self._check_latest(record)
        if record.step != last + 1 and not resumes:
            raise ledger_error(self._chip, record, f"step {record.step} was committed after step {last}")


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
                raise ledger_error(
                    self._chip, record, "a snapshot was taken of memory that was not attached in this boot"
                )
        elif record.run_id != self._attached:
            raise ledger_error(
                self._chip, record, "a snapshot names a run that is not the one whose memory is attached"
            )
        elif (newest := self._newest.get(record.run_id)) is None:
            raise ledger_error(self._chip, record, f"step {record.step} was not committed before its snapshot")
        elif record.step != newest:
            raise ledger_error(
                self._chip,
                record,
                f"the snapshot claims step {record.step}, but step {newest} was the newest at that time",
            )


class HeldResults:
    """Outside its declared state a chip holds no more than what the committed step made, and ``KEPT_BYTES``.

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
            what = f"{record.op} bytes of results were held outside the state, but a step may hold only {self._most}"
            raise ledger_error(self._chip, record, what)


class Beacons:
    """A chip works no longer than agreed from one beacon to the next; before the first and after the last not at all.

    What is missing was perhaps not sent, so that it accuses no one and leaves the verdict open.
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
                raise self._open(record, f"it worked during {record.step - last} seconds without a beacon")
        elif record.kind is RecordKind.COMMIT and self._last is None:
            self._last = 0  # said once
            raise self._open(record, "the chip took part in a run before its first beacon")
        elif record.kind is RecordKind.QUOTE and self._worked:
            raise self._open(record, "the chip worked after its last beacon")

    def _open(self, record: LogRecord, what: str) -> Unaudited:
        return Unaudited(
            f"chip {self._chip}, record {record.counter}: {what}; at most {self._seconds} seconds are agreed"
        )


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
                what = f"the meter counted {work} in the {record.step - time} seconds between two beacons, "
                raise ledger_error(
                    self._chip, record, f"{what}but its device needs at least {seconds:.4g} seconds for that"
                )


class SignsOfLife:
    """From one sign of life of a chip to the next, at work or not, no more time passes than is agreed.

    A chip that was put back to a copy of itself looks as if it had slept since the copy was made. Signs of life are the
    verifier's: beacons, the last live challenge that it remembers, and the one that is answered now. Missing ones
    accuse no one and leave the verdict open.

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
                raise self._open(record, "no beacon or earlier challenge shows where its log was before this challenge")
            self._sign(record, self._now)

    def _sign(self, record: LogRecord, time: int) -> None:
        last, self._last = self._last, max(time, self._last)
        if last and time - last > self._seconds:
            raise self._open(record, f"for {time - last} seconds no challenge or beacon reached it")

    def _open(self, record: LogRecord, what: str) -> Unaudited:
        why = f"a copy of it may have worked meanwhile; at most {self._seconds} seconds are agreed"
        return Unaudited(f"chip {self._chip}, record {record.counter}: {what}: {why}")
