"""What the ``chip`` commands answer, an object for each chip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

__all__ = ["Answered", "Asked", "LoggedChip", "Pruned", "QuotedChip", "ShownChip"]


class Work(TypedDict):
    """Work that a meter counts.

    Attributes:
        calls: operators.
        moved: bytes.
    """

    calls: int
    flop: int
    moved: int


class TickWork(TypedDict):
    """What fills a tick of the chip's clock.

    Attributes:
        moved: bytes.
    """

    flop: int
    moved: int


class ShownFirmware(TypedDict):
    """The firmware of a chip.

    Attributes:
        measurement: digest of its image.
    """

    name: str
    measurement: str
    security_version: int


class ClockInterval(TypedDict):
    """Time from one beacon to the next.

    Attributes:
        start, stop: in seconds of the verifier's time.
        busy_seconds: the least time that the metered work takes.
    """

    start: int
    stop: int
    busy_seconds: float
    idle_seconds: float


class Clock(TypedDict):
    """A meter as a clock.

    Attributes:
        busy_seconds: the least time that the work of this boot takes.
        intervals: from beacon to beacon.
    """

    device: str
    busy_seconds: float
    intervals: Sequence[ClockInterval]


class ShownEpoch(TypedDict):
    """An epoch of a chip's log.

    Attributes:
        first, last: ticks.
        due: ticks at which snapshots were due; None while its key is secret.
        taken: ticks at which they were taken.
        ended: kind of the record that ended it, or None.
    """

    epoch: int
    boot: int
    first: float
    last: float
    due: Sequence[int] | None
    taken: Sequence[int]
    ended: str | None


class ShownChip(TypedDict):
    """A chip as its firmware or its evidence shows it.

    Attributes:
        identity: the id that it presents.
        maker, certificate: digests.
        busy: ticks in which it worked.
        work: that the meter counted in this boot.
        in_a_tick: the work that fills a tick.
        clock: with --clock.
        counter: changes of the persistent state.
        log_start: number of the first record that the log still holds; a checkpoint stands for the older ones.
        checkpoint_signer: as the log says, not checked; or None.
        records: by kind, used and quota.
        memory: used_bytes, capacity_bytes, slot_writes and cell_writes; None where only evidence is there.
        snapshot_rate: snapshots for each tick.
        problem: why it does not boot, or what in its evidence is not consistent; or None. Where the evidence cannot be
            read, chip and problem are all.
    """

    chip: str
    identity: str
    maker: str
    certificate: str
    firmware: ShownFirmware
    boot: int
    tick: int
    busy: int
    work: Work
    in_a_tick: TickWork
    clock: NotRequired[Clock]
    counter: int
    log_size: int
    log_start: int
    checkpoint_signer: str | None
    log_head: str
    records: Mapping[str, Mapping[str, int | None]]
    memory: Mapping[str, int] | None
    snapshot_rate: str
    snapshot_algorithm: str
    epochs: Sequence[ShownEpoch]
    problem: str | None


class LoggedRecord(TypedDict):
    """A record of a chip's log.

    Attributes:
        busy: ticks in which the chip worked, up to then.
        work: that the meter had counted.
        previous: digest of the record before.
        says: in words.
    """

    counter: int
    kind: str
    boot: int
    tick: int
    busy: int
    work: Work
    run_id: str
    step: int
    op: int
    digest: str
    previous: str
    says: str


class LoggedChip(TypedDict):
    """A chip's log.

    Attributes:
        log_start: number of the first record that it still holds.
        checkpoint_signer: as the log says, not checked; or None.
        problem: what is not consistent, or None; where the evidence cannot be read, chip and problem are all.
    """

    chip: str
    log_start: int
    checkpoint_signer: str | None
    records: Sequence[LoggedRecord]
    problem: str | None


class QuotedChip(TypedDict):
    """A chip's latest quote.

    Attributes:
        signed_by: id of the key, not checked against a trust file: `chip verify-log` does that.
        fields: by name, value and what it was compared with (compared_with; None for what only the chip says).
        problem: what is not consistent, or None; where the evidence cannot be read, chip and problem are all.
    """

    chip: str
    signed_by: str
    fields: Mapping[str, Any]
    problem: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A chip that was challenged.

    Attributes:
        problem: why it did not answer, or null.
    """

    chip: str
    nonce: str
    verifier: str
    problem: str | None = None

    @property
    def text(self) -> str:
        """In words."""
        return f"chip {self.chip}: {self.problem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered(Asked):
    """A chip that answered.

    Attributes:
        beacon: time of the newest one, or 0.
    """

    counter: int
    log_size: int
    beacon: int
    log_head: str
    folder: str | None

    @property
    def text(self) -> str:
        """In words."""
        return f"chip {self.chip} answers {self.nonce}: {self.log_size} records, head {self.log_head}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """A chip that got a checkpoint.

    Attributes:
        log_start: the first record that it still holds.
        problem: why it refuses, or null.
    """

    chip: str
    log_start: int | None = None
    free_bytes: int | None = None
    problem: str | None = None

    @property
    def text(self) -> str:
        """In words."""
        kept = f"chip {self.chip} holds records from {self.log_start} on, and {self.free_bytes} bytes are free"
        return self.problem or kept
