"""What a firmware engineer reads off a chip: from its folder while the power is off, or from the evidence that it gave.

Nothing is changed by a look, and no key is shown before its epoch has ended.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from firmware_sim._silicon import Silicon, check_chip_file, powered_down
from firmware_sim.audit import MAX_AUDITED_TICKS, EpochSpan, epoch_spans
from firmware_sim.checks import ChipEvidence, ChipTrust, check_chip, records_of
from firmware_sim.errors import ChipwitnessError, EvidenceError
from firmware_sim.evidence.acceptance import read_acceptance
from firmware_sim.evidence.chiplog import LogRecord, RecordKind, parse_log
from firmware_sim.evidence.digest import Digest
from firmware_sim.evidence.pruning import BIRTH, LogCheckpoint
from firmware_sim.evidence.quote import Quote, open_quote
from firmware_sim.evidence.work import TICK, Roofline, Work
from firmware_sim.firmware import FirmwareChip
from firmware_sim.identity import ChipIdentity, issue_alias, read_chain
from firmware_sim.nvram import PosixDisk
from firmware_sim.profiles import NvramStatus
from firmware_sim.schedule import EpochKey, Unaudited, decode_epoch_keys, derive_epoch_key, scheduled, threshold

__all__ = ["ChipView", "EpochRow", "read_evidence", "read_silicon"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRow:
    """One epoch: from which time to which it lasted, in ticks; ticks for which a snapshot was due, and that hold one.

    `due` is None where the key is not out, or the log claims more ticks than an audit looks at; `ended` is the kind of
    the record that ended it, None while it is open.
    """

    epoch: int
    boot: int
    first: float
    last: float
    due: tuple[int, ...] | None
    taken: tuple[int, ...]
    ended: RecordKind | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChipView:
    """A chip as its folder or its evidence shows it.

    `log_size` and `log_head` are of the whole log, `records` those that the chip holds or handed over. `counter` is the
    monotonic counter, `tick` and `busy` are the time of this boot by `roofline`, that of its device. `memory` says how
    much of its NVRAM is in use, `quotas` how many records of each kind it takes: None in evidence, as `quote` is None
    in a chip's folder, which keeps none.
    `since` is the checkpoint behind which the records begin, and `signer` the id of the key that is said to have signed
    it: None in a chip's folder, which keeps no signature.
    `problem` is what is wrong: why the chip would not boot, or why the evidence does not hold together; then `epochs`
    is empty.
    """

    identity: ChipIdentity
    records: Sequence[LogRecord]
    log_size: int
    log_head: bytes
    counter: int
    boot: int
    tick: int
    busy: int
    work: Work
    roofline: Roofline
    snapshot_rate: Fraction
    snapshot_algorithm: str
    epochs: tuple[EpochRow, ...]
    memory: NvramStatus | None
    quotas: Mapping[RecordKind, int] | None
    quote: Quote | None
    problem: str | None
    since: LogCheckpoint = BIRTH
    signer: str | None = None

    def counts(self) -> Counter[RecordKind]:
        """How many of `records` are of each kind."""
        return Counter(record.kind for record in self.records)


def read_silicon(folder: Path) -> ChipView:
    """Look at the chip in `folder`, in a copy, whose start by honest firmware is tried.

    Raises:
        MailboxError: the chip is powered on.
        NvramError: the folder's content was altered or is missing.
    """
    with _copied(folder) as copy:
        silicon = Silicon(copy, PosixDisk())
        try:
            fuses, firmware, state, counter = silicon.fuses, silicon.firmware, silicon.state, silicon.nvram.sequence
            log = silicon.log.read()
            records = parse_log(log, chip=fuses.secrets.chip_id) if log else []
        finally:
            silicon.close()
        problem = _why_not_booting(copy)
    spans = epoch_spans(records, fuses.roofline, state.checkpoint) if records and not problem else []
    keys = [
        EpochKey(epoch=span.epoch, key=derive_epoch_key(fuses.schedule_secret, span.epoch))
        for span in spans
        if span.ended is not None
    ]
    return ChipView(
        identity=read_chain(issue_alias(fuses.secrets, firmware)),
        records=records,
        log_size=state.log_size,
        log_head=state.log_head,
        counter=counter,
        boot=records[-1].boot if records else state.checkpoint.boot,
        tick=state.tick,
        busy=state.busy,
        work=state.work,
        roofline=fuses.roofline,
        snapshot_rate=fuses.snapshot_rate,
        snapshot_algorithm=fuses.algorithm,
        epochs=_rows(spans, keys, fuses.snapshot_rate),
        memory=fuses.nvram.status(Counter(record.kind for record in records), released=state.released, changes=counter),
        quotas=fuses.nvram.quotas,
        quote=None,
        problem=problem,
        since=state.checkpoint,
    )


def read_evidence(evidence: ChipEvidence, chip_id: str) -> ChipView:
    """Look at the evidence of chip `chip_id`, which is compared with itself: whom to trust is another question.

    Raises:
        EvidenceError: chain, quote or log cannot be opened.
    """
    identity = read_chain(evidence.chain)
    quote = open_quote(evidence.quote, identity.alias_key)
    records = parse_log(evidence.log, chip=identity.chip_id)
    since, signer = (BIRTH, None) if not records[0].counter else read_acceptance(evidence.checkpoint, chip_id)
    problem = _problem(evidence, chip_id, identity, quote, records, since)
    spans = [] if problem else epoch_spans(records, quote.roofline, since)
    rows = _rows(spans, decode_epoch_keys(evidence.epoch_keys) if spans else [], quote.snapshot_rate)
    return ChipView(
        identity=identity,
        records=records,
        log_size=quote.log_size,
        log_head=quote.log_head,
        counter=quote.counter,
        boot=quote.boot,
        tick=quote.tick,
        busy=records[-1].busy,
        work=records[-1].work,
        roofline=quote.roofline,
        snapshot_rate=quote.snapshot_rate,
        snapshot_algorithm=quote.snapshot_algorithm,
        epochs=rows,
        memory=None,
        quotas=None,
        quote=quote,
        problem=problem,
        since=since,
        signer=signer,
    )


def _problem(
    evidence: ChipEvidence,
    chip_id: str,
    identity: ChipIdentity,
    quote: Quote,
    records: Sequence[LogRecord],
    since: LogCheckpoint,
) -> str | None:
    """What is wrong with a chip's evidence, whoever made it; None if nothing is."""
    trust = ChipTrust(
        ca_digests=[identity.maker_digest],
        measurements={
            Digest("sha256", since.measurement),
            *(Digest("sha256", record.digest) for record in records_of(records, RecordKind.BOOT)),
        },
        minimum_security_version=0,
        snapshot_rate=quote.snapshot_rate,
        snapshot_algorithm=quote.snapshot_algorithm,
    )
    try:
        check_chip(
            evidence,
            chip_id=chip_id,
            trust=trust,
            nonce=quote.nonce,
            verifier_id=quote.verifier_id,
            last=None,
            since=since,
        )
    except Unaudited:
        return None  # the last check, of a chip that is merely old: its epochs show nothing as due
    except ChipwitnessError as error:
        return str(error)
    return None


@contextmanager
def _copied(folder: Path) -> Iterator[Path]:
    """A copy of a chip's folder; taking it needs the lock that a chip which runs holds."""
    with tempfile.TemporaryDirectory() as place:
        copy = Path(place) / "chip"
        with powered_down(folder):
            try:
                copy.mkdir()
                for path in folder.iterdir():
                    check_chip_file(path)
                    shutil.copyfile(path, copy / path.name)
            except OSError:
                raise EvidenceError(f"the chip folder {folder} can't be read") from None
        yield copy


def _why_not_booting(folder: Path) -> str | None:
    try:
        FirmwareChip.power_on(folder).cut_power()
    except ChipwitnessError as error:
        return str(error)
    return None


def _rows(spans: Sequence[EpochSpan], keys: Sequence[EpochKey], rate: Fraction) -> tuple[EpochRow, ...]:
    revealed = {key.epoch: key.key for key in keys}
    few = sum(max(span.end - span.start, 0) for span in spans) <= MAX_AUDITED_TICKS * TICK
    limit = threshold(rate)
    return tuple(
        EpochRow(
            epoch=span.epoch,
            boot=span.boot,
            first=span.start / TICK,
            last=span.end / TICK,
            due=tuple(
                moment // TICK for moment in scheduled(revealed[span.epoch], span.boot, span.start, span.end, limit)
            )
            if few and span.epoch in revealed
            else None,
            taken=tuple(each.record.tick for each in span.snapshots),
            ended=None if span.ended is None else span.ended.kind,
        )
        for span in spans
    )
