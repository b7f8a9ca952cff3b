"""Does a chip's log hold a snapshot at exactly the ticks that its revealed epoch keys demand?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from firmware_sim import limits
from firmware_sim.evidence.chiplog import LogRecord, RecordKind
from firmware_sim.evidence.pruning import BIRTH, LogCheckpoint
from firmware_sim.schedule import EpochKey, ScheduleError, Unaudited, commit_epoch, scheduled_ticks

__all__ = [
    "MAX_AUDITED_TICKS",
    "EpochSpan",
    "ScheduleAudit",
    "audit_schedule",
    "check_epoch_keys",
    "check_open_epoch",
    "epoch_spans",
]

MAX_AUDITED_TICKS = limits.AUDITED_TICKS.most


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSpan:
    """One epoch as logged: its ticks are (start, end]; `ended` is the record that ended it, None while it is open.

    Where the power went, `end` is the last tick that began; `cut_tick` is that of a snapshot then under way.
    """

    epoch: int
    boot: int
    start: int
    end: int
    opened: LogRecord
    ended: LogRecord | None
    snapshots: tuple[LogRecord, ...]
    cut_tick: int | None

    @property
    def has_lost_power(self) -> bool:
        """Whether the epoch ended with a power cut."""
        return self.ended is not None and self.ended.kind is RecordKind.POWER_GAP


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleAudit:
    """Extent of an audit: every tick of the chip's life up to the quote, or since a checkpoint."""

    epochs: int
    ticks: int
    busy_ticks: int
    snapshots: int
    power_gaps: int
    cut_snapshots: tuple[LogRecord, ...]


def epoch_spans(records: Sequence[LogRecord], since: LogCheckpoint = BIRTH) -> list[EpochSpan]:
    """Return the epochs of a log that has passed `check_life`, in order; that of a checkpoint is the first."""
    spans: list[EpochSpan] = []
    opened = since.epoch_record
    snapshots: list[LogRecord] = []
    for record in records:
        if record.kind is RecordKind.EPOCH:
            opened, snapshots = record, []
        elif record.kind is RecordKind.SNAPSHOT:
            snapshots.append(record)
        elif record.kind in (RecordKind.CLOSE_EPOCH, RecordKind.POWER_GAP) and opened is not None:
            spans.append(_span(opened, record, record.tick, snapshots))
            opened = None
    if opened is not None:
        spans.append(_span(opened, None, records[-1].tick, snapshots))
    return spans


def check_epoch_keys(
    records: Sequence[LogRecord], keys: Sequence[EpochKey], *, chip: str, since: LogCheckpoint = BIRTH
) -> None:
    """Check that there is exactly one key for each ended epoch, and that it opens the commitment in the log.

    Raises:
        ScheduleError: a key is missing, extra or wrong; names epoch and record.
    """
    revealed = {key.epoch: key.key for key in keys}
    if len(revealed) != len(keys):
        raise ScheduleError(f"chip {chip}: two keys for one epoch")
    for span in epoch_spans(records, since):
        key = revealed.pop(span.epoch, None)
        if span.ended is None:
            if key is not None:
                raise ScheduleError(f"chip {chip}: the key of epoch {span.epoch} is out while the epoch is open")
        elif key is None:
            raise ScheduleError(f"chip {chip}: the key of epoch {span.epoch} is missing")
        elif commit_epoch(chip, span.epoch, key).value != span.opened.digest:
            raise ScheduleError(
                f"chip {chip}: log record {span.opened.counter}: the key of epoch {span.epoch} does not open "
                "its commitment"
            )
    if revealed:
        raise ScheduleError(f"chip {chip}: there is a key for epoch {min(revealed)}, which the log does not hold")


def audit_schedule(
    records: Sequence[LogRecord],
    keys: Sequence[EpochKey],
    *,
    rate: Fraction,
    chip: str,
    max_ticks: int | None = None,
    since: LogCheckpoint = BIRTH,
) -> ScheduleAudit:
    """Check that every tick of the log lies in an ended epoch, which holds a snapshot at exactly its scheduled ticks.

    The chip closes its epoch right before the quote, so the open one covers nothing; a snapshot that a power cut
    interrupted is counted, not condemned. Where the power goes in the last tick before its snapshot's moment has come,
    there is none. Needs records that passed `check_life`; the keys are checked by
    `check_epoch_keys`.

    Raises:
        ScheduleError: a snapshot is missing or extra, naming chip, boot, tick and record; no epoch has ended, or the
            open one covers ticks.
        Unaudited: the log claims more than `max_ticks` ticks, and none of them was looked at.
    """
    revealed = {key.epoch: key.key for key in keys}
    spans = epoch_spans(records, since)
    ended = [span for span in spans if span.ended is not None]
    if not ended:
        raise ScheduleError(f"chip {chip}: no epoch has ended, so no snapshot can be audited")
    check_open_epoch(spans[-1], chip=chip)
    max_ticks = MAX_AUDITED_TICKS if max_ticks is None else max_ticks
    ticks = sum(max(span.end - span.start, 0) for span in ended)
    if ticks > max_ticks:
        raise Unaudited(
            f"chip {chip}: its log covers {ticks} ticks, more than the {max_ticks} that an audit looks at: "
            "whether it took its snapshots is unknown"
        )
    for span in ended:
        key = revealed.get(span.epoch)
        if key is None:
            raise ScheduleError(f"chip {chip}: the key of epoch {span.epoch} is missing")
        _audit_span(span, key, rate, chip)
    return ScheduleAudit(
        epochs=len(ended),
        ticks=ticks,
        busy_ticks=sum(span.ended.busy - span.opened.busy for span in spans if span.ended is not None),
        snapshots=sum(len(span.snapshots) for span in ended),
        power_gaps=sum(r.kind is RecordKind.POWER_GAP for r in records),
        cut_snapshots=tuple(span.ended for span in ended if span.ended is not None and span.cut_tick is not None),
    )


def check_open_epoch(span: EpochSpan, *, chip: str) -> None:
    """Check that an epoch whose key is not out yet covers no tick and no snapshot."""
    if span.ended is None and (span.end > span.start or span.snapshots):
        raise ScheduleError(
            f"chip {chip}: epoch {span.epoch} is still open and covers ticks {span.start + 1} to {span.end}: "
            "its schedule cannot be audited"
        )


def _audit_span(span: EpochSpan, key: bytes, rate: Fraction, chip: str) -> None:
    found = {record.tick: record for record in span.snapshots}
    if span.ended is not None and span.cut_tick is not None:
        found[span.cut_tick] = span.ended
    for tick in scheduled_ticks(key, span.boot, span.start, span.end, rate):
        if found.pop(tick, None) is None and not (span.has_lost_power and tick == span.end):
            after = max(
                (record.counter for record in span.snapshots if record.tick < tick), default=span.opened.counter
            )
            raise ScheduleError(
                f"chip {chip}: no snapshot at boot {span.boot}, tick {tick} of epoch {span.epoch} "
                f"(it belongs after log record {after})"
            )
    if found:
        extra = found[min(found)]
        raise ScheduleError(
            f"chip {chip}: log record {extra.counter}: snapshot at boot {span.boot}, tick {extra.tick} "
            f"of epoch {span.epoch} is not on the schedule"
        )


def _span(opened: LogRecord, ended: LogRecord | None, end: int, snapshots: Sequence[LogRecord]) -> EpochSpan:
    cut = ended.op if ended is not None and ended.kind is RecordKind.POWER_GAP and ended.op else None
    return EpochSpan(
        epoch=opened.step,
        boot=opened.boot,
        start=opened.tick,
        end=end,
        opened=opened,
        ended=ended,
        snapshots=tuple(snapshots),
        cut_tick=cut,
    )
