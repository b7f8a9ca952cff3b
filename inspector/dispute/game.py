"""A game between a referee and parties as signed evidence: played once, and again by anyone who holds it.

    {"format": "chipwitness/game/3", "exchanges": [...], "result": DSSE envelope under the referee's key}

An exchange is the envelope of a question, that of its answer, and the answer's body in base64; or the question and,
in place of an answer, the referee's words about why there is none. Where a witness carried them, its statement is there
too (``witness``). The result binds all of them by their digest. It holds the parties' keys and no names: those are what
the trust file calls the keys. What is asked, and what the answers come to, is a law: that of ``Referee`` between two
parties, or another one.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from threading import Lock
from typing import Any, Protocol, TypeAlias

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.evidence import SigningKey, VerifyingKey, canonical, decode_base64, open_sealed, seal
from inspector.dispute.messages import Traffic
from inspector.dispute.referee import PARTIES, Referee, Seat
from inspector.inspection.trust import NotCountersigned, Trust
from inspector.inspection.verdict import Outcome, Reason, Verdict
from inspector.wire.desk import Transport
from inspector.wire.messages import Question, Reader, Silence, Witnessed

__all__ = [
    "FORMAT",
    "STATEMENTS",
    "Law",
    "MakeLaw",
    "Party",
    "Played",
    "Terms",
    "check_game",
    "digest_of",
    "head_of",
    "is_game",
    "known_for",
    "names_of",
    "opened_by_referee",
    "opened_result",
    "play",
    "record",
    "refereed",
    "replay",
    "run_of",
    "time_text",
    "verified",
    "worth",
]

FORMAT = "chipwitness/game/3"
_RESULT = "application/vnd.chipwitness.game.v1+json"
_KEYS = {"format", "exchanges", "result"}
_RESULT_KEYS = {"game", "referee", "parties", "exchanges", "verdict", "time"}
_TASK = re.compile("[0-9a-f]{64}")
_MOST_BRANCHES = 32
STATEMENTS = frozenset({"claim", "step", "results", "trace", "prefix", "node", "parts"})
"""First words of questions that a party answers in the same way whenever it is asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Party:
    """Who is asked, under which key it answers, and how it is reached."""

    name: str
    key: VerifyingKey
    transport: Transport


class Law(Protocol):
    """Asks parties, and rules; what it asks follows from what they answer."""

    seats: Sequence[Seat]
    guilty: tuple[str, ...]
    absent: tuple[str, ...]
    unfinished: tuple[str, ...]
    prevails: tuple[str, ...]

    def play(self) -> Verdict:
        """Ask, and rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What holds for a whole game.

    Attributes:
        seconds: that each answer may take.
        branching: into how many parts each round of the search divides the steps, 2 to 32.
        task: SHA-256, in hex, of the order that it is about (``monitor.transcript.orders``): questions name it until a
            party has said which run it claims. Of a contest the id of its run. Empty where no order was given.
    """

    seconds: int
    branching: int = 2
    task: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.task, str) or (self.task and _TASK.fullmatch(self.task) is None):
            raise CallerError(f"a game names its task by a SHA-256 digest, not {self.task!a:.100}")
        if type(self.seconds) is not int or self.seconds < 0:
            raise CallerError("the time for each answer in a game must be a whole number of seconds")
        if type(self.branching) is not int or not 2 <= self.branching <= _MOST_BRANCHES:
            raise CallerError(
                f"a search must divide the steps into 2 to {_MOST_BRANCHES} parts, not {self.branching!a:.20}"
            )

    def to_json(self) -> dict[str, Any]:
        """As a signed result states them."""
        return {name: value for name, value in asdict(self).items() if value != ""}

    @classmethod
    def of(cls, result: Mapping[str, Any], others: Collection[str]) -> Terms:
        """The terms in a result that has ``others``; EvidenceError where it has any other keys."""
        stated = {name: value for name, value in result.items() if name not in others}
        if set(result) != {*others, *stated} or set(stated) - {"task"} != {"seconds", "branching"}:
            raise EvidenceError("its result has missing or extra keys")
        return cls(**stated)


MakeLaw: TypeAlias = Callable[[Sequence[Seat], Traffic, str, int], Law]
"""Makes a law for these seats; it counts the traffic, has the referee's name, and divides steps into so many parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A game that is over.

    Attributes:
        said: statements of parties, by the number of the seat: question and body of the answer.
    """

    law: Law
    verdict: Verdict
    evidence: dict[str, Any]
    said: list[tuple[int, str, bytes]]


@dataclass(slots=True, kw_only=True)
class _Record:
    """What was asked and answered, in order.

    Attributes:
        broken: why the evidence is none, once that has shown.
        runs: by the number of the seat, the run that its party claims.
        witnesses: whose statements count, by name.
        turn: is held by the one thread that computes, and by none that waits for an answer.
    """

    game: str
    terms: Terms
    referee: VerifyingKey
    traffic: Traffic
    witnesses: Mapping[str, VerifyingKey] = field(default_factory=dict)
    exchanges: list[dict[str, Any]] = field(default_factory=list)
    said: list[tuple[int, str, bytes]] = field(default_factory=list)
    runs: dict[int, str] = field(default_factory=dict)
    taken: int = 0
    broken: str = ""
    turn: Lock = field(default_factory=Lock)

    def question(self, number: int, seat: int, key: VerifyingKey, text: str, most: int) -> Question:
        run, seconds = self.runs.get(seat, self.terms.task), self.terms.seconds
        return Question(game=self.game, number=number, to=key.key_id, run=run, text=text, most=most, seconds=seconds)

    def take(self, seat: int, text: str, reader: Reader) -> bytes:
        """The body of an answer; EvidenceError where the party signed that it gives none, or too much."""
        body, answer = reader.body(), reader.answer
        assert answer is not None
        self.traffic.bytes += len(reader.envelope) + 1 + len(body or b"")
        if body is None:
            refused = f"it refuses: {answer.refused}" if answer.refused else f"it signs for {answer.length} bytes"
            raise EvidenceError(refused)
        if text == "claim":
            self.runs.setdefault(seat, run_of(body))
        if text.partition(" ")[0] in STATEMENTS:
            self.said.append((seat, text, body))
        return body


def play(
    parties: Sequence[Party], trust: Trust | None, key: SigningKey, *, seconds: int, now: datetime, branching: int = 2
) -> tuple[Verdict, bytes]:
    """Play a game; returns the verdict, and the evidence.

    Args:
        key: the referee's.
        seconds, branching: as in ``Terms``.

    Raises:
        CallerError: two parties have one name.
    """
    if len({party.name for party in parties}) != 2:
        raise CallerError("a game needs two parties with different names")
    terms = Terms(seconds=seconds, branching=branching)
    played = record(parties, refereed(trust, terms), key, terms, now)
    return played.verdict, canonical.encode(played.evidence)


def refereed(trust: Trust | None, terms: Terms) -> MakeLaw:
    """The law of ``Referee``; NotCountersigned where the trust file has no order of the task that it is about."""
    known = known_for(trust, terms)
    return lambda seats, traffic, name, branching: Referee(seats, known, traffic, name, branching)


def known_for(trust: Trust | None, terms: Terms) -> Trust | None:
    """What counts for a game: of a game about a task its order, and nothing else that anyone agreed to."""
    return trust if trust is None or not terms.task else trust.about(terms.task)


def record(
    parties: Sequence[Party], make: MakeLaw, key: SigningKey, terms: Terms, now: datetime, turn: Lock | None = None
) -> Played:
    """Play a game under a law, and sign it.

    Args:
        turn: one for all games that are played at once.
    """
    held = _Record(
        game=secrets.token_hex(32), terms=terms, referee=key.verifying, traffic=Traffic(), turn=turn or Lock()
    )
    seats = [Seat(name=each.name, key=each.key, ask=_asking(held, n, each, key)) for n, each in enumerate(parties)]
    with held.turn:
        law = make(seats, held.traffic, _called(key.verifying), terms.branching)
        verdict = law.play()
        result = {
            "game": held.game,
            "referee": key.verifying.raw.hex(),
            "parties": [party.key.raw.hex() for party in parties],
            **terms.to_json(),
            "exchanges": digest_of(held.exchanges),
            "verdict": _facts(verdict, law),
            "time": time_text(now),
        }
        signed = canonical.decode(seal(_RESULT, result, key), most=limits.BUNDLE_BYTES)
        evidence = {"format": FORMAT, "exchanges": held.exchanges, "result": signed}
    return Played(law=law, verdict=verdict, evidence=evidence, said=held.said)


def _asking(record: _Record, seat: int, party: Party, key: SigningKey) -> Any:
    def ask(text: str, most: int) -> bytes:
        envelope = record.question(len(record.exchanges), seat, party.key, text, most).seal(key)
        reader = Reader(envelope, party.key, most)
        exchange = {"question": canonical.decode(envelope, most=limits.BUNDLE_BYTES)}
        record.turn.release()
        try:
            party.transport.ask(envelope, reader, record.terms.seconds)
            body = reader.body()
        except Silence as silence:
            record.exchanges.append({**exchange, **_witness(reader), "silence": str(silence)})
            raise
        finally:
            record.turn.acquire()
        exchange["answer"] = canonical.decode(reader.envelope, most=limits.BUNDLE_BYTES)
        exchange["body"] = "" if body is None else base64.b64encode(body).decode()
        record.exchanges.append({**exchange, **_witness(reader)})
        return record.take(seat, text, reader)

    return ask


def _witness(reader: Reader) -> dict[str, object]:
    """The statement of the witness that carried a question, as a part of its exchange; nothing where none did."""
    return {"witness": canonical.decode(reader.witness, most=limits.BUNDLE_BYTES)} if reader.witness else {}


def run_of(claim: bytes) -> str:
    """The id of the run that the body of a claim names, whether or not the claim is a good one; empty: of none."""
    try:
        return str(head_of(canonical.decode(claim))["run"])
    except (EvidenceError, LookupError, TypeError, ValueError):
        return ""


def head_of(claim: Any) -> Any:
    """What the signed head of a claim says, which is not verified."""
    return canonical.decode(decode_base64(canonical.decode(decode_base64(claim["manifest"]))["payload"]))


def is_game(data: bytes) -> bool:
    """Whether a file begins as a game's evidence does, whatever it is worth."""
    return data.startswith(b'{"exchanges":')


def check_game(data: bytes, trust: Trust) -> Verdict:
    """Play a game again from its evidence alone; the verdict that this gives.

    That a party is absent rests on the referee's word, or on the statement of a witness in the trust file. It rejects
    no one unless the trust file names the referee's key as an inspectorate's. Evidence that is malformed, is not what
    its parties and its referee signed, or gives another verdict than the referee signed is a REJECT of the evidence:
    ``evidence["verifies"]`` is false, and nothing is said of the parties.
    """
    return verified("game", lambda: _checked(data, trust))


def verified(what: str, check: Callable[[], Verdict]) -> Verdict:
    """The verdict of a check, and that the evidence verifies; or a REJECT of the evidence, which is called ``what``.

    INCONCLUSIVE where the trust files lack the order of the task that it is about.
    """
    try:
        verdict = check()
    except NotCountersigned as error:
        contest = ". Check a file of `world contest` with its bundle: `verify BUNDLE --contest FILE`"
        reason = Reason(guard="game", text=f"{error}{contest if what == 'game' else ''}")
        return Verdict(outcome=Outcome.INCONCLUSIVE, reasons=(reason,), evidence={"verifies": False})
    except (EvidenceError, CallerError) as error:
        text = f"the {what} does not verify: {error}"
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError) as error:
        text = f"the {what} does not verify: a part of it is malformed: {error!a:.200}"
    else:
        return replace(verdict, evidence={**verdict.evidence, "verifies": True})
    return Verdict(outcome=Outcome.REJECT, reasons=(Reason(guard="game", text=text),), evidence={"verifies": False})


def _checked(data: bytes, trust: Trust) -> Verdict:
    parsed = canonical.decode(data, most=limits.BUNDLE_BYTES)
    _, raws, referee, terms = opened_result(parsed)
    keys = [VerifyingKey(bytes.fromhex(raw)) for raw in raws]
    if len(keys) != 2:
        raise EvidenceError("a game needs two parties")
    make = refereed(trust, terms)
    parties = list(zip(names_of(keys, trust), keys, strict=True))
    verdict = replay(parsed, parties, make, trust.witnesses).verdict
    return worth(verdict, is_known=referee in trust.inspectorates)


def names_of(keys: Sequence[VerifyingKey], trust: Trust) -> list[str]:
    """What the trust file calls these keys, no two alike; EvidenceError where it names no lab with one."""
    names: list[str] = []
    for number, key in enumerate(keys):
        lab = next((lab for lab, known in trust.labs.items() if known == key), None)
        if lab is None:
            raise EvidenceError(f"the trust file names no lab with the key {key.key_id}")
        names.append(lab if lab not in names else f"{lab}, party {number + 1}")
    return names


def replay(
    parsed: object,
    parties: Sequence[tuple[str, VerifyingKey]],
    make: MakeLaw,
    witnesses: Mapping[str, VerifyingKey],
) -> Played:
    """Play a game between these parties again from its evidence; EvidenceError where it is not what they signed.

    Args:
        witnesses: of the trust file.
    """
    result, raws, referee, terms = opened_result(parsed)
    if raws != [key.raw.hex() for _, key in parties]:
        raise EvidenceError("it is a game between different parties")
    exchanges = parsed["exchanges"]  # type: ignore[index]
    if not isinstance(exchanges, list) or digest_of(exchanges) != result["exchanges"]:
        raise EvidenceError("its exchanges are not those that the referee signed")
    held = _Record(
        game=result["game"],
        terms=terms,
        referee=referee,
        traffic=Traffic(),
        witnesses=witnesses,
        exchanges=exchanges,
    )
    seats = [Seat(name=name, key=key, ask=_answering(held, n, key)) for n, (name, key) in enumerate(parties)]
    law = make(seats, held.traffic, _called(referee), terms.branching)
    verdict = law.play()
    if held.broken:
        raise EvidenceError(held.broken)
    if held.taken != len(exchanges):
        raise EvidenceError(f"its last {len(exchanges) - held.taken} exchanges belong to no question that the law asks")
    if canonical.encode(_facts(verdict, law)) != canonical.encode(result["verdict"]):
        raise EvidenceError("the recorded answers lead to a verdict other than the one that the referee signed")
    return Played(law=law, verdict=verdict, evidence=dict(parsed), said=held.said)  # type: ignore[call-overload]


def _answering(record: _Record, seat: int, key: VerifyingKey) -> Any:
    def ask(text: str, most: int) -> bytes:
        number, record.taken = record.taken, record.taken + 1
        try:
            reader = _next(record, number, seat, key, text, most)
        except (EvidenceError, LookupError, TypeError, ValueError) as error:
            record.broken = record.broken or f"exchange {number} is not valid: {error}"
            raise
        if isinstance(reader, Silence):
            raise reader
        return record.take(seat, text, reader)

    return ask


def _next(record: _Record, number: int, seat: int, key: VerifyingKey, text: str, most: int) -> Reader | Silence:
    """What was answered; Silence where the referee says that nothing was, with the witness that says so, too."""
    exchange = dict(record.exchanges[number])
    signed = exchange.pop("witness", None)
    envelope = canonical.encode(exchange["question"])
    if Question.open(envelope, record.referee) != record.question(number, seat, key, text, most):
        raise EvidenceError("the recorded question is not the one that the law asks")
    reader = Reader(envelope, key, most)
    if set(exchange) == {"question", "silence"}:
        name, said = _testified(record, signed, envelope, None)
        return Silence(str(exchange["silence"]) if said is None else said.text(), name)
    if set(exchange) != {"question", "answer", "body"}:
        raise EvidenceError("it does not consist of a question, an answer and a body")
    try:
        reader.feed(canonical.encode(exchange["answer"]) + b"\n" + decode_base64(exchange["body"]))
        reader.body()
    except Silence as silence:
        raise EvidenceError(f"it holds no valid answer: {silence}") from None
    _testified(record, signed, envelope, reader.envelope)
    return reader


def _testified(record: _Record, signed: Any, question: bytes, answer: bytes | None) -> tuple[str, Witnessed | None]:
    """Name and statement of a witness that counts; nothing where there is none, or the trust file does not name it.

    Raises:
        EvidenceError: a witness that counts has not signed this, or has signed it about something else.
    """
    if signed is None:
        return "", None
    envelope, said_by = canonical.encode(signed), signed["signatures"][0]["keyid"]
    for name, key in record.witnesses.items():
        if key.key_id == said_by:
            said = Witnessed.open(envelope, key)
            said.check(question, answer, record.terms.seconds)
            return name, said
    return "", None


def opened_result(parsed: object) -> tuple[dict[str, Any], list[str], VerifyingKey, Terms]:
    """A game's signed result: all of it, the parties' keys in hex, the referee's key, and the terms."""
    if not isinstance(parsed, dict) or set(parsed) != _KEYS or parsed["format"] != FORMAT:
        raise EvidenceError(f"not a game of the form {FORMAT}")
    result, referee = opened_by_referee(parsed["result"], _RESULT)
    terms = Terms.of(result, _RESULT_KEYS)
    if not isinstance(result["parties"], list):
        raise EvidenceError("its result does not have the parts of a game's result")
    return result, result["parties"], referee, terms


def opened_by_referee(envelope: object, kind: str) -> tuple[dict[str, Any], VerifyingKey]:
    """What a referee signed, under the key that it names."""
    data = canonical.encode(envelope)
    try:
        payload = canonical.decode(decode_base64(envelope["payload"]), most=limits.BUNDLE_BYTES)  # type: ignore[index]
        key = VerifyingKey(bytes.fromhex(payload["referee"]))
    except (LookupError, TypeError, ValueError):
        raise EvidenceError("its result names no referee") from None
    opened: dict[str, Any] = open_sealed(data, kind, key, most=limits.BUNDLE_BYTES)
    return opened, key


def _facts(verdict: Verdict, law: Law) -> dict[str, Any]:
    """The verdict with numbers in place of the parties' names, which each reader takes from a trust file."""
    names = [seat.name for seat in law.seats]
    numbers = {kind: sorted(map(names.index, getattr(law, kind))) for kind in PARTIES}
    return {"outcome": verdict.outcome.value, **verdict.evidence, **numbers}


def worth(verdict: Verdict, *, is_known: bool) -> Verdict:
    """The verdict, without what rests on the word of a referee whom the trust file does not name."""
    evidence = verdict.evidence
    if not evidence["absent"] or evidence["guilty"] or is_known or verdict.outcome is not Outcome.REJECT:
        return verdict
    text = "that rests on the word of a referee whose key the trust file does not name as an inspectorate's"
    reasons = (*verdict.reasons, Reason(guard="dispute", text=text))
    return Verdict(outcome=Outcome.INCONCLUSIVE, reasons=reasons, evidence=evidence)


def digest_of(parts: object) -> str:
    """SHA-256, in hex, of canonical JSON."""
    return hashlib.sha256(canonical.encode(parts)).hexdigest()


def time_text(now: datetime) -> str:
    """A moment in UTC as a result writes it."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def _called(key: VerifyingKey) -> str:
    return f"referee {key.key_id[:23]}…"
