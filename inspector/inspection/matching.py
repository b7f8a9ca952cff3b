"""Compare a chip's records with the run that they name; each difference becomes a finding."""

from __future__ import annotations

from firmware_sim import LogRecord
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import ZERO_DIGEST, Standing
from inspector.inspection.chip_report import ChipReport
from inspector.inspection.guards import Guard
from inspector.inspection.history import other_root, other_state
from inspector.inspection.mid_step_snapshots import InsideStep, place_of
from inspector.inspection.transcripts import Transcript
from inspector.inspection.verdict import Findings

__all__ = ["match_commitment", "match_missing", "match_regions", "match_snapshot"]


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
