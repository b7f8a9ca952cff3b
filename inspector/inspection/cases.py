"""A chip's evidence, opened: its log from birth on, or from where an inspectorate has accepted it and the chip let go.

What lies before such a checkpoint was judged by its signer. It counts only from an inspectorate of the trust
file, and only for the log that begins there; one that begins at record 0 is judged as a whole.

How much of a chip's evidence is looked at before anybody has vouched for the chip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from firmware_sim import (
    BIRTH,
    RECORD_BYTES,
    LogCheckpoint,
    LogPosition,
    LogRecord,
    RecordKind,
    decode_epoch_keys,
    limits,
    open_quote,
)
from firmware_sim.checks import ChipCase, ChipTrust
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import NEWBORN, Standing, open_acceptance, parse_log
from firmware_sim.evidence.acceptance import Heard
from firmware_sim.identity import ChipIdentity, read_chain
from inspector.inspection.answers import EvidenceSource
from inspector.inspection.trust import Trust
from monitor.transcript.layout import CHIP_CHECKPOINT, CHIP_FILES

if TYPE_CHECKING:
    from inspector.inspection.ownership import Span
    from inspector.registry.statements import Position

__all__ = ["OpenedCase", "accepted_part", "admitted", "open_case"]


def admitted(log: bytes, identity: ChipIdentity, trust: ChipTrust, *, chip: str) -> bytes:
    """Return a chip's log, if its maker is trusted or it is short; EvidenceError otherwise.

    What a maker's chip has logged is bounded by its firmware; a chip that was made up can have any log.
    """
    records = len(log) // RECORD_BYTES
    if identity.maker_digest not in trust.ca_digests and records > limits.STRANGE_LOG_RECORDS.most:
        raise EvidenceError(
            f"chip {chip}: no trusted maker vouches for it, and its log of {records} records is longer than such a "
            "chip may have"
        )
    return log


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedCase(ChipCase):
    """What the guards of a chip look at, and its host's state where the records begin."""

    standing: Standing = NEWBORN


def open_case(
    chip: str,
    source: EvidenceSource,
    trust: Trust,
    last: LogPosition | None,
    span: Span | None = None,
    heard: Mapping[bytes, Heard] | None = None,
) -> OpenedCase:
    """Open a chip's evidence under the key that its own chain names; the guards decide whether that chain counts.

    Re-inspecting the same quote is allowed.

    Args:
        span: the records that are looked at, of a chip that changes hands; None for all.
        heard: what the chip has heard of its owner's runs in earlier spans of this owner.

    Raises:
        EvidenceError: something cannot be read, or the log begins later than the chip's life and at no checkpoint that
            an inspectorate of the trust file has signed.
    """
    chain, epochs, log, quote = (source.read(name) for name in CHIP_FILES)
    identity = read_chain(chain)
    opened = open_quote(quote, identity.alias_key)
    records = parse_log(admitted(log, identity, trust.chip_trust, chip=chip), chip=chip)
    since, standing = _begins(chip, records[0].counter, source, trust)
    keys = decode_epoch_keys(epochs)
    if span is not None and span.start is not None and span.start.size > since.size:
        before, records = records[: span.start.size - since.size], records[span.start.size - since.size :]
        since, stood = since.extend(before), standing.extend(before)
        _check_taken_over(chip, since, span.start)
        standing = Standing(runs=heard or {}, attached=stood.attached, before=stood.before)
        first = since.epochs - (since.epoch_record is not None)
        keys = tuple(key for key in keys if key.epoch >= first)
    verifier, nonce = trust.challenge_of(trust.chips.get(chip))
    return OpenedCase(
        chip_id=chip,
        nonce=opened.nonce if source.deposited else nonce if source.nonce is None else source.nonce,
        verifier_id=opened.verifier_id if source.deposited else verifier,
        trust=trust.chip_trust,
        last=None if last == LogPosition.of(opened) else last,
        identity=identity,
        quote=opened,
        records=records,
        keys=keys,
        since=since,
        standing=standing,
    )


def _check_taken_over(chip: str, since: LogCheckpoint, start: Position) -> None:
    """A lab that took a chip over has signed which record was its last by then, so its log has to hold that one."""
    if (since.size, since.head) != (start.size, start.head):
        text = f"chip {chip}: record {start.size - 1} of its log is not the one in the registry"
        raise EvidenceError(f"{text}, after which a lab took the chip over")


def _begins(chip: str, first: int, source: EvidenceSource, trust: Trust) -> tuple[LogCheckpoint, Standing]:
    """What the records of a log that begins with record number `first` build on."""
    try:
        signed = source.read(CHIP_CHECKPOINT)
    except EvidenceError as error:
        if not first:
            return BIRTH, NEWBORN
        text = (
            f"chip {chip}: its log begins at record {first}, but there is no checkpoint for what came before: {error}"
        )
        raise EvidenceError(text) from None
    if not first:
        raise EvidenceError(
            f"chip {chip}: a checkpoint was handed over, although the log begins at record 0 and needs none"
        )
    since, standing = open_acceptance(signed, chip, trust.inspectorates)
    if since.size != first:
        text = (
            f"chip {chip}: its log begins at record {first}, but its checkpoint covers the first {since.size} records"
        )
        raise EvidenceError(text)
    return since, standing


def accepted_part(case: OpenedCase, judged: Sequence[LogRecord]) -> tuple[LogCheckpoint, Standing] | None:
    """Where the log may be pruned once its inspection has accepted it; None where nothing new can go.

    That is behind the newest answer to a challenge, or the end of a log that is full: all epochs before it have ended,
    and each committed step has had its tick.

    Args:
        judged: records of the case from the first on, up to the last that declared runs explain.
    """
    for end in range(len(judged), 0, -1):
        last = judged[end - 1]
        challenged = last.kind is RecordKind.QUOTE and end > 1 and judged[end - 2].kind is RecordKind.EPOCH
        if challenged or last.kind is RecordKind.SPENT:
            return case.since.extend(judged[:end]), case.standing.extend(judged[:end])
    return None
