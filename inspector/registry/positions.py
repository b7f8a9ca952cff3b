"""Positions in a chip's log at which it changes hands, and the evidence that the registry keeps of what came before.

A chip changes hands between two records of its log. The registry asks it then: the challenge is made from the newest
published view, so no answer can be older. The answer names the last record of the old holder. It stays with the
registry together with the opened epochs. An inspection judges the old holder by it when the chip is elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from firmware_sim import RecordKind, decode_epoch_keys, open_quote, parse_log
from firmware_sim.checks import CHIP_GUARDS, ChipCase, ChipTrust
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import (
    BIRTH,
    NO_WORK,
    Digest,
    digest_bytes,
    length_prefixed,
    logs_contradict,
    read_acceptance,
)
from firmware_sim.identity import read_chain
from inspector.registry._values import ChipRecord, ChipRef, ChipState, ClaimKind
from inspector.registry.publications import Revocation
from inspector.registry.statements import Claim, Position, Transfer
from monitor.transcript.layout import CHIP_CHECKPOINT, CHIP_FILES

__all__ = [
    "Files",
    "challenge_of",
    "check_in_hand",
    "check_position",
    "close_span",
    "deposit_digest",
    "position_of",
    "read_spans",
]

Files = Mapping[str, bytes]
"""A chip's answer, by the names that its files have in a run."""
_NO_HOLDER = ""
_SPAN_KEYS = {"deposit", "head", "holder", "size", "why"}
_HELD = ("expected chip", "quote request", "quote identity", "log chain", "log quoted", "life", "registers",
         "quote time", "epoch keys")  # fmt: skip
"""Checks that a deposit has to pass. An inspection judges the rest: the schedule, and whether runs explain the log."""
_NO_ONE_TRUSTED = ChipTrust(
    ca_digests=(), measurements=(), minimum_security_version=0, snapshot_rate=Fraction(1), snapshot_algorithm=""
)


def challenge_of(view: bytes, ref: ChipRef) -> bytes:
    """The nonce that a chip signs at its next record; it depends on a published view, so no one knew it before."""
    return hashlib.sha256(
        length_prefixed("chipwitness/registry-challenge/1", view, ref.chip, str(ref.sequence))
    ).digest()


def position_of(chip: str, files: Files) -> Position:
    """The place where the log of a chip's answer ends, and the digest of the answer.

    Raises:
        EvidenceError: a file is missing, unknown or malformed.
    """
    strange = set(files) - {*CHIP_FILES, CHIP_CHECKPOINT}
    if strange:
        raise EvidenceError(f"chip {chip}: its answer contains {min(strange)!a:.100}, which is not a file of an answer")
    missing = set(CHIP_FILES) - set(files)
    if missing:
        raise EvidenceError(f"chip {chip}: its answer does not contain {min(missing)}")
    quote = open_quote(files["quote.json"], read_chain(files["chain.pem"]).alias_key)
    return Position(size=quote.log_size, head=quote.log_head, deposit=deposit_digest(files))


def deposit_digest(files: Files) -> Digest:
    """The digest of all that a chip answered."""
    parts = [part for name, content in sorted(files.items()) for part in (name, content)]
    return digest_bytes("chipwitness/registry-deposit/1", length_prefixed(*parts))


def check_position(
    record: ChipRecord,
    position: Position,
    files: Files,
    before: Files | None,
    *,
    origin: str,
    challenges: Sequence[bytes] | None,
) -> None:
    """Check that the registered chip has quoted a position, and that the deposit holds all that led to it.

    Args:
        before: the chip's deposit before, whose log this one goes on from.
        origin: the registry in whose name the chip was asked.
        challenges: of which the chip must answer one, right after it was switched on; None where the last signed
            position counts, as of a chip that is lost.

    Raises:
        EvidenceError: says what is wrong with which record.
    """
    chip = record.chip
    if position_of(chip, files) != position:
        raise EvidenceError(f"chip {chip}: the deposited answer is not the one that was signed")
    identity = read_chain(files["chain.pem"])
    if str(identity.certificate_digest) != record.identity:
        raise EvidenceError(
            f"chip {chip}: presents the certificate {identity.certificate_digest}, another is registered"
        )
    case = _held(chip, files)
    quote, records = case.quote, case.records
    earlier = before is not None and position_of(chip, before).size >= position.size
    if before is not None and (earlier or logs_contradict(before["log.bin"], files["log.bin"])):
        raise EvidenceError(f"chip {chip}: its log does not continue from the record at which it changed hands before")
    if challenges is None:
        return
    if quote.verifier_id != origin or quote.nonce not in challenges:
        text = f"chip {chip}: its quote does not answer a challenge of this registry's newest views: ask the chip again"
        raise EvidenceError(f"{text} as 'registry challenge' says")
    kinds = {each.kind for each in records if each.boot == quote.boot}
    if RecordKind.BOOT not in kinds or RecordKind.REGIONS in kinds:
        raise EvidenceError(f"chip {chip}: a run's memory is attached: switch the chip off and on before asking it")


def check_in_hand(chip: str, position: Position, files: Files) -> None:
    """Check that the chip which the buyer now holds has done no work since the position that the seller signed.

    Raises:
        EvidenceError: the log does not go on from there, or holds records of a run since.
    """
    case = _held(chip, files)
    at = position.size - case.since.size
    if not 0 < at <= len(case.records) or case.records[at - 1].hash() != position.head:
        raise EvidenceError(f"chip {chip}: its log does not continue from record {position.size - 1}, which was signed")
    last = case.records[at - 1]
    for record in case.records[at:]:
        idle = record.work == (last.work if record.boot == last.boot else NO_WORK)
        if record.kind is RecordKind.REGIONS or not idle:
            raise EvidenceError(
                f"chip {chip}: it worked after its signed position, at record {record.counter}: send it back"
            )


def _held(chip: str, files: Files) -> ChipCase:
    """Open a chip's answer and run the checks of ``_HELD`` on it."""
    position_of(chip, files)
    identity = read_chain(files["chain.pem"])
    quote, records = open_quote(files["quote.json"], identity.alias_key), parse_log(files["log.bin"], chip=chip)
    since = BIRTH if not records[0].counter else read_acceptance(files.get(CHIP_CHECKPOINT, b""), chip)[0]
    case = ChipCase(
        chip_id=chip, nonce=quote.nonce, verifier_id=quote.verifier_id, trust=_NO_ONE_TRUSTED, last=None,
        identity=identity, quote=quote, records=records, keys=decode_epoch_keys(files["epochs.json"]), since=since
    )  # fmt: skip
    for name in _HELD:
        CHIP_GUARDS[name](case)
    return case


def close_span(
    spans: list[dict[str, object]],
    statement: Transfer | Claim | Revocation,
    position: Position | None,
    holder: str,
    state: ChipState,
) -> None:
    """Add the span that a statement ends to a chip's closed spans; a later statement may still say where it ended.

    A transfer without a position leaves open where the span ends. A chip that comes new from its maker is
    different: its first buyer holds it from its first record on. A chip that is gone belongs to no one from its last
    position on.

    Args:
        position: of the chip in the statement, None where that gives none.
        holder: who held the chip before the statement, state: the chip's state then.
    """
    last = spans[-1]["why"] if spans else ""
    gone = last not in ("", Transfer.kind, ClaimKind.FOUND.value)
    why = statement.claim.value if isinstance(statement, Claim) else statement.kind
    if last == Revocation.kind:
        return
    if isinstance(statement, Transfer):
        if position is None and state is ChipState.FABRICATED:
            return
        if statement.sender != holder:
            spans.pop()
        holder = statement.sender
    elif why == ClaimKind.FOUND.value:
        if not gone:
            return
        holder = _NO_HOLDER
    elif gone or (position is None and why != Revocation.kind):
        return
    proof: dict[str, object] = {"deposit": "", "head": "", "size": None}
    if position is not None:
        proof = {"deposit": str(position.deposit), "head": position.head.hex(), "size": position.size}
    spans.append({"holder": holder, "why": why, **proof})


def read_spans(entry: Mapping[str, Any]) -> list[tuple[str, str, Position | None]]:
    """Holder, reason and end of each closed span in a chip's entry; CallerError on any other form."""
    found: list[tuple[str, str, Position | None]] = []
    try:
        for span in entry.get("spans", []):
            if set(span) != _SPAN_KEYS or not all(isinstance(span[key], str) for key in ("holder", "why")):
                raise ValueError
            parts = [span["size"], span["head"], span["deposit"]]
            found.append((span["holder"], span["why"], None if span["size"] is None else Position.parse(parts)))
    except (AttributeError, LookupError, TypeError, ValueError, EvidenceError):
        raise CallerError(f"the spans of {entry.get('name')!a:.100} are malformed") from None
    return found
