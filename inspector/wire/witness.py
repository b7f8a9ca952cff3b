"""A witness between a referee and a party, chosen by both: it carries questions and answers, and signs when each came.

It takes a question as it was signed for the party, has it answered there, and returns its own statement, a line feed,
and what the party sent. If nothing that the party has signed over the question comes within the question's seconds, it
says so. It can alter no answer, since the party signs that; what it says about time is its word alone.

    FOLDER/SHA256.json    its statement about the question with this digest
    FOLDER/SHA256.answer  what the party answered: envelope, line feed and body

Both are deleted after a time (``keep``). The referee has them in its evidence by then.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from firmware_sim import limits
from firmware_sim.errors import DeviceError, EvidenceError
from firmware_sim.evidence import SigningKey, VerifyingKey
from firmware_sim.limits import read_file
from inspector.wire.desk import Stranger, Transport
from inspector.wire.messages import ENVELOPE_BYTES, Declined, Question, Reader, Silence, Witnessed
from monitor.files import write_whole

__all__ = ["ByWitness", "Known", "Witness"]

_AGAIN = 1.0
"""Seconds after which a party whose answer was none is asked again."""
_GRACE = 30
"""Seconds that a witness has for its statement, after those of the question."""
_LONGEST = 86_400
_PIECE = 1 << 20
_SWEEP = 3600.0
"""Seconds between two looks for files that are old."""


@dataclass(slots=True, kw_only=True)
class Witness:
    """Carries questions of these referees to these parties.

    Args:
        folder: for statements and answers.
        parties: how to reach each, by its key.
        least: seconds; it takes no question that gives a party less time.
        keep: seconds for which statements and answers are kept.
    """

    folder: Path
    key: SigningKey
    referees: Collection[VerifyingKey]
    parties: Mapping[VerifyingKey, Transport]
    least: int
    keep: float = 30 * 86_400
    _swept: float = -_SWEEP
    _busy: set[str] = field(default_factory=set)
    _lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def take(self, envelope: bytes) -> Iterator[bytes]:
        """The statement about a question with a line feed, and then what the party sent, in pieces.

        Raises:
            Stranger: no referee or party of this witness, too short a time, or the party does not take the question.
            DeviceError: the same question is being answered: ask again.
        """
        question, party = self._opened(envelope)
        digest = hashlib.sha256(envelope).hexdigest()
        with self._lock:
            self._forget()
            if digest in self._busy:
                raise DeviceError("this question is being answered")
            self._busy.add(digest)
        try:
            statement = self.folder / f"{digest}.json"
            if not statement.is_file():
                write_whole(statement, self._carried(question, envelope, party, statement.with_suffix(".answer")))
        finally:
            self._busy.discard(digest)
        return self._pieces(statement)

    def _forget(self) -> None:
        """Delete what is old, at most once an hour."""
        if time.monotonic() < self._swept + _SWEEP:
            return
        self._swept, ended = time.monotonic(), time.time() - self.keep
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # a draft that has got its name since
                if path.stem not in self._busy and path.stat().st_mtime < ended:
                    path.unlink()

    def _opened(self, envelope: bytes) -> tuple[Question, VerifyingKey]:
        for key in self.referees:
            try:
                question = Question.open(envelope, key)
            except EvidenceError:
                continue
            party = next((each for each in self.parties if each.key_id == question.to), None)
            if party is None:
                raise Stranger("this witness carries no question to that party")
            if not self.least <= question.seconds <= _LONGEST or question.most > limits.BUNDLE_BYTES.most:
                raise Stranger(
                    f"this witness carries questions that give {self.least} to {_LONGEST} s, and ask for "
                    f"{limits.BUNDLE_BYTES.most} bytes at most"
                )
            return question, party
        raise Stranger("this question is signed by no referee of this witness")

    def _carried(self, question: Question, envelope: bytes, party: VerifyingKey, place: Path) -> bytes:
        """Have a question answered; the signed statement about that."""
        reader, received, begun = Reader(envelope, party, question.most), math.floor(time.time()), time.monotonic()
        answered = False
        while not answered and (left := begun + question.seconds - time.monotonic()) > 0:
            try:
                self.parties[party].ask(envelope, reader, left)
                reader.body()
                answered = True
            except Declined as error:  # honest parties decline questions of others, which is no lateness
                raise Stranger(f"the party does not take this question: {error}") from None
            except Silence:
                reader.restart()
                time.sleep(max(min(_AGAIN, begun + question.seconds - time.monotonic()), 0))
        if answered:
            write_whole(place, reader.envelope + b"\n" + (reader.body() or b""))
        ended = received + (math.ceil(time.monotonic() - begun) if answered else question.seconds)
        answer = reader.envelope if answered else None
        return Witnessed.over(envelope, answer, received=received, ended=ended).seal(self.key)

    def _pieces(self, statement: Path) -> Iterator[bytes]:
        signed = read_file(statement, ENVELOPE_BYTES)
        yield signed + b"\n"
        if Witnessed.open(signed, self.key.verifying).answer:
            with statement.with_suffix(".answer").open("rb") as file:
                while piece := file.read(_PIECE):
                    yield piece


class _Split(Reader):
    """Takes a witness's statement, and hands what follows to the reader of the party's answer."""

    def __init__(self, question: bytes, key: VerifyingKey, inner: Reader) -> None:
        self._inner = inner
        super().__init__(question, key, 0)

    @property
    def is_done(self) -> bool:
        return self._inner.is_done

    def restart(self) -> None:
        super().restart()
        self._inner.restart()

    def feed(self, piece: bytes) -> None:
        if not self.envelope:
            self._held += piece
            end = self._held.find(b"\n", 0, ENVELOPE_BYTES.most + 1)
            if end < 0 and len(self._held) > ENVELOPE_BYTES.most:
                raise Silence(f"the first {ENVELOPE_BYTES.most} bytes hold no statement of a witness")
            if end < 0:
                return
            self.envelope, piece = bytes(self._held[:end]), bytes(self._held[end + 1 :])
        if piece:
            self._inner.feed(piece)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A witness as a referee knows it: what the trust file calls it, its key, and how it is reached."""

    name: str
    key: VerifyingKey
    transport: Transport


@dataclass(frozen=True, slots=True)
class ByWitness:
    """Reaches a party by a witness, and itself where the witness makes no sound statement."""

    witness: Known
    party: Transport

    def ask(self, envelope: bytes, reader: Reader, seconds: float) -> None:
        """Feed the reader, which then holds the witness's statement; Silence names the witness that says so."""
        split = _Split(envelope, self.witness.key, reader)
        try:
            self.witness.transport.ask(envelope, split, seconds + _GRACE)
            said = Witnessed.open(split.envelope, self.witness.key)
            said.check(envelope, reader.envelope if said.answer else None, math.floor(seconds))
            if said.answer:
                reader.body()
        except EvidenceError:  # silence among them
            reader.restart()
            self.party.ask(envelope, reader, seconds)
            return
        reader.witness = split.envelope
        if not said.answer:
            raise Silence(said.text(), self.witness.name)
