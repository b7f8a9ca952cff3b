"""What an inspection finds of one chip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from firmware_sim import NO_WORK, LogRecord, RecordKind, Roofline, ScheduleAudit, Work
from firmware_sim.evidence import NOT_DRAWN, Drawn, LogCheckpoint, Standing
from inspector.inspection.cases import OpenedCase
from inspector.inspection.document import ChipDraws, ChipEvidence, ChipLedger
from inspector.inspection.mid_step_snapshots import InsideStep
from inspector.inspection.ownership import Span
from monitor.replay.ledger import Book

__all__ = ["ChipReport"]


@dataclass(slots=True, kw_only=True)
class ChipReport:
    """Evidence of one chip and the provenance of its snapshots.

    Attributes:
        span: which records these are, and who answers for them.
        sound: whether identity, quote, log and schedule of the chip passed; whether runs explain its log is another
            question.
        extends: whether its log goes on from where an earlier inspection left it, with records that are new; None
            where this chip was not seen before.
        work: what its meter has counted since its last boot.
        rates: what its device does at most in a tick, by which its clock goes; None where it did not say.
        counted: FLOP and bytes of all its boots and the microseconds that its work took by its clock, up to where the
            heads end that were handed over; None where its log begins after its first boot.
        held: the most bytes of results that any of its records saw outside the declared state.
        books: what its meter counts, by run id (``monitor.replay.ledger``); None where unknown.
        ledger: the same for the evidence (``slack.judge_slack``).
        repeated: of its snapshots, by record number, those that were taken while steps were repeated.
        nonce: of the live challenge that it answered; "" where it was not asked.
        time: the last at which it is known to have been where its log ends, in seconds since 1970; 0 if unknown.
        snapshots: (run id, step, operators) of each snapshot that a declared step explains, in the order of the log:
            after so many operators of the step, or where that is 0 after the whole of it.
        inside: those of them that only a replay of the step can compare.
        taken: every snapshot of a declared run.
        gaps: power gaps, as record numbers.
        boots: how often it was started.
        start: number of the first record that was looked at; what came before was accepted at an earlier inspection.
        prunable: where the log may be pruned if the inspection accepts; None where it may not.
        earlier: draws that were counted before the log was pruned.
        beyond: steps of runs that go on which it has heard of since their heads were handed over.
        unseen: ids of runs that an earlier inspection accepted of it, and that are not handed over now.
    """

    chip: str
    span: Span | None = None
    run: str = ""
    run_id: str = ""
    shard: int | None = None
    certificate: str = ""
    sound: bool = False
    log_counter: int = 0
    log_size: int = 0
    log_head: str = ""
    nonce: str = ""
    time: int = 0
    work: Work = NO_WORK
    rates: Roofline | None = None
    counted: tuple[int, int, int] | None = None
    held: int = 0
    books: Mapping[bytes, Book] | None = None
    ledger: ChipLedger | None = None
    repeated: frozenset[int] = frozenset()
    extends: bool | None = None
    snapshots: list[tuple[str, int, int]] = field(default_factory=list)
    inside: list[InsideStep] = field(default_factory=list)
    taken: list[LogRecord] = field(default_factory=list)
    unexplained: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    boots: int = 0
    beyond: int = 0
    start: int = 0
    prunable: tuple[LogCheckpoint, Standing] | None = None
    earlier: Drawn = NOT_DRAWN
    unseen: list[str] = field(default_factory=list)
    audit: ScheduleAudit | None = None
    draws: ChipDraws | None = None

    def describe(self, case: OpenedCase, nonce: bytes | None, now: int) -> None:
        """Take over what the chip's log and quote say by themselves; ``nonce`` as of a live challenge at ``now``."""
        quote, records = case.quote, case.records
        first = 0 if self.span is None or self.span.start is None else self.span.start.size
        self.certificate = str(case.identity.certificate_digest)
        self.log_counter, self.log_size, self.log_head = quote.counter, quote.log_size, quote.log_head.hex()
        self.nonce = "" if nonce is None else nonce.hex()
        self.time = max(quote.beacon, 0 if nonce is None else now)
        self.work, self.rates = Work(quote.calls, quote.flop, quote.moved), quote.roofline
        counted = (RecordKind.COMMIT, RecordKind.QUOTE)
        self.held = max((record.op for record in records if record.kind in counted), default=0)
        self.gaps = [record.counter for record in records if record.kind is RecordKind.POWER_GAP]
        self.boots = case.since.boot + sum(record.kind is RecordKind.BOOT for record in records)
        self.start = 0 if case.since.size == first else case.since.size

    def to_json(self) -> ChipEvidence:
        """Return JSON-able values."""
        found: ChipEvidence = {
            "chip": self.chip,
            "run": self.run,
            "run_id": self.run_id,
            "shard": self.shard,
            "certificate": self.certificate,
            "sound": self.sound,
            "log_counter": self.log_counter,
            "log_size": self.log_size,
            "log_start": self.start,
            "log_head": self.log_head,
            "nonce": self.nonce,
            "time": self.time,
            "metered": asdict(self.work),
            "rates": None if self.rates is None else asdict(self.rates),
            "counted": self.counted and dict(zip(("flop", "moved", "busy_us"), self.counted, strict=True)),
            "held_bytes": self.held,
            "ledger": self.ledger,
            "draws": self.draws,
            "extends": self.extends,
            "snapshots": [
                {"run_id": run_id, "step": step, "operators": operators} for run_id, step, operators in self.snapshots
            ],
            "snapshots_in_repeats": len(self.repeated),
            "unexplained_records": self.unexplained,
            "power_gaps": self.gaps,
            "boots": self.boots,
            "steps_beyond_heads": self.beyond,
        }
        if not self.is_whole and self.span is not None:
            found["span"] = self.span.to_json()
        return found

    @property
    def lab(self) -> str:
        """Who answers for these records; "" for no one."""
        return "" if self.span is None else self.span.lab

    @property
    def where(self) -> dict[str, str]:
        """What a finding about it is about: the chip, and of one that changes hands whose records these are."""
        return {"chip": self.chip} if self.is_whole else {"chip": self.chip, "lab": self.lab}

    @property
    def is_whole(self) -> bool:
        """Whether the chip has had one owner."""
        return self.span is None or (self.span.start, self.span.end) == (None, None)
