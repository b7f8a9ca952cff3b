"""Judge the past spans of chips that changed hands, by the evidence that the registry keeps of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

from firmware_sim import LogPosition
from firmware_sim.errors import EvidenceError, Unreadable
from firmware_sim.evidence import logs_contradict
from inspector.inspection.answers import Answers, EvidenceSource
from inspector.inspection.cases import open_case
from inspector.inspection.chip_report import ChipReport
from inspector.inspection.commits import is_empty_snapshot
from inspector.inspection.explanation import OF_RUNS, match_missing
from inspector.inspection.guards import Guard
from inspector.inspection.ownership import Span, past_spans, spans_of
from inspector.inspection.provenance import EarlierRuns, answering, examine_source, sources_of
from inspector.inspection.transcripts import Transcript
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Findings
from monitor.transcript.layout import CHIP_CHECKPOINT, CHIP_FILES

__all__ = ["check_registered", "deposited", "examine_past", "holds_deposit"]


def examine_past(
    labs: Collection[str],
    transcripts: Sequence[Transcript],
    trust: Trust,
    findings: Findings,
    answers: Answers,
    memory: Mapping[str, LogPosition],
) -> tuple[list[ChipReport], EarlierRuns, dict[str, list[EvidenceSource]]]:
    """Judge what chips did for these labs before they changed hands, by what was deposited when their spans ended.

    A record counts against the lab in whose span it lies. Work of a chip that was gone counts against no one.

    Args:
        memory: where each chip's log ended at earlier inspections.

    Returns:
        The reports; by chip and lab, the steps of runs that the chip had committed; by span, where its evidence lies.
    """
    reports: list[ChipReport] = []
    heard: EarlierRuns = {}
    sources: dict[str, list[EvidenceSource]] = {}
    spans = [span for span in past_spans(labs, trust) if not span.shows_nothing]
    for number, span in enumerate(spans):
        report, place = ChipReport(chip=span.chip, span=span), (span.chip, span.lab)
        reports.append(report)
        with answering(report, findings):
            source = findings.read(partial(deposited, span, trust, answers), chip=span.chip)
            if source is None:
                heard |= {} if span.gone else {place: None}
                continue
            if span.gone:
                findings.read(partial(_idle, span, source, trust), chip=span.chip)
                continue
            findings.read(partial(_check_seen, span, memory.get(span.chip), trust), chip=span.chip)
            sources[span.name] = [source]
            own = [item for item in transcripts if item.run.metadata.lab == span.lab]
            for other in sources_of(span.chip, own, None):
                findings.read(partial(_agree, span.chip, source, other), chip=span.chip)
            before = heard.get(place, {})
            standing = examine_source(report, source, own, trust, findings, None, 0, before)
            heard[place] = None if standing is None or before is None else standing.runs
            last = all((each.chip, each.lab) != place or each.gone for each in spans[number + 1 :])
            if standing is not None and before is not None and last and trust.chips.get(span.chip) != span.lab:
                for item in own:
                    if span.chip in item.run.metadata.chips:
                        match_missing(report, item, set(), standing, findings)
    return reports, heard, sources


def deposited(span: Span, trust: Trust, answers: Answers) -> EvidenceSource:
    """Return the chip's answer at the end of a span; Unreadable, with the remedy, if no copy of it was given."""
    span.require_known()
    assert span.end is not None
    key = str(span.end.deposit)
    read = partial(answers.read, key.replace(":", "-"))
    try:
        files = {name: read(name) for name in CHIP_FILES}
    except EvidenceError:
        text = (
            f"chip {span.chip}: the registry holds its answer at record {span.end.size}, but no copy was given: have "
            "the registry write one "
        )
        text += "with 'registry trust --deposits DIR', and pass it with --answers DIR; in a world, DIR is "
        raise Unreadable(f"{text}registry/deposits") from None
    with suppress(EvidenceError):
        files[CHIP_CHECKPOINT] = read(CHIP_CHECKPOINT)
    if not holds_deposit(span, files, trust):
        raise Unreadable(
            f"chip {span.chip}: the copy of what the registry keeps of this chip is damaged: have the registry write "
            "it again"
        )
    return EvidenceSource(name="", read=partial(_of, span.chip, files), deposited=True)


def holds_deposit(span: Span, files: Mapping[str, bytes], trust: Trust) -> bool:
    """Whether files have the digest of a span's deposit in the registry's signed view; EvidenceError without a view."""
    from inspector.registry.positions import deposit_digest  # brings a database library, which few inspections need

    assert trust.registry is not None
    trust.registry.entry(span.chip)
    return span.end is not None and deposit_digest(files) == span.end.deposit


def _of(chip: str, files: Mapping[str, bytes], name: str) -> bytes:
    if name not in files:
        raise EvidenceError(f"chip {chip}: what the registry keeps of this chip does not contain {name}")
    return files[name]


def _agree(chip: str, deposit: EvidenceSource, other: EvidenceSource) -> None:
    if logs_contradict(deposit.read("log.bin"), other.read("log.bin")):
        raise EvidenceError(f"chip {chip}: its logs in {deposit.place} and {other.place} contradict each other")


def _idle(span: Span, source: EvidenceSource, trust: Trust) -> None:
    """Unreadable where a chip took part in runs while its owner did not have it, for which no lab answers."""
    worked = [each for each in open_case(span.chip, source, trust, None, span).records if each.kind in OF_RUNS]
    if worked and not all(map(is_empty_snapshot, worked)):
        text = f"chip {span.chip}: it worked while no lab held it, from record {worked[0].counter} on"
        raise Unreadable(f"{text}, and no lab answers for that")


def _check_seen(span: Span, last: LogPosition | None, trust: Trust) -> None:
    """Unreadable where a chip is gone since before a record that an earlier inspection has seen."""
    ends = spans_of(span.chip, trust)[-1] == span and span.why != "transfer"
    if ends and span.end is not None and last is not None and last.size > span.end.size:
        text = (
            f"chip {span.chip}: the registry says that it has been gone since record {span.end.size}, but an earlier "
        )
        raise Unreadable(f"{text}inspection saw it at record {last.size}: no lab answers for the records between")


def check_registered(transcript: Transcript, trust: Trust, findings: Findings) -> None:
    """A run may use only chips that the registry gives to its lab; whatever else it lists counts for nothing."""
    run = transcript.run
    lab = run.metadata.lab
    past = [span.chip for span in past_spans([lab], trust) if not span.shows_nothing]
    registered = {*trust.chips_of(lab), *past}
    for chip in run.metadata.chips:
        if chip not in registered:
            text = f"chip {chip}: the run uses it, but the registry does not give it to lab {lab}"
            said = "" if trust.registry is None else trust.registry.why_not(chip, lab)
            if said:
                text = f"chip {chip}: the run uses it, but {said}, and nothing that it signed before was deposited"
                findings.doubt(text, **run.where, chip=chip)
            else:
                findings.add(Guard.IDENTITY, text, **run.where, chip=chip)
