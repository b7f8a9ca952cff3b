"""Signing and opening registry statements: one DSSE envelope for each signatory.

The payload type names the statement's kind and the capacity in which the key signs, so that a holder's release is worth
nothing as a receiver's acceptance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import SigningKey, VerifyingKey, canonical, decode_base64, open_sealed, seal
from firmware_sim.evidence import open_statement as open_in_toto
from firmware_sim.evidence import statement as in_toto
from inspector.registry._values import Capacity, check_name
from inspector.registry.census_statements import CensusDraw, CensusResult
from inspector.registry.errors import ForgedStatement, InvalidStatement
from inspector.registry.publications import Publication, ReferenceValues, Revocation
from inspector.registry.statements import Claim, Enrolment, Genesis, Transfer

__all__ = [
    "SignedStatement",
    "Statement",
    "countersign",
    "decode_payload",
    "decode_statement",
    "open_signed",
    "payload_type",
    "sign",
    "signer_key_id",
]

_PREDICATES = "https://chipwitness.org/registry"

Statement: TypeAlias = (
    Enrolment | Genesis | Transfer | Claim | CensusDraw | CensusResult | ReferenceValues | Revocation | Publication
)

_CLASSES: dict[str, type[Statement]] = {
    cls.kind: cls
    for cls in (
        Enrolment,
        Genesis,
        Transfer,
        Claim,
        CensusDraw,
        CensusResult,
        ReferenceValues,
        Revocation,
        Publication,
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedStatement:
    """A statement's kind and its envelopes, one per signatory in the statement's order; nothing in it is verified."""

    kind: str
    envelopes: tuple[bytes, ...]

    def to_bytes(self) -> bytes:
        """The statement as a file; ``from_bytes`` is its inverse."""
        return canonical.encode({"envelopes": [envelope.decode() for envelope in self.envelopes], "kind": self.kind})

    @classmethod
    def from_bytes(cls, data: bytes) -> SignedStatement:
        value = canonical.decode(data, most=limits.STATEMENT_BYTES)
        if not isinstance(value, dict) or set(value) != {"envelopes", "kind"}:
            raise InvalidStatement("not a signed registry statement")
        envelopes = value["envelopes"]
        texts = [value["kind"], *envelopes] if isinstance(envelopes, list) else [None]
        if not all(isinstance(text, str) and text.isascii() for text in texts):
            raise InvalidStatement("not a signed registry statement")
        return cls(kind=value["kind"], envelopes=tuple(text.encode() for text in envelopes))


def payload_type(kind: str, capacity: Capacity) -> str:
    """The DSSE payload type under which a key signs a statement of ``kind`` in ``capacity``."""
    return f"application/vnd.chipwitness.registry.{kind}.{capacity.value}.v1+json"


def sign(statement: Statement, *keys: SigningKey) -> SignedStatement:
    """Seal ``statement`` once for each of its first ``len(keys)`` signatories, in their order."""
    capacities = [capacity for capacity, _ in statement.signatories()][: len(keys)]
    payload = in_toto(f"{_PREDICATES}/{statement.kind}/v1", statement.subjects(), statement.predicate())
    envelopes = tuple(
        seal(payload_type(statement.kind, capacity), payload, key)
        for capacity, key in zip(capacities, keys, strict=True)
    )
    return SignedStatement(kind=statement.kind, envelopes=envelopes)


def countersign(signed: SignedStatement, key: SigningKey) -> SignedStatement:
    """Add the next signatory's envelope over the same payload; the registry verifies all of them.

    Raises:
        InvalidStatement: not a statement, or it needs no further signature.
    """
    statement = decode_payload(signed)
    missing = statement.signatories()[len(signed.envelopes) :]
    if not missing:
        raise InvalidStatement(f"the {signed.kind} has all its signatures already")
    payload = in_toto(f"{_PREDICATES}/{statement.kind}/v1", statement.subjects(), statement.predicate())
    envelope = seal(payload_type(signed.kind, missing[0][0]), payload, key)
    return SignedStatement(kind=signed.kind, envelopes=(*signed.envelopes, envelope))


def signer_key_id(envelope: bytes) -> str:
    """The key id that an envelope claims, before anything is verified."""
    value = canonical.decode(envelope, most=limits.STATEMENT_BYTES)
    try:
        key_id = value["signatures"][0]["keyid"]
    except (TypeError, KeyError, IndexError):
        raise InvalidStatement("not a DSSE envelope") from None
    if not isinstance(key_id, str):
        raise InvalidStatement("not a DSSE envelope")
    return key_id


def open_signed(signed: SignedStatement, party_of_key: Callable[[str], tuple[str, VerifyingKey] | None]) -> Statement:
    """Verify every signature, then return the one statement that all envelopes hold.

    Args:
        signed: as received.
        party_of_key: key id → (party name, key) of enrolled parties.

    Raises:
        ForgedStatement: a signature is missing, surplus, broken, or by another party than the statement needs.
        InvalidStatement: the payload is not a statement of this kind.
    """
    if signed.kind not in _CLASSES:
        raise InvalidStatement(f"unknown kind of statement {signed.kind!r:.40}")
    if not signed.envelopes:
        raise ForgedStatement(f"{signed.kind}: no signature")
    about = f"{signed.kind}{_claimed_subject(signed.envelopes[0])}"
    statement: Statement | None = None
    first_payload: object = None
    capacities: tuple[Capacity, ...] = _capacities(signed)
    for position, (envelope, capacity) in enumerate(zip(signed.envelopes, capacities, strict=True)):
        key_id = signer_key_id(envelope)
        signer = party_of_key(key_id)
        if signer is None:
            raise ForgedStatement(f"{about}: {capacity.value} is signed by a key that is not enrolled ({key_id:.100})")
        try:
            payload = open_sealed(envelope, payload_type(signed.kind, capacity), signer[1])
        except EvidenceError as error:
            text = f"{about}: the signature of {signer[0]} as {capacity.value} does not verify: {error}"
            raise ForgedStatement(text) from None
        if statement is None:
            statement, first_payload = decode_statement(signed.kind, payload), payload
        elif payload != first_payload:
            raise ForgedStatement(f"{about}: {capacity.value} signed a different statement from the first signatory")
        required = statement.signatories()
        if len(required) != len(signed.envelopes):
            raise ForgedStatement(
                f"{about}: {len(signed.envelopes)} signatures are given, but {len(required)} are needed"
            )
        needed_capacity, needed_party = required[position]
        needed = "registrar" if needed_party is None else needed_party
        if (capacity, signer[0]) != (needed_capacity, needed):
            raise ForgedStatement(f"{about}: {capacity.value} is signed by {signer[0]}, not by {needed}")
    assert statement is not None
    return statement


def decode_statement(kind: str, payload: object) -> Statement:
    """The statement in a verified payload; raises InvalidStatement unless it re-encodes to the same payload."""
    predicate_type = f"{_PREDICATES}/{kind}/v1"
    try:
        subjects, predicate = open_in_toto(payload, predicate_type)
        statement = _CLASSES[kind].parse(subjects, predicate)
        if in_toto(predicate_type, statement.subjects(), statement.predicate()) != payload:
            raise InvalidStatement(f"{kind}: fields missing, extra or altered")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise InvalidStatement(f"{kind}: malformed field {error}") from None
    except CallerError as error:
        raise InvalidStatement(f"{kind}: {error}") from None
    return statement


def decode_payload(signed: SignedStatement) -> Statement:
    """The statement in the first envelope, its signature not verified: for entries that the log holds already."""
    if signed.kind not in _CLASSES or not signed.envelopes:
        raise InvalidStatement(f"unknown or unsigned statement {signed.kind!r:.40}")
    envelope = canonical.decode(signed.envelopes[0], most=limits.STATEMENT_BYTES)
    try:
        body = decode_base64(envelope["payload"])
    except (TypeError, KeyError):
        raise InvalidStatement("not a DSSE envelope") from None
    return decode_statement(signed.kind, canonical.decode(body))


def _capacities(signed: SignedStatement) -> tuple[Capacity, ...]:
    allowed: dict[str, tuple[Capacity, ...]] = {
        Enrolment.kind: (Capacity.REGISTRAR,),
        Genesis.kind: (Capacity.MAKER,),
        Transfer.kind: (Capacity.RELEASE, Capacity.ACCEPTANCE),
        Claim.kind: (Capacity.HOLDER, Capacity.WITNESS),
        CensusDraw.kind: (Capacity.INSPECTOR,),
        CensusResult.kind: (Capacity.INSPECTOR,),
        ReferenceValues.kind: (Capacity.MAKER,),
        Revocation.kind: (Capacity.REGISTRAR,),
        Publication.kind: (Capacity.REGISTRAR,),
    }
    capacities = allowed[signed.kind]
    if len(signed.envelopes) > len(capacities):
        raise ForgedStatement(
            f"{signed.kind}: {len(signed.envelopes)} signatures are given, but at most {len(capacities)} are expected"
        )
    return capacities[: len(signed.envelopes)]


def _claimed_subject(envelope: bytes) -> str:
    """For error messages only: what an envelope says it is about, whether or not that is signed."""
    try:
        payload = canonical.decode(decode_base64(canonical.decode(envelope)["payload"]))
        names = [check_name("subject", subject["name"]) for subject in payload["subject"]]
    except (EvidenceError, CallerError, TypeError, KeyError):
        return ""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f" of chip {names[0]}{more}" if names else ""
