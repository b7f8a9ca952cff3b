"""A question to a party and its answer, each signed: the answer over the question and the digest of its body.

A party that brings a message to another one, or fetches a file, shows a signed pass first.

An answer comes as one stream, whatever carries it: the party's envelope, a line feed, and the body. The envelope says
how long the body is, so that a reader takes no more than it asked for, and the body is hashed while it comes. What a
party has signed can be shown to others; what is missing, or is not signed by it over this question, is silence.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from typing import Any, TypeVar

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import SigningKey, VerifyingKey, decode_base64, open_sealed, seal
from firmware_sim.limits import Limit

__all__ = ["ENVELOPE_BYTES", "Answer", "Declined", "Pass", "Question", "Reader", "Silence", "Witnessed"]

ENVELOPE_BYTES = Limit(16 << 10, "bytes of a question, or of an answer without its body")
"""Honest ones have 1 KB."""
_QUESTION = "application/vnd.chipwitness.question.v1+json"
_ANSWER = "application/vnd.chipwitness.answer.v1+json"
_PASS_CHARACTERS = 8 << 10
_LATEST = 253_402_300_799
"""The last second that a date has room for."""
_SHA256, _NONCE = re.compile("[0-9a-f]{64}", re.ASCII), re.compile("[0-9a-f]{32}", re.ASCII)
_PASS = "application/vnd.chipwitness.pass.v1+json"
_TYPES = {"int": int, "str": str}
_WITNESSED = "application/vnd.chipwitness.witnessed.v1+json"

Form = TypeVar("Form", bound="Question | Answer | Pass | Witnessed")


class Silence(EvidenceError):
    """No answer that its party signed over the question came in time and within its bounds.

    Attributes:
        witness: name of the witness that says so; empty where only who asked does.
    """

    def __init__(self, text: str, witness: str = "") -> None:
        self.witness = witness
        super().__init__(text)


class Declined(Silence):
    """A server answers, but not this question, and signs nothing about that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What one party asks another.

    Attributes:
        game: 32 random bytes in hex, new for each game, so that no answer fits into another one.
        number: of the question in this game.
        to: key id of the party that is asked.
        run: id of the run that it is about, so that a party with two runs is not held to one by answers about the
            other; empty before the party has said which run it claims.
        most, seconds: bytes that the answer's body may have, and the time until it has come.
    """

    game: str
    number: int
    to: str
    run: str
    text: str
    most: int
    seconds: int

    def seal(self, key: SigningKey) -> bytes:
        """The envelope under the asking party's key."""
        return seal(_QUESTION, asdict(self), key)

    @classmethod
    def open(cls, envelope: bytes, key: VerifyingKey) -> Question:
        """Verify and parse; EvidenceError on another signature or form."""
        return _parsed(cls, open_sealed(envelope, _QUESTION, key, most=ENVELOPE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a party signs about its answer.

    Attributes:
        question: SHA-256, in hex, of the question's envelope.
        length, sha256: of the body.
        refused: why it gives none; empty where it answers.
    """

    question: str
    length: int
    sha256: str
    refused: str = ""

    @classmethod
    def over(cls, question: bytes, body: bytes, refused: str = "") -> Answer:
        """The answer to a question's envelope."""
        digests = (hashlib.sha256(each).hexdigest() for each in (question, body))
        return cls(question=next(digests), length=len(body), sha256=next(digests), refused=refused)

    def seal(self, key: SigningKey) -> bytes:
        """The envelope under the answering party's key."""
        return seal(_ANSWER, asdict(self), key)

    @classmethod
    def open(cls, envelope: bytes, key: VerifyingKey) -> Answer:
        """Verify and parse; EvidenceError on another signature or form."""
        return _parsed(cls, open_sealed(envelope, _ANSWER, key, most=ENVELOPE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Witnessed:
    """What a witness signs about a question that it carried to a party.

    Attributes:
        question: SHA-256, in hex, of the question's envelope.
        answer: the same of the answer's envelope; empty where no signed answer came in time.
        received, ended: seconds since 1970 when the question came, and when it was answered or its time was over.
    """

    question: str
    answer: str
    received: int
    ended: int

    @classmethod
    def over(cls, question: bytes, answer: bytes | None, *, received: int, ended: int) -> Witnessed:
        """The statement about two envelopes; None is no answer."""
        digests = ["" if each is None else hashlib.sha256(each).hexdigest() for each in (question, answer)]
        return cls(question=digests[0], answer=digests[1], received=received, ended=ended)

    def seal(self, key: SigningKey) -> bytes:
        """The envelope under the witness's key."""
        return seal(_WITNESSED, asdict(self), key)

    @classmethod
    def open(cls, envelope: bytes, key: VerifyingKey) -> Witnessed:
        """Verify and parse; EvidenceError on another signature or form."""
        return _parsed(cls, open_sealed(envelope, _WITNESSED, key, most=ENVELOPE_BYTES))

    def check(self, question: bytes, answer: bytes | None, seconds: int = 0) -> None:
        """EvidenceError unless it is about these envelopes, and says, if there is no answer, that the time was over."""
        if self != Witnessed.over(question, answer, received=self.received, ended=self.ended):
            raise EvidenceError("the witness's statement is about a different question or answer")
        if self.ended < self.received + (seconds if answer is None else 0):
            raise EvidenceError("by the witness's statement, the time for the answer was not over")

    def text(self) -> str:
        """What it says about a party that has not answered."""
        begun = datetime.fromtimestamp(min(self.received, _LATEST), UTC).strftime("%Y-%m-%d %H:%M:%S")
        return f"no signed answer came within {self.ended - self.received} s after {begun} UTC"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What a party signs for one request, and a server reads before the request's body.

    Attributes:
        to: key id of the party that is asked.
        what: the kind of the message that follows, or "file".
        sha256, length: of the message or file.
        start: bytes of the file that have come before.
        run, path: of a file: SHA-256 of its run's head in hex, and its path in that run.
        until: seconds since 1970 after which the pass is void.
        nonce: 16 random bytes in hex, so that no two passes are equal: each counts once.
    """

    to: str
    what: str
    sha256: str
    length: int
    start: int = 0
    run: str = ""
    path: str = ""
    until: int
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))

    def header(self, name: str, key: SigningKey) -> str:
        """The value of the header ``chipwitness-pass``: the party's name and the envelope under its key."""
        return f"{name} {base64.b64encode(seal(_PASS, asdict(self), key)).decode()}"

    @classmethod
    def open(cls, envelope: str, key: VerifyingKey) -> Pass:
        """Verify and parse the header's second word; EvidenceError on another signature or form."""
        if len(envelope) > _PASS_CHARACTERS:
            raise EvidenceError(f"a pass can have at most {_PASS_CHARACTERS} characters")
        found = _parsed(cls, open_sealed(decode_base64(envelope), _PASS, key, most=ENVELOPE_BYTES))
        if _SHA256.fullmatch(found.sha256) is None or found.start > found.length:
            raise EvidenceError("the pass of a request has a malformed digest, or starts beyond the end of the file")
        if _NONCE.fullmatch(found.nonce) is None:
            raise EvidenceError("a pass needs a nonce of 16 bytes in hex")
        return found


def _parsed(form: type[Form], payload: Any) -> Form:
    types = {each.name: _TYPES[str(each.type)] for each in fields(form)}
    if not isinstance(payload, dict) or {name: type(value) for name, value in payload.items()} != types:
        raise EvidenceError(f"a signed {form.__name__.lower()} does not have exactly the fields {', '.join(types)}")
    if min((value for value in payload.values() if type(value) is int), default=0) < 0:
        raise EvidenceError(f"a signed {form.__name__.lower()} has a negative number")
    return form(**payload)


class Reader:
    """Takes the answer to a question as it comes.

    Attributes:
        envelope, answer: once its first line has come; signed by the party, over this question.
        received: bytes so far.
        witness: the signed statement of a witness, where one carried the question.

    Args:
        question: its envelope.
        key: of the party that is asked.
        most: bytes that the body may have.
    """

    def __init__(self, question: bytes, key: VerifyingKey, most: int) -> None:
        self.answer: Answer | None = None
        self.received, self.witness = 0, b""
        self._question, self._key, self._most = hashlib.sha256(question).hexdigest(), key, most
        self.restart()

    @property
    def is_done(self) -> bool:
        """Whether nothing more is taken: it refuses, or signs for more bytes than were asked for."""
        return self.answer is not None and (self.answer.refused != "" or self.answer.length > self._most)

    def restart(self) -> None:
        """Forget what has come, as where a connection broke off; ``received`` goes on."""
        self.envelope, self.answer = b"", None
        self._held, self._hasher = bytearray(), hashlib.sha256()

    def feed(self, piece: bytes) -> None:
        """Take what has come; Silence as soon as it cannot become an answer."""
        self.received += len(piece)
        if self.answer is None:
            self._held += piece
            end = self._held.find(b"\n", 0, ENVELOPE_BYTES.most + 1)
            if end < 0 and len(self._held) > ENVELOPE_BYTES.most:
                raise Silence(f"the first {ENVELOPE_BYTES.most} bytes hold no signed answer")
            if end < 0:
                return
            self.envelope, piece = bytes(self._held[:end]), bytes(self._held[end + 1 :])
            self.answer = self._opened()
            self._held = bytearray()
        if self.is_done:
            return
        if len(self._held) + len(piece) > self.answer.length:
            raise Silence(f"more bytes came than the {self.answer.length} that it signed for")
        self._held += piece
        self._hasher.update(piece)

    def body(self) -> bytes | None:
        """The whole body; None where it signed for none that can be taken (``is_done``); Silence if it is not whole."""
        if self.answer is None:
            raise Silence("no signed answer")
        if self.is_done:
            return None
        if (len(self._held), self._hasher.hexdigest()) != (self.answer.length, self.answer.sha256):
            raise Silence(
                f"the {len(self._held)} bytes that came are not the {self.answer.length} bytes that it signed for"
            )
        return bytes(self._held)

    def _opened(self) -> Answer:
        try:
            answer = Answer.open(self.envelope, self._key)
        except EvidenceError as error:
            raise Silence(f"the answer is not signed by its key: {error}") from None
        if answer.question != self._question:
            raise Silence("the answer is to a different question")
        return answer
