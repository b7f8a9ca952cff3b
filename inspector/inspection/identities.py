"""Two chips with one identity, or two logs of one chip: what only a clone or a rolled-back chip can produce.

A certificate names one piece of silicon (TCG DICE), whose log only grows. All evidence of an inspection is compared,
also that of chips which were not drawn: two quotes of one identity prove by themselves that one is a clone's.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from firmware_sim import BIRTH, RECORD_BYTES, LogCheckpoint, LogRecord, limits, open_quote, parse_log
from firmware_sim.checks import CloneError, check_distinct, check_log_chain, check_log_quoted
from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import Digest, Quote, log_extent, logs_contradict
from firmware_sim.identity import ChipIdentity, check_maker, read_chain
from inspector.inspection.answers import Answers, EvidenceSource
from inspector.inspection.guards import Guard
from inspector.inspection.provenance import runs_of_owner, sources_of
from inspector.inspection.transcripts import Transcript
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Findings

__all__ = ["check_clone_proof", "examine_identities"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Witness:
    """Evidence under the name of one chip, by an identity that a trusted maker vouches for."""

    chip: str
    source: EvidenceSource
    identity: ChipIdentity
    quote: Quote

    @property
    def place(self) -> str:
        return self.source.place

    def log(self) -> bytes:
        """The chip's log, up to where its quote says: what is longer was not written by the chip, and is not parsed."""
        log = self.source.read("log.bin")
        if log_extent(log)[1] != self.quote.log_size:
            raise EvidenceError(
                f"the log in {self.place} does not have the {self.quote.log_size} records that the chip's quote states"
            )
        return log

    def records(self) -> list[LogRecord]:
        return parse_log(self.log(), chip=self.chip)

    def check_quoted(self) -> None:
        """EvidenceError unless the log leads to the head that is quoted."""
        _check_quoted(self.records(), self.identity, self.quote)


def examine_identities(
    transcripts: Sequence[Transcript], trust: Trust, answers: Answers, findings: Findings
) -> list[dict[str, object]]:
    """Compare the identities in all evidence of registered chips; return a proof for each clone that was found.

    Evidence that no trusted maker vouches for proves nothing here; it counts against its own chip where that is drawn.
    """
    proofs: list[dict[str, object]] = []
    for first, second in _neighbours(_witnesses(transcripts, trust, answers)):
        try:
            if first.chip != second.chip or not _extends(first, second):
                check_distinct([(each.identity, each.records()) for each in (first, second)])
        except EvidenceError as error:
            impostor = first if first.chip != first.identity.chip_id else second
            text = f"chip {impostor.chip}: its identity cannot be compared: {error}"
            if isinstance(error, CloneError):
                text = _text(first, second)
            findings.add(Guard.CLONE, text, chip=impostor.chip)
            if len(proofs) < limits.CLONE_PROOFS.most:
                proofs.append(_proof(first, second, text, trust))
    return proofs


def check_clone_proof(proof: Mapping[str, Any], ca_digests: Collection[Digest]) -> None:
    """Check, with nothing but the makers' CAs, that two diverging logs are covered by quotes of one identity.

    Raises:
        EvidenceError: the proof does not show that.
    """
    try:
        (chain, quote, log), (other_chain, other_quote, other_log) = (
            (each["chain"].encode(), each["quote"].encode(), base64.b64decode(each["log"], validate=True))
            for each in proof["evidence"]
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise EvidenceError("this is not a proof of a clone, or it does not contain the two logs") from None
    one = _quoted(chain, quote, log, ca_digests)
    other = _quoted(other_chain, other_quote, other_log, ca_digests)
    if one.certificate_digest != other.certificate_digest and one.alias_key != other.alias_key:
        raise EvidenceError("the two logs belong to chips with different identities")
    if not logs_contradict(log, other_log):
        raise EvidenceError(
            "the two logs do not contradict each other: one extends the other, or they were quoted at different times"
        )


def _quoted(chain: bytes, quote: bytes, log: bytes, ca_digests: Collection[Digest]) -> ChipIdentity:
    """The identity whose quote covers the whole log; EvidenceError if none does."""
    identity = read_chain(chain)
    check_maker(identity, ca_digests)
    _check_quoted(parse_log(log, chip=identity.chip_id), identity, open_quote(quote, identity.alias_key))
    return identity


def _check_quoted(records: Sequence[LogRecord], identity: ChipIdentity, quote: Quote) -> None:
    """The records lead, hash by hash, to the head that is quoted, whatever came before the first of them."""
    first = records[0]
    since = LogCheckpoint(size=first.counter, head=first.previous) if first.counter else BIRTH
    check_log_chain(records, identity, since)
    check_log_quoted(records, quote, since)


def _witnesses(transcripts: Sequence[Transcript], trust: Trust, answers: Answers) -> Iterator[_Witness]:
    for chip in sorted(trust.chips):
        for source in sources_of(chip, runs_of_owner(chip, transcripts, trust), answers):
            try:
                identity = read_chain(source.read("chain.pem"))
                check_maker(identity, trust.chip_trust.ca_digests)
                quote = open_quote(source.read("quote.json"), identity.alias_key)
            except EvidenceError:
                continue
            yield _Witness(chip=chip, source=source, identity=identity, quote=quote)


def _neighbours(witnesses: Iterable[_Witness]) -> Iterator[tuple[_Witness, _Witness]]:
    """Pairs under one certificate or key, next to each other by the size of the log.

    Of one chip's logs each must begin the next longer one, so that neighbours suffice.
    """
    groups: dict[object, list[_Witness]] = {}
    for witness in witnesses:
        for mark in (witness.identity.certificate_digest, witness.identity.alias_key):
            groups.setdefault(mark, []).append(witness)
    seen = set()
    for group in groups.values():
        for first, second in pairwise(sorted(group, key=lambda witness: witness.quote.log_size)):
            if (id(first), id(second)) not in seen:
                seen.add((id(first), id(second)))
                yield first, second


def _extends(first: _Witness, second: _Witness) -> bool:
    """Whether two logs of one chip, the one that ends first first, are one log at two times.

    Where the chip has let go of what lies between them, each has to be one that it quoted.
    """
    one, other = first.log(), second.log()
    if log_extent(one)[1] <= log_extent(other)[0]:
        first.check_quoted()
        second.check_quoted()
    return not logs_contradict(one, other)


def _text(first: _Witness, second: _Witness) -> str:
    if first.chip == second.chip:
        return f"chip {first.chip}: its logs in {first.place} and {second.place} contradict each other"
    return f"chips {first.chip} ({first.place}) and {second.chip} ({second.place}) present one identity"


def _proof(first: _Witness, second: _Witness, text: str, trust: Trust) -> dict[str, object]:
    """What a third party needs; a log that is missing, or too long to be quoted, is not in it."""
    evidence = []
    for each in (first, second):
        try:
            log = each.source.read("log.bin")
        except EvidenceError:
            log = b""
        short = 0 < len(log) // RECORD_BYTES <= limits.STRANGE_LOG_RECORDS.most
        evidence.append(
            {
                "chip": each.chip,
                "place": each.place,
                "chain": each.source.read("chain.pem").decode(),
                "quote": each.source.read("quote.json").decode(),
                "log": base64.b64encode(log).decode() if short else None,
            }
        )
    proof: dict[str, object] = {"text": text, "evidence": evidence}
    try:
        check_clone_proof(proof, trust.chip_trust.ca_digests)
    except EvidenceError as error:
        return {**proof, "stands_alone": False, "rests_on": f"the lab's signed runs: {error}"}
    return {**proof, "stands_alone": True}
