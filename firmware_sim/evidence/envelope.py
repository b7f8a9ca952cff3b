"""Signed statements: Ed25519 keys, DSSE envelopes and in-toto-shaped statements.

DSSE signs PAE(type, body) = "DSSEv1" SP LEN(type) SP type SP LEN(body) SP body, lengths in bytes, so that a signature
under one payload type is worth nothing under another: the payload type is the context label of the key's use.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import canonical
from firmware_sim.evidence.canonical import JsonObject
from firmware_sim.evidence.digest import Digest, digest_bytes
from firmware_sim.limits import Limit

__all__ = [
    "STATEMENT_TYPE",
    "SignatureError",
    "SigningKey",
    "VerifyingKey",
    "decode_base64",
    "is_sealed",
    "open_sealed",
    "open_statement",
    "pae",
    "read_sealed",
    "seal",
    "statement",
]

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
_KEY_BYTES = 32
_SIGNATURE_BYTES = 64


_FIELD_PRIME = 2**255 - 19
_CURVE_D = -121665 * pow(121666, -1, _FIELD_PRIME) % _FIELD_PRIME


class SignatureError(EvidenceError):
    """A signature is missing, of another key, or does not verify."""


@dataclass(frozen=True, slots=True)
class VerifyingKey:
    """An Ed25519 public key as its 32 raw bytes."""

    raw: bytes

    def __post_init__(self) -> None:
        if type(self.raw) is not bytes or len(self.raw) != _KEY_BYTES:
            raise EvidenceError(f"an Ed25519 public key must have {_KEY_BYTES} bytes")
        y = int.from_bytes(self.raw, "little") & ((1 << 255) - 1)
        if y >= _FIELD_PRIME or _has_small_order(y):
            raise EvidenceError("Ed25519 public key is not canonical or of small order: signatures would not bind")

    @property
    def key_id(self) -> str:
        """The digest of the key as text: names the key and can't be claimed by another one."""
        return str(digest_bytes("ed25519-public-key", self.raw))

    def verify(self, signature: bytes, message: bytes) -> None:
        """Raise SignatureError unless `signature` is this key's over `message`."""
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except (InvalidSignature, ValueError):
            raise SignatureError(f"signature does not verify under key {self.key_id}") from None


class SigningKey:
    """An Ed25519 private key; signatures are deterministic."""

    __slots__ = ("_private", "verifying")

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.verifying = VerifyingKey(
            private.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
        )

    def __repr__(self) -> str:
        return f"SigningKey({self.verifying.key_id})"

    @classmethod
    def generate(cls, seed: bytes | None = None) -> SigningKey:
        """Return a new key from the system's randomness, or the key that the 32 bytes `seed` determine."""
        return cls(Ed25519PrivateKey.generate()) if seed is None else cls.from_private_bytes(seed)

    @classmethod
    def from_private_bytes(cls, data: bytes) -> SigningKey:
        if len(data) != _KEY_BYTES:
            raise CallerError(f"an Ed25519 private key must have {_KEY_BYTES} bytes, not {len(data)}")
        return cls(Ed25519PrivateKey.from_private_bytes(data))

    def private_bytes(self) -> bytes:
        return self._private.private_bytes_raw()

    @property
    def private_key(self) -> Ed25519PrivateKey:
        """The key as `cryptography` knows it, for signing certificates."""
        return self._private

    def sign(self, message: bytes) -> bytes:
        return self._private.sign(message)


def _has_small_order(y: int) -> bool:
    """Say whether a point of edwards25519 with this y has order 1, 2, 4 or 8.

    Orders 1 and 2 have y = ±1, order 4 has y = 0; doubling a point of order 8 gives y = 0, so x² = -y² and, with the
    curve -x² + y² = 1 + d·x²·y², d·y⁴ + 2·y² - 1 = 0.
    """
    return y in (0, 1, _FIELD_PRIME - 1) or (_CURVE_D * y**4 + 2 * y**2 - 1) % _FIELD_PRIME == 0


def pae(payload_type: str, body: bytes) -> bytes:
    """Return DSSE's pre-authentication encoding."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(body), body)


def seal(payload_type: str, payload: object, key: SigningKey) -> bytes:
    """Return the canonical DSSE envelope over the canonical JSON of `payload`, signed by `key`."""
    body = canonical.encode(payload)
    signature = key.sign(pae(payload_type, body))
    envelope = {
        "payload": base64.b64encode(body).decode(),
        "payloadType": payload_type,
        "signatures": [{"keyid": key.verifying.key_id, "sig": base64.b64encode(signature).decode()}],
    }
    return canonical.encode(envelope)


def open_sealed(data: bytes, payload_type: str, key: VerifyingKey, *, most: Limit | None = None) -> Any:
    """Return the payload of an envelope that `key` signed under `payload_type`; the payload is parsed only then.

    Args:
        most: bytes that an envelope of this kind may have.

    Raises:
        SignatureError: another key, or the signature does not verify.
        EvidenceError: not a canonical envelope, another payload type, not exactly one signature, or a payload that is
            not canonical JSON.
    """
    most = most or limits.STATEMENT_BYTES
    return canonical.decode(_signed_body(data, payload_type, key, most), most=most)


def is_sealed(data: bytes, payload_type: str, key: VerifyingKey, *, most: Limit | None = None) -> bool:
    """Tell whether an envelope is one that `key` signed, whatever it holds."""
    try:
        _signed_body(data, payload_type, key, most or limits.STATEMENT_BYTES)
    except EvidenceError:
        return False
    return True


def _signed_body(data: bytes, payload_type: str, key: VerifyingKey, most: Limit) -> bytes:
    payload, entry = _envelope(data, payload_type, most)
    if entry["keyid"] != key.key_id:
        raise SignatureError(f"envelope is signed by key {entry['keyid']!r:.100}, expected {key.key_id}")
    body = decode_base64(payload)
    key.verify(decode_base64(entry["sig"]), pae(payload_type, body))
    return body


def read_sealed(data: bytes, payload_type: str, *, most: Limit | None = None) -> tuple[Any, str]:
    """Return payload and id of the key that is said to have signed it, for somebody who wants to read it.

    Nothing is verified, so nothing may rest on it.

    Raises:
        EvidenceError: as `open_sealed`, but for the signature.
    """
    most = most or limits.STATEMENT_BYTES
    payload, entry = _envelope(data, payload_type, most)
    return canonical.decode(decode_base64(payload), most=most), str(entry["keyid"])


def _envelope(data: bytes, payload_type: str, most: Limit) -> tuple[object, JsonObject]:
    """The payload, in base64, and the one signature of an envelope of that type."""
    envelope = canonical.decode(data, most=most)
    if not isinstance(envelope, dict) or set(envelope) != {"payload", "payloadType", "signatures"}:
        raise EvidenceError("not a DSSE envelope")
    if envelope["payloadType"] != payload_type:
        raise EvidenceError(
            f"envelope has the payload type {envelope['payloadType']!r:.100}, expected {payload_type!r}"
        )
    signatures = envelope["signatures"]
    if not isinstance(signatures, list) or len(signatures) != 1:
        raise EvidenceError("envelope must hold exactly one signature")
    entry = signatures[0]
    if not isinstance(entry, dict) or set(entry) != {"keyid", "sig"}:
        raise EvidenceError("malformed signature in envelope")
    return envelope["payload"], entry


def decode_base64(text: object) -> bytes:
    """Return the bytes whose standard, padded base64 is exactly `text`, or raise EvidenceError."""
    if not isinstance(text, str):
        raise EvidenceError("base64 must be text")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise EvidenceError("malformed base64") from None
    if base64.b64encode(data).decode() != text:
        raise EvidenceError("base64 is not canonical")
    return data


def statement(
    predicate_type: str, subjects: Sequence[tuple[str, Digest]], predicate: Mapping[str, object]
) -> dict[str, object]:
    """Return an in-toto Statement v1: `predicate` is claimed of one or more `subjects` (name, digest).

    Raises:
        CallerError: no subject, or two of one name.
    """
    names = [name for name, _ in subjects]
    if not names or len(set(names)) != len(names):
        raise CallerError("a statement needs subjects with distinct names")
    return {
        "_type": STATEMENT_TYPE,
        "predicate": dict(predicate),
        "predicateType": predicate_type,
        "subject": [{"digest": {d.algorithm: d.value.hex()}, "name": name} for name, d in subjects],
    }


def open_statement(payload: object, predicate_type: str) -> tuple[list[tuple[str, Digest]], JsonObject]:
    """Return (subjects, predicate) of a statement of exactly this predicate type, or raise EvidenceError."""
    if not isinstance(payload, dict) or set(payload) != {"_type", "predicate", "predicateType", "subject"}:
        raise EvidenceError("not an in-toto statement")
    if payload["_type"] != STATEMENT_TYPE:
        raise EvidenceError(f"statement has type {payload['_type']!r:.100}, expected {STATEMENT_TYPE!r}")
    if payload["predicateType"] != predicate_type:
        raise EvidenceError(f"statement claims {payload['predicateType']!r:.100}, expected {predicate_type!r}")
    subjects, predicate = payload["subject"], payload["predicate"]
    if not isinstance(subjects, list) or not subjects or not isinstance(predicate, dict):
        raise EvidenceError("statement needs a subject and a predicate")
    opened = [_open_subject(subject) for subject in subjects]
    if len({name for name, _ in opened}) != len(opened):
        raise EvidenceError("statement names a subject twice")
    return opened, predicate


def _open_subject(subject: object) -> tuple[str, Digest]:
    if not isinstance(subject, dict) or set(subject) != {"digest", "name"}:
        raise EvidenceError("malformed subject in statement")
    name, digests = subject["name"], subject["digest"]
    if not isinstance(name, str) or not isinstance(digests, dict) or len(digests) != 1:
        raise EvidenceError("a subject needs a name and exactly one digest")
    [(algorithm, value)] = digests.items()
    return name, Digest.parse(f"{algorithm}:{value}")
