"""The order in which a chip must hear of a run: memory first, then each step's head, with time between steps."""

from __future__ import annotations

from firmware_sim import LogRecord, RecordKind
from firmware_sim.errors import EvidenceError

__all__ = ["CommitOrder"]


class CommitOrder:
    """Reads a chip's records one by one and refuses those that an honest host would not have made it write.

    - A run's memory is attached once in each boot, before anything else is said of the run.
    - Heads come for step 0, 1, 2, … in this order. After a boot they may go back to a step that was committed before,
      since the run resumes from its last checkpoint.
    - At least one tick passes after each head, so that every committed state could have been snapshotted: heads that
      are all committed at once, when the lab knows already which ticks held a snapshot, prove nothing.
    """

    def __init__(self, chip: str) -> None:
        self._chip = chip
        self._attached: set[bytes] = set()
        self._last: dict[bytes, int] = {}
        self._resumed: set[bytes] = set()
        self._waiting: tuple[int, int] | None = None

    def take(self, record: LogRecord) -> None:
        """Check one record; EvidenceError says what is out of order."""
        if record.kind is RecordKind.BOOT:
            self._attached.clear()
            self._resumed = set(self._last)
            self._waiting = None
        elif record.kind is RecordKind.REGIONS:
            if record.run_id in self._attached:
                raise self._error(record, "the run's memory was attached again in the same boot")
            self._attached.add(record.run_id)
        elif record.kind is RecordKind.COMMIT:
            self._commit(record)
        elif record.kind is RecordKind.SNAPSHOT and any(record.run_id) and record.run_id not in self._attached:
            raise self._error(record, "a snapshot names a run whose memory is not attached")
        elif record.kind is RecordKind.CLOSE_EPOCH:
            waiting, self._waiting = self._waiting, None
            self._require_tick(record, waiting)

    def _commit(self, record: LogRecord) -> None:
        last = self._last.get(record.run_id, -1)
        resumes = record.run_id in self._resumed and record.step <= last
        waiting, self._waiting = self._waiting, (record.step, record.tick)
        self._resumed.discard(record.run_id)
        self._last[record.run_id] = record.step
        if record.run_id not in self._attached:
            raise self._error(record, f"step {record.step} was committed before the run's memory was attached")
        self._require_tick(record, waiting)
        if record.step != last + 1 and not resumes:
            raise self._error(record, f"step {record.step} was committed after step {last}")

    def _require_tick(self, record: LogRecord, waiting: tuple[int, int] | None) -> None:
        """Time must have passed since the last head, if there was one in this boot."""
        if waiting is not None and record.tick <= waiting[1]:
            raise self._error(record, f"no tick passed after step {waiting[0]} was committed")

    def _error(self, record: LogRecord, what: str) -> EvidenceError:
        return EvidenceError(f"chip {self._chip}, record {record.counter}: {what}")
