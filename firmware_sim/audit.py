"""Does a chip's log hold a snapshot for exactly the moments that its revealed epoch keys demand?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Self

import numpy as np

from firmware_sim import limits
from firmware_sim.evidence.acceptance import NOT_DRAWN, Drawn
from firmware_sim.evidence.chiplog import LogRecord, RecordKind
from firmware_sim.evidence.pruning import BIRTH, LogCheckpoint
from firmware_sim.evidence.work import TICK, Roofline
from firmware_sim.roofline import time_of
from firmware_sim.schedule import EpochKey, ScheduleError, Unaudited, commit_epoch, scheduled, threshold

__all__ = [
    "MAX_AUDITED_TICKS",
    "Draws",
    "EpochSpan",
    "ScheduleAudit",
    "audit_schedule",
    "check_epoch_keys",
    "check_open_epoch",
    "epoch_spans",
]

MAX_AUDITED_TICKS = limits.AUDITED_TICKS.most


class Taken(NamedTuple):
    """A snapshot as logged: between the times of the records around it, in 2^-32 ticks."""

    record: LogRecord
    after: int
    before: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSpan:
    """One epoch as logged: the times (start, end], in 2^-32 ticks; `ended` is the record that ended it, if one did.

    Where the power went, `end` is the last time that the chip knew; snapshots from tick `cut_from` on were then under
    way, None if none was.
    """

    epoch: int
    boot: int
    start: int
    end: int
    opened: LogRecord
    ended: LogRecord | None
    snapshots: tuple[Taken, ...]
    cut_from: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """How many snapshots the keys of ended epochs demanded, and in how much time.

    A new epoch draws anew for the rest of its tick, so that each stretch of time counts with its length, whatever ends
    an epoch, as long as that has nothing to do with the draws. Who foresees them, and closes epochs, boots or stops
    before a snapshot, is left with fewer than chance gives. So is who foresees nothing but ends an epoch within a tick
    because that tick has held no snapshot so far: at rate r with 1 - e^-r a tick at least.

    Attributes:
        whole: ticks that one epoch covers wholly.
        parts: of each other stretch, what part of its tick it is.
        demanded: snapshots that were due, taken or cut by a loss of power.
        earlier: what inspections before this one have counted, in parts of the log that were pruned since.
    """

    whole: int
    parts: tuple[float, ...]
    demanded: int
    earlier: Drawn = NOT_DRAWN

    @classmethod
    def of(cls, spans: Sequence[EpochSpan], demanded: int) -> Self:
        """The draws of ended epochs."""
        whole, parts = 0, list[float]()
        for span in spans:
            first, last = -(-span.start // TICK), span.end // TICK
            if first > last:
                parts += [(span.end - span.start) / TICK] if span.end > span.start else []
                continue
            whole += last - first
            parts += (part / TICK for part in (first * TICK - span.start, span.end - last * TICK) if part)
        return cls(whole=whole, parts=tuple(parts), demanded=demanded)

    def __add__(self, other: Draws) -> Draws:
        return Draws(
            whole=self.whole + other.whole,
            parts=self.parts + other.parts,
            demanded=self.demanded + other.demanded,
            earlier=Drawn(*map(sum, zip(self.earlier, other.earlier, strict=True))),
        )

    @property
    def due(self) -> int:
        """How many snapshots were, earlier ones among them."""
        return self.demanded + self.earlier.due

    def summed(self) -> Drawn:
        """All of these, as a later inspection goes on from them."""
        time = self.whole * TICK + round(sum(self.parts) * TICK)
        trials = self.earlier.trials + self.whole + len(self.parts)
        return Drawn(trials=trials, time=self.earlier.time + time, due=self.due)

    def expected(self, rate: Fraction) -> float:
        """How many are due on average, at a rate in snapshots per tick."""
        return float(rate) * (self.whole + sum(self.parts) + self.earlier.time / TICK)

    def chance(self, rate: Fraction) -> float:
        """How likely no more than these are due: the lower tail of a Poisson binomial distribution, summed exactly.

        The whole ticks are a binomial distribution, and each part of one is convolved with it (Hong 2013, On computing
        the distribution function for the Poisson binomial distribution). Where as many are due as on average, it is
        1: then it says nothing. Of earlier draws the sum alone is known; then it is a bound, the tail of a binomial
        distribution with as many draws and the same mean (Hoeffding 1956, On the distribution of the number of
        successes in independent trials, theorem 4), and 1 where less than one is missing.
        """
        expected = self.expected(rate)
        if self.due >= expected:
            return 1.0
        from scipy.stats import binom

        if self.earlier.trials:
            trials = self.whole + len(self.parts) + self.earlier.trials
            return float(binom.cdf(self.due, trials, expected / trials)) if self.due <= expected - 1 else 1.0
        tail = binom.pmf(np.arange(self.demanded + 1), self.whole, float(rate))
        for part in self.parts:
            one = float(rate) * part
            tail[1:] = tail[1:] * (1 - one) + tail[:-1] * one
            tail[0] *= 1 - one
        return float(tail.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleAudit:
    """Extent of an audit: the chip's life up to the quote, or since a checkpoint, in whole ticks."""

    epochs: int
    ticks: int
    busy_ticks: int
    snapshots: int
    power_gaps: int
    cut_snapshots: tuple[LogRecord, ...]
    spans: tuple[EpochSpan, ...]
    due: tuple[int, ...]

    @property
    def draws(self) -> Draws:
        """Of all ended epochs."""
        return Draws.of(self.spans, sum(self.due))

    def draws_before(self, epoch: int) -> Draws:
        """Of the epochs before one."""
        earlier = [(span, due) for span, due in zip(self.spans, self.due, strict=True) if span.epoch < epoch]
        return Draws.of([span for span, _ in earlier], sum(due for _, due in earlier))


def epoch_spans(records: Sequence[LogRecord], roofline: Roofline, since: LogCheckpoint = BIRTH) -> list[EpochSpan]:
    """Return the epochs of a log that has passed `check_life`, in order; that of a checkpoint is the first."""
    spans: list[EpochSpan] = []
    opened = since.epoch_record
    after = 0 if opened is None else time_of(opened, roofline)
    snapshots: list[LogRecord] = []
    taken: list[Taken] = []
    for record in records:
        if record.kind is RecordKind.SNAPSHOT:
            snapshots.append(record)
            continue
        now = time_of(record, roofline)
        taken += (Taken(each, after, now) for each in snapshots)
        after, snapshots = now, []
        if record.kind is RecordKind.EPOCH:
            opened, taken = record, []
        elif record.kind in (RecordKind.CLOSE_EPOCH, RecordKind.POWER_GAP) and opened is not None:
            spans.append(_span(opened, record, roofline, taken, now))
            opened = None
    if opened is not None:
        taken += (Taken(each, after, after) for each in snapshots)
        spans.append(_span(opened, None, roofline, taken, after))
    return spans


def check_epoch_keys(
    records: Sequence[LogRecord],
    keys: Sequence[EpochKey],
    *,
    chip: str,
    roofline: Roofline,
    since: LogCheckpoint = BIRTH,
) -> None:
    """Check that there is exactly one key for each ended epoch, and that it opens the commitment in the log.

    Raises:
        ScheduleError: a key is missing, extra or wrong; names epoch and record.
    """
    revealed = {key.epoch: key.key for key in keys}
    if len(revealed) != len(keys):
        raise ScheduleError(f"chip {chip}: two keys are given for one epoch")
    for span in epoch_spans(records, roofline, since):
        key = revealed.pop(span.epoch, None)
        if span.ended is None:
            if key is not None:
                raise ScheduleError(f"chip {chip}: the key of epoch {span.epoch} was revealed while the epoch is open")
        elif key is None:
            raise ScheduleError(f"chip {chip}: the key of epoch {span.epoch} is missing")
        elif commit_epoch(chip, span.epoch, key).value != span.opened.digest:
            raise ScheduleError(
                f"chip {chip}: log record {span.opened.counter}: the key of epoch {span.epoch} does not open "
                "its commitment"
            )
    if revealed:
        raise ScheduleError(f"chip {chip}: a key is given for epoch {min(revealed)}, which is not in the log")


def audit_schedule(
    records: Sequence[LogRecord],
    keys: Sequence[EpochKey],
    *,
    rate: Fraction,
    roofline: Roofline,
    chip: str,
    max_ticks: int | None = None,
    since: LogCheckpoint = BIRTH,
) -> ScheduleAudit:
    """Check that all time of the log lies in ended epochs, each of which holds a snapshot for exactly its moments.

    The record of each lies where the log has come to its moment: behind what was recorded before, and before what was
    recorded after. The chip closes its epoch right before the quote, so the open one covers nothing; snapshots that a
    power cut interrupted are counted, not condemned. Needs records that passed `check_life`; the keys are checked by
    `check_epoch_keys`.

    Args:
        roofline: of the chip's device.

    Raises:
        ScheduleError: a snapshot is missing, extra or out of place, naming chip, boot, tick and record; no epoch has
            ended, or the open one covers time.
        Unaudited: the log claims more than `max_ticks` ticks, and none of them was looked at.
    """
    spans = epoch_spans(records, roofline, since)
    ended = [span for span in spans if span.ended is not None]
    if not ended:
        raise ScheduleError(f"chip {chip}: no epoch has ended, so no snapshot can be audited")
    check_open_epoch(spans[-1], chip=chip)
    max_ticks = MAX_AUDITED_TICKS if max_ticks is None else max_ticks
    ticks = sum(max(span.end - span.start, 0) for span in ended) // TICK
    if ticks > max_ticks:
        raise Unaudited(
            f"chip {chip}: its log covers {ticks} ticks, more than the {max_ticks} that an audit covers: it is unknown "
            "whether it took its snapshots"
        )
    due = _due(ended, keys, rate, chip)
    return ScheduleAudit(
        epochs=len(ended),
        ticks=ticks,
        busy_ticks=sum(span.ended.busy - span.opened.busy for span in spans if span.ended is not None),
        snapshots=sum(len(span.snapshots) for span in ended),
        power_gaps=sum(r.kind is RecordKind.POWER_GAP for r in records),
        cut_snapshots=tuple(span.ended for span in ended if span.ended is not None and span.cut_from is not None),
        spans=tuple(ended),
        due=tuple(due),
    )


def _due(ended: Sequence[EpochSpan], keys: Sequence[EpochKey], rate: Fraction, chip: str) -> list[int]:
    """What was due in each epoch, once its snapshots are those."""
    revealed = {key.epoch: key.key for key in keys}
    limit = threshold(rate)
    due = []
    for span in ended:
        key = revealed.get(span.epoch)
        if key is None:
            raise ScheduleError(f"chip {chip}: the key of epoch {span.epoch} is missing")
        due.append(_audit_span(span, scheduled(key, span.boot, span.start, span.end, limit), chip))
    return due


def check_open_epoch(span: EpochSpan, *, chip: str) -> None:
    """Check that an epoch whose key is not out yet covers no time and no snapshot."""
    if span.ended is None and (span.end > span.start or span.snapshots):
        raise ScheduleError(
            f"chip {chip}: epoch {span.epoch} is still open and covers ticks {span.start / TICK:.2f} to "
            f"{span.end / TICK:.2f}: its schedule cannot be audited"
        )


def _audit_span(span: EpochSpan, moments: Iterable[int], chip: str) -> int:
    """Check an epoch's snapshots; returns how many were due."""
    found, due = {each.record.tick: each for each in span.snapshots}, 0
    for moment in moments:
        due += 1
        tick = moment // TICK
        taken = found.pop(tick, None)
        if taken is None and (span.cut_from is None or tick < span.cut_from):
            earlier = (each.record.counter for each in span.snapshots if each.record.tick < tick)
            raise ScheduleError(
                f"chip {chip}: no snapshot at boot {span.boot}, tick {moment / TICK:.2f} of epoch {span.epoch} "
                f"(it belongs after log record {max(earlier, default=span.opened.counter)})"
            )
        if taken is not None and not taken.after < moment <= taken.before:
            raise ScheduleError(
                f"chip {chip}: log record {taken.record.counter}: the snapshot of boot {span.boot}, tick "
                f"{moment / TICK:.2f} lies between records of ticks {taken.after / TICK:.2f} and "
                f"{taken.before / TICK:.2f}"
            )
    if found:
        extra = found[min(found)].record
        raise ScheduleError(
            f"chip {chip}: log record {extra.counter}: snapshot at boot {span.boot}, tick {extra.tick} "
            f"of epoch {span.epoch} is not on the schedule"
        )
    return due


def _span(
    opened: LogRecord, ended: LogRecord | None, roofline: Roofline, snapshots: Sequence[Taken], end: int
) -> EpochSpan:
    cut = ended.op - 1 if ended is not None and ended.kind is RecordKind.POWER_GAP and ended.op else None
    return EpochSpan(
        epoch=opened.step,
        boot=opened.boot,
        start=time_of(opened, roofline),
        end=end,
        opened=opened,
        ended=ended,
        snapshots=tuple(snapshots),
        cut_from=cut,
    )
