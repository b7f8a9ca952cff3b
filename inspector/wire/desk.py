"""Where a party keeps the questions that it was asked and its answers, and who may ask it.

    FOLDER/questions/SHA256.json   envelope of a question, named by its digest
    FOLDER/answers/SHA256.json     envelope of the answer to the question of that digest
    FOLDER/bodies/SHA256           bodies, named by their own digest

A question that was answered once gets the same answer again, also from another process after a crash.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from threading import Lock
from typing import Protocol

from firmware_sim.errors import CallerError, DeviceError, EvidenceError
from firmware_sim.evidence import SigningKey, VerifyingKey
from firmware_sim.limits import read_file
from inspector.wire.messages import ENVELOPE_BYTES, Answer, Declined, Question, Reader, Silence
from monitor.files import write_whole

__all__ = ["Counter", "Desk", "Local", "Stranger", "Transport"]

_PIECE = 1 << 20


class Stranger(CallerError):
    """No party that may ask here has signed that, or it is a question to another party or about another run."""


class Desk:
    """Answers signed questions, and keeps what it has answered.

    Args:
        answer: gives the body of an answer to a question's text; CallerError or EvidenceError says why there is none,
            and that is signed. Any other error is this machine's, and nothing is signed then.
        askers: keys of those who may ask.
        run: id of the one run that it answers about.
        first: what questions name in its place before the party has said which run it claims: nothing, or the task
            that was ordered.
    """

    def __init__(
        self,
        folder: Path,
        answer: Callable[[str], bytes],
        key: SigningKey,
        askers: Collection[VerifyingKey],
        run: str,
        first: str = "",
    ) -> None:
        self._folder, self._answer, self._key, self._askers = folder, answer, key, tuple(askers)
        self._about = (first, run)
        self._lock = Lock()
        for name in ("questions", "answers", "bodies"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def take(self, envelope: bytes) -> Iterator[bytes]:
        """Answer a question: the answer's envelope with a line feed, then the body in pieces.

        Raises:
            Stranger: it may not ask, or asks another party or about another run.
            DeviceError: this machine cannot answer now, or the answer is longer than was asked for.
        """
        question = self.opened(envelope)
        if question.run not in self._about:
            raise Stranger("this is not a question about the run or the task for which this party answers")
        digest = hashlib.sha256(envelope).hexdigest()
        kept = self._folder / "answers" / f"{digest}.json"
        with self._lock:
            if not kept.is_file():
                write_whole(self._folder / "questions" / kept.name, envelope)
                self._keep(question, envelope, kept)
        signed = read_file(kept, ENVELOPE_BYTES)
        return self._pieces(signed, Answer.open(signed, self._key.verifying))

    def opened(self, envelope: bytes) -> Question:
        """A question to this party of one that may ask it; Stranger where it is none."""
        for key in self._askers:
            try:
                question = Question.open(envelope, key)
            except EvidenceError:
                continue
            if question.to == self._key.verifying.key_id:
                return question
        raise Stranger("this question is not signed for this party by anyone who may ask here")

    def _keep(self, question: Question, envelope: bytes, kept: Path) -> None:
        """Work out an answer, and store its body before the envelope that names it."""
        body, refused = b"", ""
        try:
            body = self._answer(question.text)
        except (CallerError, EvidenceError) as error:
            refused = f"{type(error).__name__}: {error}"[:500]
        except Exception as error:  # of this machine, a library or this program: no word of the party, and not signed
            raise DeviceError(f"this machine cannot answer: {type(error).__name__}: {error}") from None
        if len(body) > question.most:
            raise DeviceError(f"the answer has {len(body)} bytes, but the question allows only {question.most}")
        answer = Answer.over(envelope, body, refused)
        write_whole(self._folder / "bodies" / answer.sha256, body)
        write_whole(kept, answer.seal(self._key))

    def _pieces(self, signed: bytes, answer: Answer) -> Iterator[bytes]:
        yield signed + b"\n"
        with (self._folder / "bodies" / answer.sha256).open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece


class Counter(Protocol):
    """What answers questions: a desk, or one that hands each question on to the desk that it belongs to."""

    def take(self, envelope: bytes) -> Iterator[bytes]:
        """As ``Desk.take``."""


class Transport(Protocol):
    """Brings a question to a party, and what it answers to a reader."""

    def ask(self, envelope: bytes, reader: Reader, seconds: float) -> None:
        """Feed the reader with what comes within these seconds; Silence where nothing does."""


class Local:
    """A party in this process, which has all the time that it takes."""

    def __init__(self, desk: Counter) -> None:
        self._desk = desk

    def ask(self, envelope: bytes, reader: Reader, seconds: float) -> None:
        """Let the desk answer."""
        try:
            for piece in self._desk.take(envelope):
                reader.feed(piece)
        except Stranger as error:
            raise Declined(str(error)) from None
        except DeviceError as error:
            raise Silence(str(error)) from None
