from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import (
    QUOTE_PAYLOAD_TYPE,
    QUOTE_PREDICATE_TYPE,
    Digest,
    Quote,
    QuoteError,
    SignatureError,
    SigningKey,
    digest_bytes,
    open_quote,
    seal,
    statement,
)

KEY = SigningKey.generate(b"q" * 32)
QUOTE = Quote(
    chip_id="chip-1",
    certificate_digest=digest_bytes("c", b""),
    measurement=digest_bytes("m", b""),
    security_version=1,
    boot=2,
    tick=3,
    epoch=4,
    counter=20,
    log_size=10,
    log_head=b"h" * 32,
    journey=b"j" * 32,
    current=b"c" * 32,
    snapshot_rate=Fraction(1, 86400),
    flop_rate=10**12,
    moved_rate=10**9,
    snapshot_algorithm="sha256-tree/1048576",
    beacon=8,
    calls=5,
    flop=6,
    moved=7,
    held=9,
    nonce=b"n" * 16,
    verifier_id="inspector",
)
U64 = st.integers(0, 2**64 - 1)


@given(
    size=U64,
    counter=U64,
    rate=st.fractions(0, 1, max_denominator=10**9),
    nonce=st.binary(max_size=64),
    verifier=st.text(max_size=10),
)
def test_quote_opens_to_itself(size, counter, rate, nonce, verifier):
    quote = dataclasses.replace(
        QUOTE, log_size=size, counter=counter, snapshot_rate=rate, nonce=nonce, verifier_id=verifier
    )
    assert open_quote(quote.sign(KEY), KEY.verifying) == quote


def test_every_flipped_byte_is_refused():
    sealed = QUOTE.sign(KEY)
    for index in range(len(sealed)):
        altered = bytearray(sealed)
        altered[index] ^= 1 + index % 255
        with pytest.raises(EvidenceError):
            open_quote(bytes(altered), KEY.verifying)


def test_another_key_is_refused():
    with pytest.raises(SignatureError):
        open_quote(QUOTE.sign(KEY), SigningKey.generate(b"r" * 32).verifying)


SUBJECT = ("chip-1", Digest("sha256", b"h" * 32))


def _sealed(*, subject=SUBJECT, payload_type=QUOTE_PAYLOAD_TYPE, drop=(), **changes):
    from firmware_sim.evidence.quote import _to_wire

    wire = {field.name: _to_wire(getattr(QUOTE, field.name)) for field in dataclasses.fields(Quote)}
    wire = {name: value for name, value in {**wire, **changes}.items() if name not in drop}
    return seal(payload_type, statement(QUOTE_PREDICATE_TYPE, [subject], wire), KEY)


def test_helper_seals_the_quote_itself():
    assert _sealed() == QUOTE.sign(KEY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drop": ("nonce",)}, "fields are missing or unknown"),
        ({"extra": 1}, "fields are missing or unknown"),
        ({"subject": ("chip-2", Digest("sha256", b"h" * 32))}, "its subject is not this chip with its log head"),
        ({"subject": ("chip-1", Digest("sha256", b"i" * 32))}, "its subject is not this chip with its log head"),
        ({"payload_type": "application/vnd.chipwitness.beacon+json"}, "envelope has the payload type"),
        ({"log_head": "00"}, "log_head must be 32 bytes"),
        ({"log_head": "0" * 63}, "malformed log_head"),
        ({"nonce": "0A"}, "malformed nonce"),
        ({"nonce": "00" * 129}, "malformed nonce"),
        ({"nonce": 7}, "malformed nonce"),
        ({"boot": "2"}, "malformed boot"),
        ({"boot": True}, "malformed boot"),
        ({"boot": 2.0}, "malformed boot"),
        ({"boot": -1}, r"boot must be in \[0, 2\^64\)"),
        ({"counter": 2**64}, r"counter must be in \[0, 2\^64\)"),
        ({"chip_id": 1}, "malformed chip_id"),
        ({"measurement": "md5:00"}, "unknown digest algorithm"),
        ({"snapshot_rate": "2/4"}, "malformed snapshot_rate"),
        ({"snapshot_rate": "3/2"}, "malformed snapshot_rate"),
        ({"snapshot_rate": "1/0"}, "malformed snapshot_rate"),
        ({"snapshot_rate": "1" + "0" * 40 + "/1"}, "malformed snapshot_rate"),
        ({"snapshot_rate": 1}, "malformed snapshot_rate"),
        ({"flop_rate": 0}, "rates must be whole numbers"),
        ({"moved_rate": 2**64}, "rates must be whole numbers"),
    ],
)
def test_signed_but_malformed_quote_is_refused(changes, message):
    with pytest.raises(EvidenceError, match=message):
        open_quote(_sealed(**changes), KEY.verifying)


def test_quotes_cannot_be_built_invalid():
    for changes in ({"journey": b""}, {"epoch": -1}):
        with pytest.raises(CallerError, match="quote: "):
            dataclasses.replace(QUOTE, **changes)
    assert issubclass(QuoteError, EvidenceError)
