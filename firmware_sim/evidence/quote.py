"""A quote: what the alias key says about the chip now, for one verifier and one nonce; its firmware fills it in."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from fractions import Fraction

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence.digest import Digest
from firmware_sim.evidence.envelope import SigningKey, VerifyingKey, open_sealed, open_statement, seal, statement
from firmware_sim.evidence.work import Roofline

__all__ = ["QUOTE_PAYLOAD_TYPE", "QUOTE_PREDICATE_TYPE", "Quote", "QuoteError", "open_quote"]

QUOTE_PAYLOAD_TYPE = "application/vnd.chipwitness.quote+json"
QUOTE_PREDICATE_TYPE = "https://chipwitness.dev/quote/v2"
_MAX_INTEGER = 1 << 64
_COUNTS = (
    "security_version", "boot", "tick", "epoch", "counter", "log_size", "beacon", "calls", "flop", "moved", "held",
)  # fmt: skip


class QuoteError(EvidenceError):
    """A quote is malformed or does not say what the rest of the evidence says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """The content of a quote.

    `counter` is the chip's monotonic counter: it grows with every change of the chip's persistent state, so with every
    record and every boot, and never falls. `calls`, `flop` and `moved` are what the meter has counted in this boot,
    and `held` the bytes of results of operators that are held outside the declared regions.
    `flop_rate` and `moved_rate` are what its device does in a tick at most, by which its clock goes.
    `beacon` is the time of the newest beacon in its log, in seconds since 1970; 0 where there is none. `epoch` is the
    open epoch. `log_head` is the hash of record `log_size` - 1.
    """

    chip_id: str
    certificate_digest: Digest
    measurement: Digest
    security_version: int
    boot: int
    tick: int
    epoch: int
    counter: int
    log_size: int
    log_head: bytes
    journey: bytes
    current: bytes
    snapshot_rate: Fraction
    flop_rate: int
    moved_rate: int
    snapshot_algorithm: str
    beacon: int
    calls: int
    flop: int
    moved: int
    held: int
    nonce: bytes
    verifier_id: str

    def __post_init__(self) -> None:
        for name in ("log_head", "journey", "current"):
            if len(getattr(self, name)) != 32:
                raise CallerError(f"quote: {name} must be 32 bytes")
        for name in _COUNTS:
            if not 0 <= getattr(self, name) < _MAX_INTEGER:
                raise CallerError(f"quote: {name} must be in [0, 2^64)")
        _ = self.roofline

    @property
    def roofline(self) -> Roofline:
        """Of the chip's device."""
        return Roofline(flop=self.flop_rate, moved=self.moved_rate)

    def sign(self, key: SigningKey) -> bytes:
        """Return the quote sealed by the alias key."""
        predicate = {field.name: _to_wire(getattr(self, field.name)) for field in fields(self)}
        subject = [(self.chip_id, Digest("sha256", self.log_head))]
        return seal(QUOTE_PAYLOAD_TYPE, statement(QUOTE_PREDICATE_TYPE, subject, predicate), key)


def open_quote(data: bytes, alias_key: VerifyingKey) -> Quote:
    """Return the quote that `alias_key` signed.

    Law: `open_quote(q.sign(k), k.verifying) == q`.

    Raises:
        SignatureError: signed by another key or not at all.
        EvidenceError: malformed.
    """
    payload = open_sealed(data, QUOTE_PAYLOAD_TYPE, alias_key, most=limits.QUOTE_BYTES)
    subjects, predicate = open_statement(payload, QUOTE_PREDICATE_TYPE)
    if set(predicate) != {field.name for field in fields(Quote)}:
        raise QuoteError("quote: fields are missing or unknown")
    values = {name: _from_wire(name, value) for name, value in predicate.items()}
    try:
        quote = Quote(**values)  # type: ignore[arg-type]
    except CallerError as error:
        raise QuoteError(str(error)) from None
    if subjects != [(quote.chip_id, Digest("sha256", quote.log_head))]:
        raise QuoteError(f"quote of chip {quote.chip_id}: its subject is not this chip with its log head")
    return quote


_TEXT = frozenset({"chip_id", "snapshot_algorithm", "verifier_id"})
_DIGESTS = frozenset({"certificate_digest", "measurement"})
_BYTES = frozenset({"log_head", "journey", "current", "nonce"})


def _to_wire(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    return str(value) if isinstance(value, Digest) else value


def _from_wire(name: str, value: object) -> object:
    if name in _DIGESTS:
        return Digest.parse(value)
    if name in _BYTES:
        if isinstance(value, str) and re.fullmatch(r"(?:[0-9a-f]{2}){0,128}", value):
            return bytes.fromhex(value)
    elif name == "snapshot_rate":
        match = re.fullmatch(r"(0|[1-9][0-9]{0,38})/([1-9][0-9]{0,38})", value) if isinstance(value, str) else None
        rate = Fraction(int(match[1]), int(match[2])) if match else None
        if rate is not None and rate <= 1 and _to_wire(rate) == value:
            return rate
    elif name in _TEXT:
        if isinstance(value, str):
            return value
    elif type(value) is int:
        return value
    raise QuoteError(f"quote: malformed {name}")
