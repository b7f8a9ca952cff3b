"""Signed tree heads in the text form of C2SP tlog-checkpoint, with C2SP signed-note Ed25519 signatures.

Text: origin, size and base64 root, one line each; then an empty line and one signature line
"— <key name> <base64(key hash ‖ signature)>", where key hash = SHA-256(name ‖ LF ‖ 0x01 ‖ public key)[:4].
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence.envelope import SignatureError, SigningKey, VerifyingKey, decode_base64

__all__ = ["SignedHead", "note_key_hash", "open_note", "sign_note"]

_ALGORITHM_ED25519 = b"\x01"
_HASH_BYTES = 32


def note_key_hash(name: str, key: VerifyingKey) -> bytes:
    """Return the 4 bytes that name an Ed25519 key in a signed note."""
    return hashlib.sha256(name.encode() + b"\n" + _ALGORITHM_ED25519 + key.raw).digest()[:4]


def sign_note(text: str, name: str, key: SigningKey) -> bytes:
    """Return `text` (ends with a newline) as a note signed by `key` under the key name `name`."""
    if not text.endswith("\n"):
        raise CallerError("the text of a signed note must end with a newline")
    if not _is_key_name(name):
        raise CallerError(f"key name {name!r} is empty or holds white space or '+'")
    body = text.encode()
    signature = base64.b64encode(note_key_hash(name, key.verifying) + key.sign(body)).decode()
    return body + f"\n— {name} {signature}\n".encode()


def open_note(data: bytes, name: str, key: VerifyingKey) -> str:
    """Return the text of a note that carries exactly one signature, `key`'s under `name`.

    Raises:
        SignatureError: another key, or the signature does not verify.
        EvidenceError: malformed.
    """
    limits.NOTE_BYTES.check(len(data))
    try:
        note = data.decode("utf-8")
    except UnicodeDecodeError:
        raise EvidenceError("signed note is not UTF-8") from None
    text, separator, signature_line = note.rpartition("\n\n")
    if not separator:
        raise EvidenceError("signed note has no signature")
    text += "\n"
    match = re.fullmatch(r"— (\S+) (\S+)\n", signature_line)
    if match is None:
        raise EvidenceError("signed note must end with exactly one signature line")
    if match[1] != name:
        raise SignatureError(f"note is signed under the name {match[1]!r:.100}, expected {name!r}")
    signature = decode_base64(match[2])
    if signature[:4] != note_key_hash(name, key):
        raise SignatureError(f"note is not signed by key {key.key_id}")
    key.verify(signature[4:], text.encode())
    return text


@dataclass(frozen=True, slots=True)
class SignedHead:
    """The head of an append-only log: `root` over the first `size` leaves of the log named `origin`.

    Law: `SignedHead.open(h.sign(key), key.verifying, h.origin) == h`, and no other bytes open to `h` under that key.
    """

    origin: str
    size: int
    root: bytes

    def __post_init__(self) -> None:
        if not _is_key_name(self.origin):
            raise CallerError(f"log origin {self.origin!r} is empty or holds white space or '+'")
        if self.size < 0 or len(self.root) != _HASH_BYTES:
            raise CallerError("a log head must have a size of at least 0 and a root of 32 bytes")

    def text(self) -> str:
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"

    def sign(self, key: SigningKey) -> bytes:
        return sign_note(self.text(), self.origin, key)

    @classmethod
    def open(cls, data: bytes, key: VerifyingKey, origin: str) -> SignedHead:
        """Return the head of the log `origin` that `key` signed, or raise EvidenceError."""
        lines = open_note(data, origin, key).split("\n")
        if len(lines) != 4 or lines[3]:
            raise EvidenceError("a log head must have exactly three lines")
        if lines[0] != origin:
            raise EvidenceError(f"log head has the origin {lines[0]!r:.100}, expected {origin!r}")
        if not re.fullmatch(r"0|[1-9][0-9]{0,18}", lines[1]):
            raise EvidenceError(f"the size in the log head is malformed: {lines[1]!r:.40}")
        root = decode_base64(lines[2])
        if len(root) != _HASH_BYTES:
            raise EvidenceError(f"root in log head has {len(root)} bytes, not {_HASH_BYTES}")
        return cls(origin, int(lines[1]), root)


def _is_key_name(name: str) -> bool:
    return re.fullmatch(r"[^\s+]+", name) is not None
