from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import (
    SignatureError,
    SignedHead,
    SigningKey,
    VerifyingKey,
    note_key_hash,
    open_note,
    sign_note,
)

KEY = SigningKey.generate(b"c" * 32)

# The example of Go's golang.org/x/mod/sumdb/note, after which C2SP signed-note is modelled.
GO_NAME = "PeterNeumann"
GO_PRIVATE = base64.b64decode("AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz")[1:]
GO_PUBLIC = base64.b64decode("ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW")[1:]
GO_TEXT = "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"
GO_NOTE = (
    GO_TEXT
    + "\n— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
).encode()


def test_note_is_that_of_the_go_reference():
    key = SigningKey.from_private_bytes(GO_PRIVATE)
    assert key.verifying.raw == GO_PUBLIC
    assert note_key_hash(GO_NAME, key.verifying).hex() == "c74f20a3"
    assert sign_note(GO_TEXT, GO_NAME, key) == GO_NOTE
    assert open_note(GO_NOTE, GO_NAME, VerifyingKey(GO_PUBLIC)) == GO_TEXT


def test_key_hash_is_that_of_the_c2sp_example():
    raw = base64.b64decode("AekyeRrm56hApGFkyQR4ZCbV54Id2LKaANYcrnKv3U2k")[1:]
    assert note_key_hash("example.com/foo", VerifyingKey(raw)).hex() == "530d903a"


def test_text_is_that_of_the_tlog_checkpoint_example():
    root = base64.b64decode("CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=")
    head = SignedHead("example.com/behind-the-sofa", 20852163, root)
    assert head.text() == "example.com/behind-the-sofa\n20852163\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n"


@given(st.integers(0, 2**63), st.binary(min_size=32, max_size=32))
def test_signed_head_opens_to_itself(size, root):
    head = SignedHead("example.com/log", size, root)
    assert SignedHead.open(head.sign(KEY), KEY.verifying, "example.com/log") == head


def test_every_flipped_byte_is_refused():
    signed = SignedHead("log", 12, bytes(range(32))).sign(KEY)
    for index in range(len(signed)):
        for mask in (0x01, 0x20, 0x80):
            altered = bytearray(signed)
            altered[index] ^= mask
            with pytest.raises(EvidenceError):
                SignedHead.open(bytes(altered), KEY.verifying, "log")


def test_other_key_and_origin_are_refused():
    signed = SignedHead("log", 12, bytes(32)).sign(KEY)
    other = SigningKey.generate(b"d" * 32)
    with pytest.raises(SignatureError, match=f"not signed by key {other.verifying.key_id}"):
        SignedHead.open(signed, other.verifying, "log")
    with pytest.raises(SignatureError, match="signed under the name 'log', expected 'other'"):
        SignedHead.open(signed, KEY.verifying, "other")


ROOT = base64.b64encode(bytes(32)).decode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"other\n1\n{ROOT}\n", "log head has the origin 'other', expected 'log'"),
        (f"log\n01\n{ROOT}\n", "is malformed: '01'"),
        (f"log\n-1\n{ROOT}\n", "size in the log head is malformed"),
        (f"log\n١\n{ROOT}\n", "size in the log head is malformed"),
        (f"log\n{10**19}\n{ROOT}\n", "size in the log head is malformed"),
        (f"log\n1\n{ROOT}\nextension\n", "exactly three lines"),
        ("log\n1\n", "exactly three lines"),
        (f"log\n1\n{ROOT[:-1]}\n", "base64"),
        ("log\n1\nAAAA\n", "has 3 bytes, not 32"),
        (f"log\n1\n{ROOT} \n", "base64"),
    ],
)
def test_signed_but_malformed_head_is_refused(text, message):
    with pytest.raises(EvidenceError, match=message):
        SignedHead.open(sign_note(text, "log", KEY), KEY.verifying, "log")


@pytest.mark.parametrize(
    ("note", "message"),
    [
        (b"text\n", "no signature"),
        (b"\xff\n\n", "not UTF-8"),
        (GO_NOTE + GO_NOTE.split(b"\n\n")[1], "exactly one signature line"),
        (GO_NOTE[:-1], "exactly one signature line"),
        (GO_NOTE.replace("—".encode(), b"-"), "exactly one signature line"),
        (GO_NOTE.replace(b"x08go", b"x18go"), "not signed by key"),
        (GO_NOTE.replace(b"cryptography", b"cryptographY"), "signature does not verify"),
    ],
)
def test_malformed_note_is_refused(note, message):
    with pytest.raises(EvidenceError, match=message):
        open_note(note, GO_NAME, VerifyingKey(GO_PUBLIC))


def test_heads_cannot_be_built_invalid():
    for arguments in [
        ("", 0, bytes(32)),
        ("a b", 0, bytes(32)),
        ("a+b", 0, bytes(32)),
        ("a", -1, bytes(32)),
        ("a", 0, b""),
    ]:
        with pytest.raises(CallerError):
            SignedHead(*arguments)
    with pytest.raises(CallerError, match="must end with a newline"):
        sign_note("text", "log", KEY)
    with pytest.raises(CallerError, match="key name 'a b'"):
        sign_note("text\n", "a b", KEY)
