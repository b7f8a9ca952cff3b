"""Answers as they come to who has asked, from a party or by a witness, for ``fuzz``."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import SigningKey, canonical, seal
from inspector.wire.messages import Answer, Question, Reader, Silence, Witnessed
from inspector.wire.witness import ByWitness, Known

__all__ = ["PROVIDER", "REFEREE", "ExchangeReader", "WitnessReader"]

REFEREE = SigningKey.from_private_bytes(bytes([3]) * 32)
PROVIDER = SigningKey.from_private_bytes(bytes([5]) * 32)
_NOTARY = SigningKey.from_private_bytes(bytes([6]) * 32)
_ANSWER, _WITNESSED = (f"application/vnd.chipwitness.{kind}.v1+json" for kind in ("answer", "witnessed"))


class ExchangeReader:
    """An answer as it comes to who has asked: what its envelope says, and its body."""

    def __init__(self) -> None:
        question = Question(game="00" * 32, number=0, to="x", run="r", text="claim", most=999, seconds=9)
        self._question = question.seal(REFEREE)

    def seeds(self) -> list[bytes]:
        """An answer and a refusal."""
        told = [(b"body", ""), (b"", "no")]
        return [
            canonical.encode({**canonical.decode(canonical.encode(self._form(body, why))), "body": body.decode()})
            for body, why in told
        ]

    def _form(self, body: bytes, why: str) -> dict[str, Any]:
        answer = Answer.over(self._question, body, why)
        return {"question": answer.question, "length": answer.length, "sha256": answer.sha256, "refused": why}

    def read(self, data: bytes) -> None:
        """Take it in pieces."""
        told = canonical.decode(data)
        if not isinstance(told, dict) or not isinstance(told.get("body"), str):
            raise EvidenceError("an answer is an object with a body")
        body = told.pop("body").encode(errors="replace")
        stream = seal(_ANSWER, told, PROVIDER) + b"\n" + body
        reader = Reader(self._question, PROVIDER.verifying, 999)
        for at in range(0, len(stream), 97):
            reader.feed(stream[at : at + 97])
        reader.body()


class WitnessReader(ExchangeReader):
    """An answer that a witness passes on after its statement: what both sign, and the body."""

    def seeds(self) -> list[bytes]:
        """An answer, a refusal, and a statement that none came."""
        late = asdict(Witnessed.over(self._question, None, received=1, ended=99))
        every = [{**late, "answer": answer} for answer in ("", "of the answer")]
        answers = map(canonical.decode, super().seeds())
        return [canonical.encode({"said": said, "answer": each}) for each in answers for said in every]

    def read(self, data: bytes) -> None:
        """Ask through the witness; the party itself is gone."""
        told = canonical.decode(data)
        if not isinstance(told, dict) or not all(isinstance(told.get(each), dict) for each in ("said", "answer")):
            raise EvidenceError("a statement and an answer are an object")
        said = told["said"]
        body = str(told["answer"].pop("body", "")).encode(errors="replace")
        envelope = seal(_ANSWER, told["answer"], PROVIDER)
        if said.get("answer"):
            said["answer"] = hashlib.sha256(envelope).hexdigest()
        stream = seal(_WITNESSED, said, _NOTARY) + b"\n" + (envelope + b"\n" + body if said.get("answer") else b"")
        reader = Reader(self._question, PROVIDER.verifying, 999)
        way = ByWitness(Known(name="notary", key=_NOTARY.verifying, transport=_Stream(stream)), _Stream(b""))
        try:
            way.ask(self._question, reader, 9)
        except Silence as silence:
            if not silence.witness:
                raise
            if said["ended"] - said["received"] < 9:
                raise AssertionError(said) from None
            return
        reader.body()


class _Stream:
    """Brings what it holds in pieces; Silence where it holds nothing."""

    def __init__(self, stream: bytes) -> None:
        self._held = stream

    def ask(self, envelope: bytes, reader: Reader, seconds: float) -> None:
        """Feed the reader."""
        for at in range(0, len(self._held), 97):
            reader.feed(self._held[at : at + 97])
        if not self._held:
            raise Silence("it cannot be reached")
