"""Each record of a chip's log agrees with one declared run, and is made when an honest host would have it made.

Each difference becomes a finding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise

from firmware_sim import TICK, LogPosition, LogRecord, RecordKind, Roofline, Work
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import ZERO_DIGEST, LogCheckpoint, Standing, log_extent
from inspector.inspection.cases import OpenedCase
from inspector.inspection.chip_report import ChipReport
from inspector.inspection.commits import (
    Beacons,
    CommitOrder,
    HeldResults,
    Law,
    Pace,
    SnapshotMoment,
    is_empty_snapshot,
)
from inspector.inspection.guards import Guard
from inspector.inspection.history import other_root, other_state
from inspector.inspection.mid_step_snapshots import InsideStep, committed_after, place_of
from inspector.inspection.transcripts import Transcript
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Findings
from inspector.probability.chances import snapshots_within
from monitor.replay.ledger import Ledger, Needs
from monitor.transcript.layout import chip_path

__all__ = [
    "LOG",
    "OF_RUNS",
    "explain_records",
    "judge_cuts",
    "laws_of",
    "match_missing",
    "needs_of_chip",
]


def match_regions(report: ChipReport, record: LogRecord, transcript: Transcript, findings: Findings) -> None:
    assert report.shard is not None
    if record.digest != transcript.region_tables[report.shard]:
        findings.add(
            Guard.COMMITMENT,
            f"chip {report.chip}, record {record.counter}: the memory layout is not that of shard {report.shard}",
            chip=report.chip,
            record=record.counter,
        )
    _check_share(report, record, transcript, findings)


def _check_share(report: ChipReport, record: LogRecord, transcript: Transcript, findings: Findings) -> None:
    """A chip counts its share of the work by its share of the state: a state said to be larger would hide work."""
    assert report.shard is not None
    _, whole = transcript.run.declared.layout.share(report.shard)
    if record.op != whole:
        text = (
            f"chip {report.chip}, record {record.counter}: the log gives {record.op} bytes as the size of the whole "
            "state, but "
        )
        findings.add(Guard.COMMITMENT, f"{text}the run's state has {whole}", chip=report.chip, record=record.counter)


def match_commitment(report: ChipReport, record: LogRecord, transcript: Transcript, findings: Findings) -> None:
    if text := other_root(report.chip, record, transcript):
        findings.add(Guard.COMMITMENT, text, chip=report.chip, record=record.counter, step=record.step)


def match_snapshot(
    report: ChipReport, record: LogRecord, transcript: Transcript, committed: bool, findings: Findings
) -> None:
    """Compare a snapshot after a step with the state that the step committed to; one inside of a step waits for replay.

    Args:
        committed: whether the step after the snapshot's was committed in the same boot.
    """
    report.taken.append(record)
    if record.digest == ZERO_DIGEST:
        report.unexplained.append(record.counter)
        text = f"chip {report.chip}, record {record.counter}: its memory was gone when a snapshot was due"
        findings.add(Guard.SNAPSHOT, text, **_where(report, record))
    elif record.operators or record.is_late:
        _match_inside(report, record, transcript, committed, findings)
    else:
        _match_state(report, record, record.step, transcript, findings)


def _match_inside(
    report: ChipReport, record: LogRecord, transcript: Transcript, committed: bool, findings: Findings
) -> None:
    if transcript.execution.works is None:
        report.unexplained.append(record.counter)
        return  # said once, of the meter
    assert report.shard is not None
    is_state = transcript.has_state(record.step, report.shard, record.digest)
    if not committed and not record.is_late and is_state:
        report.snapshots.append((record.run_id.hex(), record.step, 0))
        return  # the process ended while its loop only read; what ran is slack
    try:
        step, operators = place_of(record, transcript)
    except EvidenceError as error:
        report.unexplained.append(record.counter)
        text = f"chip {report.chip}, record {record.counter}: the snapshot cannot be explained: {error}"
        if committed or record.is_late:
            findings.add(Guard.SNAPSHOT, text, **_where(report, record))
        else:
            findings.doubt(text, **_where(report, record))
        return
    if not operators:
        _match_state(report, record, step, transcript, findings)
        return
    run_id = record.run_id.hex()
    report.snapshots.append((run_id, step, operators))
    report.inside.append(
        InsideStep(
            chip=report.chip, run_id=run_id, record=record.counter, shard=report.shard, step=step,
            operators=operators, digest=record.digest, is_certain=committed
        )
    )  # fmt: skip


def _match_state(report: ChipReport, record: LogRecord, step: int, transcript: Transcript, findings: Findings) -> None:
    assert report.shard is not None
    if text := other_state(report.chip, record, step, report.shard, transcript):
        report.unexplained.append(record.counter)
        findings.add(Guard.SNAPSHOT, text, **_where(report, record))
    else:
        report.snapshots.append((record.run_id.hex(), step, 0))


def _where(report: ChipReport, record: LogRecord) -> dict[str, object]:
    return {"chip": report.chip, "record": record.counter, "step": record.step, "tick": record.tick}


def match_missing(
    report: ChipReport,
    transcript: Transcript,
    committed: set[tuple[bytes, int]],
    standing: Standing,
    findings: Findings,
) -> None:
    """The chip must have heard of every step of a finished run in which it took part, and of none beyond a head."""
    run_id, name = transcript.run.metadata.run_id, transcript.run.name
    known = standing.runs.get(run_id)
    heard = -1 if known is None else known.most
    if heard >= len(transcript.leaves):
        text = f"chip {report.chip}: an earlier inspection accepted step {heard} of run {name}, which lies beyond the "
        findings.add(Guard.COMMITMENT, text + "head that is handed over now", chip=report.chip, step=heard)
    elif known is not None and not transcript.has_root(heard + 1, known.head):
        text = f"chip {report.chip}: an earlier inspection accepted run {name} up to step {heard} with another log head"
        findings.add(Guard.COMMITMENT, text, chip=report.chip, step=heard)
    missing = [leaf.step for leaf in transcript.leaves if leaf.step > heard and (run_id, leaf.step) not in committed]
    if missing == [len(transcript.leaves) - 1] and not transcript.run.finished:
        text = f"chip {report.chip} has not heard of step {missing[0]} of {name} yet"
        findings.doubt(text, chip=report.chip, step=missing[0])
    elif missing and report.span is not None and report.span.why not in ("", "transfer"):
        text = f"chip {report.chip} is gone, and had not heard of step {missing[0]} of {name} when it signed last"
        findings.doubt(text, chip=report.chip, step=missing[0])
    elif missing:
        findings.add(
            Guard.COMMITMENT,
            f"chip {report.chip}: never heard of step {missing[0]} of run {name}",
            chip=report.chip,
            step=missing[0],
        )


LOG = "log.bin"
OF_RUNS = (RecordKind.REGIONS, RecordKind.COMMIT, RecordKind.SNAPSHOT)
_NAMED = 8
"""Boots that a text names."""


def laws_of(
    case: OpenedCase, trust: Trust, transcripts: Sequence[Transcript], findings: Findings
) -> list[tuple[Guard, Law]]:
    """When an honest host makes a chip write its records, from where they begin."""
    chip, since, standing = case.chip_id, case.since, case.standing
    laws: list[tuple[Guard, Law]] = [
        (Guard.COMMITMENT, CommitOrder(chip, standing, _closed(chip, transcripts))),
        (Guard.SNAPSHOT, SnapshotMoment(chip, standing)),
        *_meter_law(case, transcripts, findings),
    ]
    if trust.beacon_seconds is not None:
        laws.append((Guard.TIME, Beacons(chip, trust.beacon_seconds, since)))
    if chip in trust.rates:
        laws.append((Guard.TIME, Pace(chip, trust.rates[chip], since)))
    return laws


def explain_records(
    report: ChipReport,
    case: OpenedCase,
    laws: Sequence[tuple[Guard, Law]],
    trust: Trust,
    transcripts: Sequence[Transcript],
    findings: Findings,
    last: LogPosition | None,
    heard: bool = True,
) -> Sequence[LogRecord]:
    """Each record must belong to exactly one declared run, and come when the laws say; returns those looked at."""
    runs = {transcript.run.metadata.run_id: transcript for transcript in transcripts}
    records = up_to_heads(case.records, runs)
    if case.since.boot <= 1:
        report.counted = _totals(records, case.since, case.quote.roofline)
    _pass_over(report, case.records[len(records) :], runs, last, findings)
    committed: set[tuple[bytes, int]] = set()
    followed = committed_after(records)
    for record in records:
        for guard, law in laws:
            findings.check(guard, partial(law.take, record), chip=report.chip, record=record.counter)
        if record.kind not in OF_RUNS or (record.kind is RecordKind.SNAPSHOT and is_empty_snapshot(record)):
            continue
        transcript = runs.get(record.run_id)
        if transcript is None or report.chip not in transcript.run.metadata.chips:
            report.unexplained.append(record.counter)
            note_undeclared(report.chip, record, findings)
            continue
        report.shard = transcript.run.metadata.chips.index(report.chip)
        if record.kind is RecordKind.REGIONS:
            match_regions(report, record, transcript, findings)
        elif record.kind is RecordKind.COMMIT:
            committed.add((record.run_id, record.step))
            match_commitment(report, record, transcript, findings)
        else:
            match_snapshot(report, record, transcript, followed[record.counter], findings)
    erased = [each.boot for each in records if each.kind is RecordKind.POWER_GAP and each.op != 0]
    judge_cuts(report.chip, erased, len(report.gaps), trust.chip_trust.snapshot_rate, findings)
    for transcript in transcripts if heard else ():
        if report.chip in transcript.run.metadata.chips:
            match_missing(report, transcript, committed, case.standing, findings)
    return records


def _pass_over(
    report: ChipReport,
    records: Sequence[LogRecord],
    runs: Mapping[bytes, Transcript],
    last: LogPosition | None,
    findings: Findings,
) -> None:
    """Of records beyond the heads only that they belong to a declared run, and are newer than what was seen before."""
    for record in records:
        report.beyond += record.kind is RecordKind.COMMIT
        if record.kind in OF_RUNS and not is_empty_snapshot(record) and record.run_id not in runs:
            note_undeclared(report.chip, record, findings)
    if records:
        check_behind(report.chip, records[0], last, findings)


def _totals(records: Sequence[LogRecord], since: LogCheckpoint, roofline: Roofline) -> tuple[int, int, int]:
    """FLOP and bytes of several boots, each up to its last record, and their microseconds; ``since`` is in one."""
    counts = [(since.boot, Work.from_bytes(since.work)), *((record.boot, record.work) for record in records)]
    ends = [work for (boot, work), (after, _) in pairwise(counts) if after != boot] + [counts[-1][1]]
    busy = sum(roofline.time(work) for work in ends) * 1_000_000 // TICK
    return sum(work.flop for work in ends), sum(work.moved for work in ends), busy


def note_undeclared(chip: str, record: LogRecord, findings: Findings) -> None:
    """A chip's record of a run that its lab has not declared is a finding."""
    text = f"chip {chip}, record {record.counter}: this record belongs to a run that was not declared"
    findings.add(Guard.SNAPSHOT, text, chip=chip, record=record.counter, step=record.step)


def check_behind(chip: str, record: LogRecord, last: LogPosition | None, findings: Findings) -> None:
    """What a chip had recorded when it was last asked must be explained by the head that its lab hands over now.

    Otherwise a lab could hand over the same old head for ever, and what its chips do would never be looked at.
    """
    if last is not None and record.counter < last.size:
        text = (
            f"chip {chip}, record {record.counter}: an earlier inspection saw this record, but it lies beyond the head "
            "that "
        )
        text += f"is handed over now (step {record.step})"
        findings.add(Guard.COMMITMENT, text, chip=chip, record=record.counter, step=record.step)


def up_to_heads(records: Sequence[LogRecord], runs: Mapping[bytes, Transcript]) -> Sequence[LogRecord]:
    """The records before the first that a step has left which lies beyond the head of a run that goes on.

    A chip at work has gone on since its lab handed the head over; a later inspection looks at what it did then.
    """
    going = {run_id: len(item.leaves) for run_id, item in runs.items() if not item.run.finished}
    for number, record in enumerate(records):
        step = record.step + (record.kind is RecordKind.SNAPSHOT and record.operators > 0)
        if record.kind in (RecordKind.COMMIT, RecordKind.SNAPSHOT) and step >= going.get(record.run_id, step + 1):
            return records[:number]
    return records


def judge_cuts(chip: str, erased: Sequence[int], gaps: int, rate: Fraction, findings: Findings) -> None:
    """A power cut in the middle of a snapshot erases it, so that nothing is concluded from then on.

    Where the power goes at random, that happens at each cut with the rate of snapshots at most; how likely chance alone
    is, the text says. It convicts no one: what makes a chip read its memory may also make its machine fail.

    Args:
        erased: the boots that ended in a snapshot, of the ``gaps`` that lost their power.
        rate: snapshots per tick.
    """
    if erased:
        chance = snapshots_within(gaps, rate, len(erased))
        named = ", ".join(map(str, erased[:_NAMED])) + (", …" if len(erased) > _NAMED else "")
        findings.doubt(
            f"chip {chip}: power was cut {gaps} times, {len(erased)} of them in the middle of a snapshot (boot "
            f"{named}); chance cuts as many with a probability of {chance:.2g} at most",
            chip=chip,
        )


def _meter_law(case: OpenedCase, transcripts: Sequence[Transcript], findings: Findings) -> list[tuple[Guard, Law]]:
    """What the chip's meter must count; nothing where a run of its executes programs without an agreement."""
    chip, since, standing = case.chip_id, case.since, case.standing
    mine = [item for item in transcripts if chip in item.run.metadata.chips]
    unknown = next((item for item in mine if item.execution.works is None), None)
    if unknown is not None:
        text = f"chip {chip}: what its meter must count is not known, for want of the programs of "
        findings.doubt(text + unknown.run.name, chip=chip)
        return []
    needs = needs_of_chip(chip, mine)
    return [
        (Guard.METER, Ledger(chip, needs, since, standing)),
        (Guard.METER, HeldResults(chip, needs, standing)),
    ]


def needs_of_chip(chip: str, transcripts: Sequence[Transcript]) -> dict[bytes, Needs]:
    """What the steps of the runs that a chip serves need of it."""
    return {item.run.metadata.run_id: item.needs(chip) for item in transcripts if chip in item.run.metadata.chips}


def _closed(chip: str, transcripts: Sequence[Transcript]) -> dict[bytes, int]:
    """By finished run of the chip, how many records its log had when the run was closed."""
    path = chip_path(chip, LOG)
    return {
        item.run.metadata.run_id: log_extent(item.run.read(path))[1]
        for item in transcripts
        if item.run.finished and path in item.run.files
    }
