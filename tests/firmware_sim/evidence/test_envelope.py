from __future__ import annotations

import base64

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import (
    SignatureError,
    SigningKey,
    VerifyingKey,
    canonical,
    digest_bytes,
    open_sealed,
    open_statement,
    pae,
    seal,
    statement,
)

KEY = SigningKey.generate(b"k" * 32)
OTHER = SigningKey.generate(b"o" * 32)
TYPE = "application/vnd.example+json"


def test_pae_is_that_of_the_dsse_specification():
    assert pae("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


def test_pae_counts_bytes_not_characters():
    assert pae("é", "ಠ".encode()) == b"DSSEv1 2 \xc3\xa9 3 \xe0\xb2\xa0"


def test_keys_and_signatures_are_those_of_rfc_8032_test_2():
    key = SigningKey.from_private_bytes(
        bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
    )
    assert key.verifying.raw.hex() == "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    assert key.sign(b"\x72").hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )


@given(st.dictionaries(st.text(), st.integers(-(2**64), 2**64) | st.text(), max_size=4))
def test_sealed_payload_opens_to_itself(payload):
    assert open_sealed(seal(TYPE, payload, KEY), TYPE, KEY.verifying) == payload


def test_every_flipped_byte_is_refused():
    sealed = seal(TYPE, {"claim": 1}, KEY)
    for index in range(len(sealed)):
        for mask in (0x01, 0x20, 0x80):
            altered = bytearray(sealed)
            altered[index] ^= mask
            with pytest.raises(EvidenceError):
                open_sealed(bytes(altered), TYPE, KEY.verifying)


def test_other_key_and_other_type_are_refused():
    sealed = seal(TYPE, 1, KEY)
    with pytest.raises(
        SignatureError, match=f"signed by key '{KEY.verifying.key_id}', expected {OTHER.verifying.key_id}"
    ):
        open_sealed(sealed, TYPE, OTHER.verifying)
    with pytest.raises(
        EvidenceError, match=r"envelope has the payload type 'application/vnd.example\+json', expected 'other'"
    ):
        open_sealed(sealed, "other", KEY.verifying)


def _forge(**changes):
    envelope = canonical.decode(seal(TYPE, {"a": 1}, KEY))
    return canonical.encode({**envelope, **changes})


def _signed(body, *, key=KEY, payload_type=TYPE, key_id=None):
    signature = base64.b64encode(key.sign(pae(payload_type, body))).decode()
    return canonical.encode(
        {
            "payload": base64.b64encode(body).decode(),
            "payloadType": payload_type,
            "signatures": [{"keyid": key_id or key.verifying.key_id, "sig": signature}],
        }
    )


def _signature():
    return canonical.decode(_forge())["signatures"][0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: _forge(signatures=[]), "exactly one signature"),
        (lambda: _forge(signatures=[_signature(), _signature()]), "exactly one signature"),
        (lambda: _forge(signatures={}), "exactly one signature"),
        (lambda: _forge(extra=1), "not a DSSE envelope"),
        (lambda: b"[]", "not a DSSE envelope"),
        (lambda: _forge(payloadType=7), "envelope has the payload type 7"),
        (lambda: _forge(payload=7), "base64 must be text"),
        (lambda: _forge(payload="eyJhIjoxfQ"), "base64"),
        (lambda: _forge(payload="eyJhIjoxfR=="), "base64"),
        (lambda: _forge(payload="eyJh\nIjoxfQ=="), "malformed base64"),
        (lambda: _forge(payload="eyJhIjoyfQ=="), "signature does not verify"),
        (lambda: _forge(signatures=[{**_signature(), "x": 1}]), "malformed signature"),
        (lambda: _forge(signatures=[7]), "malformed signature"),
        (lambda: _forge(signatures=[{**_signature(), "sig": ""}]), "signature does not verify"),
        (lambda: _signed(b'{"a": 1}'), "not byte-equal to its canonical encoding"),
        (lambda: _signed(b'{"a":1}', key=OTHER, key_id=KEY.verifying.key_id), "signature does not verify"),
        (lambda: _forge() + b"\n", "not byte-equal"),
    ],
)
def test_malformed_envelope_is_refused(data, message):
    with pytest.raises(EvidenceError, match=message):
        open_sealed(data(), TYPE, KEY.verifying)


def test_payload_is_not_parsed_before_it_is_verified():
    with pytest.raises(SignatureError):
        open_sealed(_forge(payload=base64.b64encode(b"not json").decode()), TYPE, KEY.verifying)


# The eight encodings of the points of small order on edwards25519, and two non-canonical ones (y = p + 1, y = p).
SMALL_ORDER = [
    "0100000000000000000000000000000000000000000000000000000000000000",
    "ecffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "0000000000000000000000000000000000000000000000000000000000000000",
    "0000000000000000000000000000000000000000000000000000000000000080",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
    "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
    "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
    "eeffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
    "edffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff7f",
]


@pytest.mark.parametrize("text", SMALL_ORDER)
def test_keys_under_which_one_signature_fits_many_texts_are_refused(text):
    with pytest.raises(EvidenceError, match="small order"):
        VerifyingKey(bytes.fromhex(text))


def test_why_such_keys_are_refused():
    """Under the neutral point, R = the neutral point with S = 0 signs every message."""
    neutral = bytes.fromhex(SMALL_ORDER[0])
    for message in (b"one", b"two"):
        Ed25519PublicKey.from_public_bytes(neutral).verify(neutral + bytes(32), message)


def test_keys_have_their_length():
    with pytest.raises(EvidenceError, match="32 bytes"):
        VerifyingKey(bytes(31))
    with pytest.raises(CallerError, match="32 bytes, not 31"):
        SigningKey.from_private_bytes(bytes(31))


def test_generated_keys_differ_and_hide_their_secret():
    first, second = SigningKey.generate(), SigningKey.generate()
    assert first.verifying != second.verifying
    assert first.private_bytes().hex() not in repr(first)
    assert SigningKey.from_private_bytes(first.private_bytes()).verifying == first.verifying


SUBJECTS = [("a", digest_bytes("x", b"1")), ("b", digest_bytes("x", b"2"))]


def test_statement_opens_to_what_it_says():
    made = statement("https://example.com/p", SUBJECTS, {"k": 1})
    assert made["_type"] == "https://in-toto.io/Statement/v1"
    assert open_statement(canonical.decode(canonical.encode(made)), "https://example.com/p") == (SUBJECTS, {"k": 1})


def test_statement_needs_distinct_subjects():
    for subjects in ([], [SUBJECTS[0], SUBJECTS[0]]):
        with pytest.raises(CallerError, match="subjects with distinct names"):
            statement("t", subjects, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_type": "other"}, "statement has type 'other'"),
        ({"predicateType": "q"}, "statement claims 'q', expected 'p'"),
        ({"subject": []}, "needs a subject"),
        ({"subject": [{"name": "a", "digest": {}}]}, "exactly one digest"),
        ({"subject": [{"name": 1, "digest": {"sha256": "0" * 64}}]}, "needs a name"),
        ({"subject": [{"name": "a", "digest": {"sha256": "0"}}]}, "malformed digest"),
        ({"subject": [{"name": "a", "digest": {"sha256": "0" * 64}}] * 2}, "names a subject twice"),
        ({"subject": [{"name": "a"}]}, "malformed subject"),
        ({"predicate": []}, "and a predicate"),
        ({"more": 1}, "not an in-toto statement"),
    ],
)
def test_malformed_statement_is_refused(change, message):
    with pytest.raises(EvidenceError, match=message):
        open_statement({**statement("p", SUBJECTS, {}), **change}, "p")
