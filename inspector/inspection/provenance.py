"""What one chip says, and whether the declared runs explain it (Shavit 2023, sections 3 and 4)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

from firmware_sim import (
    LogPosition,
    LogRecord,
    ScheduleAudit,
)
from firmware_sim.checks import CHIP_GUARDS, ChipCase
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import LogCheckpoint, Standing, log_extent, logs_contradict
from firmware_sim.evidence.acceptance import Heard
from inspector.inspection.answers import Answers, EvidenceSource
from inspector.inspection.cases import OpenedCase, accepted_part, open_case
from inspector.inspection.chip_report import ChipReport
from inspector.inspection.commits import (
    SignsOfLife,
)
from inspector.inspection.explanation import LOG, explain_records, laws_of, needs_of_chip
from inspector.inspection.guards import Guard
from inspector.inspection.ownership import held_span
from inspector.inspection.transcripts import Transcript
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Findings
from monitor.replay.ledger import Ledger
from monitor.transcript.layout import CHIP_FILES, chip_path

__all__ = [
    "EarlierRuns",
    "answering",
    "examine_chip",
    "examine_source",
    "is_listed",
    "is_sound",
    "runs_of_owner",
    "sources_of",
    "unseen_text",
]

EarlierRuns = dict[tuple[str, str], Mapping[bytes, Heard] | None]
"""By chip and lab what the chip has heard of runs in spans of this lab; None where these could not be read."""
_GUARD_OF = {
    "maker": Guard.IDENTITY,
    "firmware": Guard.IDENTITY,
    "expected chip": Guard.IDENTITY,
    "boots": Guard.IDENTITY,
    "epoch keys": Guard.SCHEDULE,
    "schedule": Guard.SCHEDULE,
}
"""Which guard of the inspection a check of the chip belongs to; all others belong to the log."""


def examine_chip(
    chip: str,
    transcripts: Sequence[Transcript],
    trust: Trust,
    findings: Findings,
    *,
    answers: Answers | None = None,
    last: LogPosition | None = None,
    now: int = 0,
    heard: EarlierRuns | None = None,
) -> ChipReport:
    """Read a chip's evidence and match every record of its log to the runs that its lab declares.

    What another lab's run says of the chip counts for nothing. A chip of the registry without evidence is a refusal,
    and counts as a failure.

    Args:
        answers: evidence of chips that answered outside of any run, or to a live challenge.
        last: where the chip's log ended at an earlier inspection, which it must extend; None if there was none.
        now: the time of the inspection, in seconds since 1970.
        heard: what chips heard of runs in earlier spans of the same lab (``examine_past``).
    """
    report = ChipReport(chip=chip)
    if not is_listed(chip, trust, findings):
        return report
    report.span = held_span(chip, trust)
    with answering(report, findings):
        own = runs_of_owner(chip, transcripts, trust)
        sources = sources_of(chip, own, answers)
        if not sources:
            findings.read(lambda: _refused(chip), chip=chip)
            return report
        source = findings.read(lambda: _latest(chip, sources), chip=chip)
        known = source and findings.read(report.span.require_known, chip=chip)
        if source is None or known is None:
            return report
        examine_source(report, source, own, trust, findings, last, now, (heard or {}).get((chip, report.lab), {}))
    return report


@contextmanager
def answering(report: ChipReport, findings: Findings) -> Iterator[None]:
    """What is found of a chip that changes hands counts against the owner whose records these are."""
    findings.about = {} if report.is_whole else {"lab": report.lab}
    try:
        yield
    finally:
        findings.about = {}


def examine_source(
    report: ChipReport,
    source: EvidenceSource,
    own: Sequence[Transcript],
    trust: Trust,
    findings: Findings,
    last: LogPosition | None,
    now: int,
    heard: Mapping[bytes, Heard] | None,
) -> Standing | None:
    """Fill a report from a source; returns the host's state where the source ends, None if it cannot be read."""
    chip = report.chip
    report.run, report.run_id = source.name, source.run_id
    case = findings.read(partial(open_case, chip, source, trust, last, report.span, heard), chip=chip)
    if case is None:
        return None
    report.describe(case, source.nonce, now)
    report.unseen = sorted(run.hex() for run in set(case.standing.runs) - {each.run.metadata.run_id for each in own})
    if report.unseen and trust.maximum_flop is not None:
        text = f"chip {chip}: {unseen_text(report.unseen)}, and the rules allow {trust.maximum_flop}"
        findings.doubt(text, chip=chip)
    if last is not None:
        report.extends = case.last is not None
    audits: list[ScheduleAudit] = []
    report.sound = is_sound(case, trust, findings, audits)
    report.audit = audits[0] if audits else None
    laws = laws_of(case, trust, own, findings)
    if source.nonce is not None and trust.beacon_seconds is not None:
        life = SignsOfLife(chip, trust.beacon_seconds, last=last, until=case.quote, now=now, since=case.since)
        laws.append((Guard.TIME, life))
    ends = report.span is None or not report.span.why
    judged = explain_records(report, case, laws, trust, own, findings, last, ends and heard is not None)
    ledger = next((law for _, law in laws if isinstance(law, Ledger)), None)
    if ledger is not None:
        ledger.close()
        report.books = ledger.books
        report.repeated = frozenset(ledger.repeated) & {record.counter for record in report.taken}
        report.repeated -= set(report.unexplained)
    report.prunable = accepted_part(case, judged) if report.sound else None
    report.earlier = case.standing.drawn
    if report.prunable is not None and ledger is not None:
        report.prunable = _with_books(report.prunable, case, own, judged)
    if report.prunable is not None and report.audit is not None:
        since, standing = report.prunable
        drawn = replace(report.audit.draws_before(_first_open(since)), earlier=report.earlier).summed()
        report.prunable = since, replace(standing, drawn=drawn)
    return case.standing.extend(case.records)


def _first_open(since: LogCheckpoint) -> int:
    """The first epoch that has not ended at a checkpoint."""
    return since.epochs - (since.epoch_record is not None)


def _with_books(
    accepted: tuple[LogCheckpoint, Standing], case: OpenedCase, own: Sequence[Transcript], judged: Sequence[LogRecord]
) -> tuple[LogCheckpoint, Standing]:
    """The accepted part of a log, with what the ledger holds at its end."""
    since, standing = accepted
    ledger = Ledger(case.chip_id, needs_of_chip(case.chip_id, own), case.since, case.standing)
    for record in judged[: since.size - case.since.size]:
        with suppress(EvidenceError):  # which was found before
            ledger.take(record)
    return since, replace(standing, books={run: book.to_works() for run, book in ledger.books.items()})


def unseen_text(runs: Sequence[str]) -> str:
    """Why one cannot add up what was computed, in words."""
    text = f"run {runs[0][:16]}… was accepted at an earlier inspection and is not handed over, so that its FLOP are "
    return text + "not known"


def is_sound(case: ChipCase, trust: Trust, findings: Findings, audits: list[ScheduleAudit] | None = None) -> bool:
    """Whether identity, quote, log and schedule of a chip pass: what a chip says by itself, whatever runs declare.

    What the audit of the schedule found is put into ``audits``.
    """
    chip = case.chip_id
    found, doubts = len(findings.found), len(findings.doubts)
    if trust.registry is not None:
        certificate = case.identity.certificate_digest
        findings.check(Guard.REGISTRY, partial(trust.registry.check_certificate, chip, certificate), chip=chip)
    for name, check in CHIP_GUARDS.items():
        if name == "schedule" and len(findings.found) > found:
            break  # what already fails could claim any number of ticks
        result = findings.check(_GUARD_OF.get(name, Guard.LOG_CHAIN), partial(check, case), chip=chip)
        if isinstance(result, ScheduleAudit) and audits is not None:
            audits.append(result)
    return (len(findings.found), len(findings.doubts)) == (found, doubts)


def is_listed(chip: str, trust: Trust, findings: Findings) -> bool:
    """Whether the trust file, and the registry's signed view where there is one, give the chip to a lab."""
    before = len(findings.found)
    if chip not in trust.chips:
        findings.add(Guard.IDENTITY, f"chip {chip} is not listed in the trust file", chip=chip)
    elif trust.registry is not None:
        findings.check(Guard.REGISTRY, partial(trust.registry.check_listed, chip, trust.chips[chip]), chip=chip)
    return len(findings.found) == before


def runs_of_owner(chip: str, transcripts: Sequence[Transcript], trust: Trust) -> list[Transcript]:
    """The runs of the lab to which the registry gives the chip."""
    return [item for item in transcripts if item.run.metadata.lab == trust.chips.get(chip)]


def sources_of(chip: str, transcripts: Sequence[Transcript], answers: Answers | None) -> list[EvidenceSource]:
    """Everywhere that evidence of the chip lies, in its lab's runs and outside of them."""
    sources = [
        EvidenceSource(name=item.run.name, run_id=item.run.manifest.run, read=partial(_read_from_run, item, chip))
        for item in transcripts
        if chip_path(chip, CHIP_FILES[0]) in item.run.files
    ]
    return sources if answers is None else [*answers.sources(chip), *sources]


def _read_from_run(item: Transcript, chip: str, name: str) -> bytes:
    return item.run.read(chip_path(chip, name))


def _refused(chip: str) -> None:
    raise EvidenceError(f"chip {chip} was drawn, but no evidence of it was handed over: a refusal counts as a failure")


def _latest(chip: str, sources: Sequence[EvidenceSource]) -> EvidenceSource:
    """The answer to a live challenge, or else the source whose log goes furthest; every other log is part of its past.

    Two logs of one chip where neither extends the other prove by themselves that one was rolled back.
    """
    logs = [(source.read(LOG), source) for source in sources]
    furthest, latest = max(logs, key=lambda entry: (entry[1].nonce is not None, log_extent(entry[0])[1]))
    for log, source in logs:
        if logs_contradict(furthest, log) or log_extent(log)[1] > log_extent(furthest)[1]:
            raise EvidenceError(f"chip {chip}: its logs in {latest.place} and {source.place} contradict each other")
    return latest
