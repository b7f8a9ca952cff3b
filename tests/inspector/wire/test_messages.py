"""An answer counts only if its party signed it over this question, whole and within its bounds."""

from __future__ import annotations

import hashlib
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import SigningKey, seal
from inspector.wire.messages import ENVELOPE_BYTES, Answer, Question, Reader, Silence

REFEREE, PARTY = SigningKey.generate(bytes(32)), SigningKey.generate(bytes([1]) * 32)
MOST = 100


def question(number: int = 0) -> bytes:
    to = PARTY.verifying.key_id
    return Question(game="00" * 32, number=number, to=to, run="", text="step 1", most=MOST, seconds=5).seal(REFEREE)


def stream(body: bytes = b"body", key: SigningKey = PARTY, number: int = 0, refused: str = "") -> bytes:
    return Answer.over(question(number), body, refused).seal(key) + b"\n" + body


def taken(data: bytes, piece: int = 7) -> Reader:
    reader = Reader(question(), PARTY.verifying, MOST)
    for start in range(0, len(data), piece):
        reader.feed(data[start : start + piece])
    return reader


@given(st.binary(max_size=MOST), st.integers(1, 3000))
def test_an_answer_comes_back_whole_in_whatever_pieces(body, piece):
    reader = taken(stream(body), piece)
    assert reader.body() == body
    assert reader.received == len(stream(body))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (stream(key=REFEREE), "the answer is not signed by its key"),
        (stream(number=1), "a different question"),
        (stream() + b"x", "more bytes came than the 4"),
        (stream()[:-1], "the 3 bytes that came are not the 4"),
        (stream()[:-1] + b"x", "the 4 bytes that came are not the 4"),
        (stream()[:100], "no signed answer"),
        (b"", "no signed answer"),
        (b"{}\n", "the answer is not signed by its key"),
        (b"x" * (ENVELOPE_BYTES.most + 1), "bytes hold no signed answer"),
        (b"x" * (ENVELOPE_BYTES.most + 1) + b"\n", "bytes hold no signed answer"),
    ],
)
def test_anything_else_is_silence(data, why):
    with pytest.raises(Silence, match=why):
        taken(data, 1 << 20).body()


def test_nothing_is_taken_of_what_is_signed_to_be_longer_than_asked_for_or_is_refused():
    for data in (stream(bytes(MOST + 1)), stream(b"", refused="no such step")):
        reader = taken(data, 1 << 20)
        assert reader.is_done
        assert reader.body() is None


@pytest.mark.parametrize(
    "changes", [{"length": -1}, {"length": True}, {"length": "4"}, {"refused": None}, {"more": 1}], ids=str
)
def test_an_envelope_of_another_form_is_none(changes):
    payload = {**asdict(Answer.over(question(), b"body")), **changes}
    with pytest.raises(EvidenceError):
        Answer.open(seal("application/vnd.chipwitness.answer.v1+json", payload, PARTY), PARTY.verifying)


def test_an_answer_names_its_question_and_its_body():
    answer = Answer.open(stream().split(b"\n")[0], PARTY.verifying)
    assert answer.question == hashlib.sha256(question()).hexdigest()
    assert answer.sha256 == hashlib.sha256(b"body").hexdigest()
    assert Question.open(question(), REFEREE.verifying).text == "step 1"
