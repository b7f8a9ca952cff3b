"""What one chip says, and whether the declared runs explain it (Shavit 2023, sections 3 and 4; PAPERS S4–S6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from firmware_sim import (
    EMPTY_MEMORY,
    ChipIdentity,
    EpochKey,
    LogRecord,
    Quote,
    RecordKind,
    check_chain,
    check_quote,
    check_schedule,
    decode_epoch_keys,
    genesis_digest,
    open_quote,
    parse_log,
    verify_chain,
)
from firmware_sim.errors import EvidenceError
from inspector.findings import Findings
from inspector.guards import Guard
from inspector.transcripts import Transcript
from inspector.trust import Trust
from monitor.transcript.layout import CHIP_FILES, chip_path

__all__ = ["ChipReport", "examine_chip"]


@dataclass(slots=True, kw_only=True)
class ChipReport:
    """What was read off one chip.

    Attributes:
        snapshots: (run id, step) of each explained snapshot, in the order of the log.
        gaps: power gaps, as record numbers.
    """

    chip: str
    run: str = ""
    shard: int | None = None
    certificate: str = ""
    log_size: int = 0
    log_head: str = ""
    snapshots: list[tuple[str, int]] = field(default_factory=list)
    unexplained: list[int] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "chip": self.chip,
            "run": self.run,
            "shard": self.shard,
            "certificate": self.certificate,
            "log_size": self.log_size,
            "log_head": self.log_head,
            "snapshots": [{"run_id": run_id, "step": step} for run_id, step in self.snapshots],
            "unexplained_records": self.unexplained,
            "power_gaps": self.gaps,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    chain: bytes
    quote: bytes
    log: bytes
    epochs: bytes


def examine_chip(chip: str, transcripts: Sequence[Transcript], trust: Trust, findings: Findings) -> ChipReport:
    """Read a chip's evidence and match every record of its log to the declared runs.

    A chip of the registry without evidence is a refusal, and counts as a failure.
    """
    report = ChipReport(chip=chip)
    holder = next((item for item in transcripts if chip_path(chip, CHIP_FILES[0]) in item.run.files), None)
    if holder is None:
        findings.read(lambda: _refused(chip), chip=chip)
        return report
    report.run = holder.run.folder.name
    evidence = findings.read(lambda: _load(chip, holder), chip=chip)
    if evidence is None:
        return report
    identity = findings.read(partial(_identify, chip, evidence.chain, trust, findings), chip=chip)
    records = findings.read(partial(parse_log, evidence.log, chip=chip), chip=chip)
    if identity is None or records is None:
        return report
    quote = findings.read(partial(open_quote, evidence.quote, identity.alias_key), chip=chip)
    keys = findings.read(partial(decode_epoch_keys, evidence.epochs), chip=chip)
    if quote is None or keys is None:
        return report
    report.certificate = str(identity.certificate_digest)
    report.log_size, report.log_head = quote.log_size, quote.log_head.hex()
    report.gaps = [record.counter for record in records if record.kind is RecordKind.POWER_GAP]
    findings.check(Guard.LOG_CHAIN, partial(_check_log, chip, identity, quote, records, trust), chip=chip)
    findings.check(Guard.SCHEDULE, partial(_check_schedule, chip, quote, records, keys), chip=chip)
    _match(report, records, transcripts, findings)
    return report


def _refused(chip: str) -> None:
    raise EvidenceError(f"chip {chip} was drawn, but no evidence of it was handed over: a refusal counts as a failure")


def _load(chip: str, holder: Transcript) -> _Evidence:
    chain, epochs, log, quote = (holder.run.read(chip_path(chip, name)) for name in CHIP_FILES)
    return _Evidence(chain=chain, quote=quote, log=log, epochs=epochs)


def _identify(chip: str, chain: bytes, trust: Trust, findings: Findings) -> ChipIdentity:
    """Whose key signed the evidence; with the guard off, whoever the chain names."""
    try:
        identity = verify_chain(
            chain,
            trusted_ca_digests=trust.makers,
            allowed_measurements=trust.measurements,
            minimum_security_version=trust.minimum_security_version,
        )
    except EvidenceError as error:
        raise EvidenceError(f"chip {chip}: {error}") from None
    if identity.chip_id != chip:
        findings.add(Guard.IDENTITY, f"chip {chip}: its certificate is that of chip {identity.chip_id}", chip=chip)
    return identity


def _check_log(chip: str, identity: ChipIdentity, quote: Quote, records: list[LogRecord], trust: Trust) -> None:
    """The log starts with this chip's genesis, hangs together, and is the one that the fresh quote covers."""
    genesis = genesis_digest(chip, identity.certificate_digest, records[0].run_id)
    check_chain(records, genesis, chip=chip)
    check_quote(quote, identity, records, nonce=trust.nonce, verifier_id=trust.verifier)


def _check_schedule(chip: str, quote: Quote, records: list[LogRecord], keys: tuple[EpochKey, ...]) -> None:
    check_schedule(chip, records, keys, quote.snapshot_rate)


def _match(
    report: ChipReport, records: list[LogRecord], transcripts: Sequence[Transcript], findings: Findings
) -> None:
    """Each record must belong to exactly one declared run, in the order commit, then snapshot."""
    runs = {transcript.run.metadata.run_id: transcript for transcript in transcripts}
    committed: set[tuple[bytes, int]] = set()
    for record in records:
        if record.kind not in (RecordKind.REGIONS, RecordKind.COMMIT, RecordKind.SNAPSHOT):
            continue
        if record.kind is RecordKind.SNAPSHOT and record.digest == EMPTY_MEMORY.value:
            continue
        where = {"chip": report.chip, "record": record.counter, "step": record.step}
        transcript = runs.get(record.run_id)
        if transcript is None or report.chip not in transcript.run.metadata.chips:
            report.unexplained.append(record.counter)
            text = f"chip {report.chip}, record {record.counter}: belongs to a run that was not declared"
            findings.add(Guard.SNAPSHOT, text, **where)
            continue
        report.shard = transcript.run.metadata.chips.index(report.chip)
        if record.kind is RecordKind.REGIONS:
            _match_regions(report, record, transcript, findings)
        elif record.kind is RecordKind.COMMIT:
            committed.add((record.run_id, record.step))
            _match_commitment(report, record, transcript, findings)
        else:
            if (record.run_id, record.step) not in committed:
                text = f"chip {report.chip}, record {record.counter}: step {record.step} was not committed before it"
                findings.add(Guard.COMMITMENT, text, **where)
            _match_snapshot(report, record, transcript, findings)
    for transcript in transcripts:
        if report.chip in transcript.run.metadata.chips:
            _match_missing(report, transcript, committed, findings)


def _match_regions(report: ChipReport, record: LogRecord, transcript: Transcript, findings: Findings) -> None:
    assert report.shard is not None
    if record.digest != transcript.region_tables[report.shard]:
        findings.add(
            Guard.COMMITMENT,
            f"chip {report.chip}, record {record.counter}: the memory layout is not that of shard {report.shard}",
            chip=report.chip,
            record=record.counter,
        )


def _match_commitment(report: ChipReport, record: LogRecord, transcript: Transcript, findings: Findings) -> None:
    known = record.step < len(transcript.leaves)
    if not known or record.digest != transcript.tree.root(record.step + 1):
        findings.add(
            Guard.COMMITMENT,
            f"chip {report.chip}, record {record.counter}: step {record.step} was committed with another log head",
            chip=report.chip,
            record=record.counter,
            step=record.step,
        )


def _match_snapshot(report: ChipReport, record: LogRecord, transcript: Transcript, findings: Findings) -> None:
    assert report.shard is not None
    known = record.step < len(transcript.leaves)
    if known and record.digest == transcript.leaves[record.step].state.shards[report.shard].value:
        report.snapshots.append((record.run_id.hex(), record.step))
        return
    report.unexplained.append(record.counter)
    findings.add(
        Guard.SNAPSHOT,
        f"chip {report.chip}, record {record.counter}: the snapshot claimed for step {record.step} "
        f"is not shard {report.shard} of any declared state at that step",
        chip=report.chip,
        record=record.counter,
        step=record.step,
        tick=record.tick,
    )


def _match_missing(
    report: ChipReport, transcript: Transcript, committed: set[tuple[bytes, int]], findings: Findings
) -> None:
    """The chip must have heard of every step of a finished run in which it took part."""
    run_id = transcript.run.metadata.run_id
    missing = [leaf.step for leaf in transcript.leaves if (run_id, leaf.step) not in committed]
    if missing:
        findings.add(
            Guard.COMMITMENT,
            f"chip {report.chip}: never heard of step {missing[0]} of run {transcript.run.folder.name}",
            chip=report.chip,
            step=missing[0],
        )
