"""A game between a referee and two parties as signed evidence: played once, and again by anyone who holds it.

    {"format": "chipwitness/game/1", "exchanges": [...], "result": DSSE envelope under the referee's key}

An exchange is the envelope of a question, that of its answer, and the answer's body in base64; or the question and,
in place of an answer, the referee's words about why there is none. The result binds all of them by their digest. It
holds the parties' keys and no names: those are what the trust file calls the keys.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import SigningKey, VerifyingKey, canonical, decode_base64, open_sealed, seal
from inspector.dispute.messages import Traffic
from inspector.dispute.referee import Referee, Seat
from inspector.inspection.trust import Trust
from inspector.inspection.verdict import Outcome, Reason, Verdict
from inspector.wire.desk import Transport
from inspector.wire.messages import Question, Reader, Silence

__all__ = ["FORMAT", "Party", "check_game", "is_game", "play"]

FORMAT = "chipwitness/game/1"
_RESULT = "application/vnd.chipwitness.game.v1+json"
_KEYS = {"format", "exchanges", "result"}
_RESULT_KEYS = {"game", "referee", "parties", "seconds", "exchanges", "verdict", "time"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """Who is asked, under which key it answers, and how it is reached."""

    name: str
    key: VerifyingKey
    transport: Transport


@dataclass(slots=True, kw_only=True)
class _Record:
    """What was asked and answered, in order.

    Attributes:
        broken: why the evidence is none, once that has shown.
    """

    game: str
    seconds: int
    referee: VerifyingKey
    traffic: Traffic
    exchanges: list[dict[str, Any]] = field(default_factory=list)
    taken: int = 0
    broken: str = ""

    def question(self, number: int, key: VerifyingKey, text: str, most: int) -> Question:
        return Question(game=self.game, number=number, to=key.key_id, text=text, most=most, seconds=self.seconds)

    def take(self, reader: Reader) -> bytes:
        """The body of an answer; EvidenceError where the party signed that it gives none, or too much."""
        body, answer = reader.body(), reader.answer
        assert answer is not None
        self.traffic.bytes += len(reader.envelope) + 1 + len(body or b"")
        if body is None:
            refused = f"it refuses: {answer.refused}" if answer.refused else f"it signs for {answer.length} bytes"
            raise EvidenceError(refused)
        return body


def play(
    parties: Sequence[Party], trust: Trust | None, key: SigningKey, *, seconds: int, now: datetime
) -> tuple[Verdict, bytes]:
    """Play a game; returns the verdict, and the evidence.

    Args:
        key: the referee's.
        seconds: that each answer may take.

    Raises:
        CallerError: the runs are not of one task, or not both finished; two parties have one name.
    """
    if len({party.name for party in parties}) != 2:
        raise CallerError("a game has two parties, with names that differ")
    record = _Record(game=secrets.token_hex(32), seconds=seconds, referee=key.verifying, traffic=Traffic())
    seats = [Seat(name=each.name, key=each.key, ask=_asking(record, each, key)) for each in parties]
    referee = Referee(seats, trust, record.traffic, _called(key.verifying))
    verdict = referee.play()
    result = {
        "game": record.game,
        "referee": key.verifying.raw.hex(),
        "parties": [party.key.raw.hex() for party in parties],
        "seconds": seconds,
        "exchanges": _digest(record.exchanges),
        "verdict": _facts(verdict, referee),
        "time": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    signed = canonical.decode(seal(_RESULT, result, key), most=limits.BUNDLE_BYTES)
    return verdict, canonical.encode({"format": FORMAT, "exchanges": record.exchanges, "result": signed})


def _asking(record: _Record, party: Party, key: SigningKey) -> Any:
    def ask(text: str, most: int) -> bytes:
        envelope = record.question(len(record.exchanges), party.key, text, most).seal(key)
        reader = Reader(envelope, party.key, most)
        exchange = {"question": canonical.decode(envelope, most=limits.BUNDLE_BYTES)}
        try:
            party.transport.ask(envelope, reader, record.seconds)
            body = reader.body()
        except Silence as silence:
            record.exchanges.append({**exchange, "silence": str(silence)})
            raise
        exchange["answer"] = canonical.decode(reader.envelope, most=limits.BUNDLE_BYTES)
        exchange["body"] = "" if body is None else base64.b64encode(body).decode()
        record.exchanges.append(exchange)
        return record.take(reader)

    return ask


def is_game(data: bytes) -> bool:
    """Whether a file begins as a game's evidence does, whatever it is worth."""
    return data.startswith(b'{"exchanges":')


def check_game(data: bytes, trust: Trust) -> Verdict:
    """Play a game again from its evidence alone; the verdict that this gives.

    What only the referee says, that a party is absent, rejects no one unless the trust file names the referee's key as
    an inspectorate's. Evidence that is malformed, is not what its parties and its referee signed, or gives another
    verdict than the referee signed is a REJECT of the evidence: ``evidence["verifies"]`` is false, and nothing is said
    of the parties.
    """
    try:
        verdict = _checked(data, trust)
    except (EvidenceError, CallerError) as error:
        text = f"the game does not verify: {error}"
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError) as error:
        text = f"the game does not verify: a part of it is malformed: {error!a:.200}"
    else:
        return replace(verdict, evidence={**verdict.evidence, "verifies": True})
    return Verdict(outcome=Outcome.REJECT, reasons=(Reason(guard="game", text=text),), evidence={"verifies": False})


def _checked(data: bytes, trust: Trust) -> Verdict:
    parsed = canonical.decode(data, most=limits.BUNDLE_BYTES)
    if not isinstance(parsed, dict) or set(parsed) != _KEYS or parsed["format"] != FORMAT:
        raise EvidenceError(f"not a game of the form {FORMAT}")
    exchanges = parsed["exchanges"]
    result, referee = _opened(parsed["result"])
    if not isinstance(exchanges, list) or _digest(exchanges) != result["exchanges"]:
        raise EvidenceError("its exchanges are not those that the referee signed")
    record = _Record(
        game=result["game"], seconds=result["seconds"], referee=referee, traffic=Traffic(), exchanges=exchanges
    )
    seats: list[Seat] = []
    for number, party_key in enumerate(VerifyingKey(bytes.fromhex(raw)) for raw in result["parties"]):
        lab = next((lab for lab, key in trust.labs.items() if key == party_key), None)
        if lab is None:
            raise EvidenceError(f"the trust file names no lab with the key {party_key.key_id}")
        name = lab if not seats or seats[0].name != lab else f"{lab}, party {number + 1}"
        seats.append(Seat(name=name, key=party_key, ask=_answering(record, party_key)))
    again = Referee(seats, trust, record.traffic, _called(referee))
    verdict = again.play()
    if record.broken:
        raise EvidenceError(record.broken)
    if record.taken != len(exchanges):
        raise EvidenceError(f"its last {len(exchanges) - record.taken} exchanges are of no question that the law asks")
    if canonical.encode(_facts(verdict, again)) != canonical.encode(result["verdict"]):
        raise EvidenceError("its answers give another verdict than the referee signed")
    return _worth(verdict, is_known=referee in trust.inspectorates)


def _answering(record: _Record, key: VerifyingKey) -> Any:
    def ask(text: str, most: int) -> bytes:
        number, record.taken = record.taken, record.taken + 1
        try:
            reader = _next(record, number, key, text, most)
        except (EvidenceError, LookupError, TypeError, ValueError) as error:
            record.broken = record.broken or f"exchange {number} is not sound: {error}"
            raise
        if reader is None:
            raise Silence(str(record.exchanges[number]["silence"]))
        return record.take(reader)

    return ask


def _next(record: _Record, number: int, key: VerifyingKey, text: str, most: int) -> Reader | None:
    """What was answered; None where the referee says that nothing was."""
    exchange = record.exchanges[number]
    envelope = canonical.encode(exchange["question"])
    if Question.open(envelope, record.referee) != record.question(number, key, text, most):
        raise EvidenceError("the law asks another question")
    reader = Reader(envelope, key, most)
    if set(exchange) == {"question", "silence"}:
        return None
    if set(exchange) != {"question", "answer", "body"}:
        raise EvidenceError("it has other parts than a question, an answer and a body")
    try:
        reader.feed(canonical.encode(exchange["answer"]) + b"\n" + decode_base64(exchange["body"]))
        reader.body()
    except Silence as silence:
        raise EvidenceError(f"in place of an answer it holds {silence}") from None
    return reader


def _opened(envelope: object) -> tuple[dict[str, Any], VerifyingKey]:
    """The result, under the key that it names."""
    data = canonical.encode(envelope)
    try:
        payload = canonical.decode(decode_base64(envelope["payload"]), most=limits.BUNDLE_BYTES)  # type: ignore[index]
        key = VerifyingKey(bytes.fromhex(payload["referee"]))
    except (LookupError, TypeError, ValueError):
        raise EvidenceError("its result names no referee") from None
    result = open_sealed(data, _RESULT, key, most=limits.BUNDLE_BYTES)
    parties = result["parties"] if set(result) == _RESULT_KEYS else None
    if not isinstance(parties, list) or len(parties) != 2:
        raise EvidenceError("its result has other parts than a game's")
    return result, key


def _facts(verdict: Verdict, referee: Referee) -> dict[str, Any]:
    """The verdict with numbers in place of the parties' names, which each reader takes from a trust file."""
    names = [seat.name for seat in referee.seats]
    losers = {"guilty": sorted(map(names.index, referee.guilty)), "absent": sorted(map(names.index, referee.absent))}
    return {"outcome": verdict.outcome.value, **verdict.evidence, **losers}


def _worth(verdict: Verdict, *, is_known: bool) -> Verdict:
    """The verdict, without what rests on the word of a referee whom the trust file does not name."""
    if verdict.evidence["absent"] is None or is_known or verdict.outcome is not Outcome.REJECT:
        return verdict
    text = "that rests on the word of a referee whose key the trust file does not name as an inspectorate's"
    reasons = (*verdict.reasons, Reason(guard="dispute", text=text))
    return Verdict(outcome=Outcome.INCONCLUSIVE, reasons=reasons, evidence=verdict.evidence)


def _digest(exchanges: object) -> str:
    return hashlib.sha256(canonical.encode(exchanges)).hexdigest()


def _called(key: VerifyingKey) -> str:
    return f"referee {key.key_id[:23]}…"
