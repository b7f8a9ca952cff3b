"""What servers and referees are sent, for ``fuzz``: questions, answers in a game, evidence of one, requests, and tasks.

Each reader takes JSON. What a signature covers is signed in here, as its sender could sign whatever it likes.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import shutil
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from starlette.applications import Starlette

from firmware_sim import limits
from firmware_sim.errors import CallerError, DeviceError, EvidenceError
from firmware_sim.evidence import SigningKey, VerifyingKey, canonical, decode_base64, seal
from inspector.delegation.errand import Errand
from inspector.delegation.reception import Bounds, Reception
from inspector.dispute.game import FORMAT, Party, check_game, play
from inspector.dispute.messages import Traffic
from inspector.dispute.prover import SigningProver
from inspector.dispute.provider import Provider, desk_of
from inspector.dispute.referee import Referee, Seat
from inspector.inspection.trust import Trust
from inspector.rounds import door
from inspector.rounds.world import INSPECTORATE, World, sealed
from inspector.wire.desk import Local
from inspector.wire.messages import Answer, Reader, Silence
from inspector.wire.server import routed
from inspector.wire.telemetry import Telemetry
from inspector.wire.uploads import upload_route
from monitor.files import remove
from monitor.lab.prover import LabProver
from monitor.lab.rounds import LabSide
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.replay.ordering import order_run
from monitor.transcript import RunFolder
from monitor.transcript.layout import MANIFEST
from monitor.transcript.manifest import PAYLOAD_TYPE
from monitor.transcript.orders import ORDER, OrderFolder
from tests.measurements._fuzz_answers import PROVIDER, REFEREE, ExchangeReader, WitnessReader

__all__ = ["READERS", "PartyReader", "prepare_parties"]

CLIENT = SigningKey.from_private_bytes(bytes([4]) * 32)
_QUESTION = "application/vnd.chipwitness.question.v1+json"
_RESULT = "application/vnd.chipwitness.game.v1+json"
_PASS = "application/vnd.chipwitness.pass.v1+json"
_KNOWN = {200, 400, 403, 404, 405, 408, 409, 411, 413, 415, 422, 503}
"""Statuses of a server that is well; what it raises is a finding."""
_HEADERS = 20
"""Of a request that are taken over from the input."""
_CLEANED = 200
"""Questions after which a store is emptied."""


class Framed(Exception):
    """An honest party was blamed."""


def prepare_parties(folder: Path, honest: Path, liar: Path) -> None:
    """Play the game between an honest loop and one that lies, and write the task of the honest one's steps."""
    parties = []
    for run in (honest, liar):
        prover = LabProver(run)
        place = folder / f"desk-{run.name}"
        desk = desk_of(RunFolder(run, prover.key.verifying), prover, place, [REFEREE.verifying])
        parties.append(Party(name=run.name, key=prover.key.verifying, transport=Local(desk)))
    verdict, game = play(parties, _trust(honest, liar), REFEREE, seconds=60, now=datetime(2026, 1, 1, tzinfo=UTC))
    if verdict.evidence["guilty"] != liar.name:
        raise RuntimeError(f"the game convicts {verdict.evidence['guilty']}: {verdict.reasons[0].text}")
    (folder / "played.json").write_bytes(game)
    order_run(RunFolder(honest, parties[0].key), folder / "task", CLIENT)


def _trust(honest: Path, liar: Path) -> Trust:
    return Trust.load([run.with_name(f"{run.name}.trust.json") for run in (honest, liar)])


def _asked(game: Path) -> list[tuple[int, str, Any]]:
    """By seat, the questions of a game and what was answered."""
    found = []
    parsed = canonical.decode(game.read_bytes(), most=limits.BUNDLE_BYTES)
    keys = [VerifyingKey(bytes.fromhex(raw)).key_id for raw in _payload(parsed["result"])["parties"]]
    for each in parsed["exchanges"]:
        question = _payload(each["question"])
        body = canonical.decode(decode_base64(each["body"]), most=limits.BUNDLE_BYTES)
        found.append((keys.index(question["to"]), question["text"], body))
    return found


def _payload(envelope: Any) -> Any:
    return canonical.decode(decode_base64(envelope["payload"]), most=limits.BUNDLE_BYTES)


class GameReader:
    """The answers of a lying party, by their questions; the honest one answers as it does, and is never blamed."""

    def __init__(self, honest: Path, liar: Path, game: Path) -> None:
        self._provers = [LabProver(each) for each in (honest, liar)]
        runs = [RunFolder(run, prover.key.verifying) for run, prover in zip((honest, liar), self._provers, strict=True)]
        self._providers = [Provider(run, prover) for run, prover in zip(runs, self._provers, strict=True)]
        self._game, self._trust = game, _trust(honest, liar)
        self._kept: dict[tuple[int, str], bytes] = {}

    def seeds(self) -> list[bytes]:
        """One answer in each, as the liar gave it, and all of them."""
        told = {text: body for seat, text, body in _asked(self._game) if seat}
        head = _payload(canonical.decode(decode_base64(told["claim"]["manifest"])))
        metadata = canonical.decode(decode_base64(told["claim"]["metadata"]), most=limits.METADATA_BYTES)
        told["claim"] = {"head": head, "metadata": metadata, "data": told["claim"]["data"]}
        return [canonical.encode(each) for each in (*({text: told[text]} for text in told), told)]

    def read(self, data: bytes) -> None:
        """Play; EvidenceError where the liar has lost for an answer that is none."""
        told = canonical.decode(data, most=limits.BUNDLE_BYTES)
        if not isinstance(told, dict):
            raise EvidenceError("answers are an object")
        keys = [each.key.verifying for each in self._provers]
        asks: list[Callable[[str, int], bytes]] = [self._honest, lambda text, most: self._lying(text, told)]
        seats = [
            Seat(name=name, key=key, ask=ask) for name, key, ask in zip(("honest", "liar"), keys, asks, strict=True)
        ]
        law = Referee(seats, self._trust, Traffic(), "the referee", 2)
        verdict = law.play()
        if "honest" in (*law.guilty, *law.absent):
            raise Framed(verdict.reasons[0].text)
        if verdict.evidence["case"] == "no valid answer":
            raise EvidenceError(verdict.reasons[0].text)

    def _honest(self, text: str, most: int) -> bytes:
        return self._answer(0, text)

    def _lying(self, text: str, told: Mapping[str, Any]) -> bytes:
        if text not in told:
            return self._answer(1, text)
        body = told[text]
        if text == "claim" and isinstance(body, dict) and "head" in body:
            body = {
                "manifest": base64.b64encode(seal(PAYLOAD_TYPE, body["head"], self._provers[1].key)).decode(),
                "metadata": base64.b64encode(canonical.encode(body.get("metadata"))).decode(),
                "data": body.get("data"),
            }
        return canonical.encode(body)

    def _answer(self, seat: int, text: str) -> bytes:
        """As the party's desk answers: what it has to refuse it signs, and what breaks it is silence."""
        if (seat, text) not in self._kept:
            try:
                self._kept[seat, text] = self._providers[seat].answer(text)
            except (CallerError, EvidenceError) as error:
                raise EvidenceError(f"it refuses: {error}") from None
            except Exception as error:
                raise Silence(f"this machine cannot answer: {type(error).__name__}: {error}") from None
        return self._kept[seat, text]


class EvidenceReader:
    """A game's evidence under the key of a referee that says and leaves out what it likes."""

    def __init__(self, game: Path, honest: Path, liar: Path) -> None:
        self._game = game
        self._trust = _trust(honest, liar)

    def seeds(self) -> list[bytes]:
        """The evidence, each envelope of the referee's as what it holds."""
        parsed = canonical.decode(self._game.read_bytes(), most=limits.BUNDLE_BYTES)
        exchanges = [{**each, "question": _payload(each["question"])} for each in parsed["exchanges"]]
        return [canonical.encode({"exchanges": exchanges, "result": _payload(parsed["result"])})]

    def read(self, data: bytes) -> None:
        """Check it; EvidenceError where it does not verify."""
        told = canonical.decode(data, most=limits.BUNDLE_BYTES)
        try:
            exchanges = [
                {**each, "question": canonical.decode(seal(_QUESTION, each["question"], REFEREE))}
                for each in told["exchanges"]
            ]
            digest = hashlib.sha256(canonical.encode(exchanges)).hexdigest()
            result = seal(_RESULT, {**told["result"], "exchanges": digest}, REFEREE)
        except (LookupError, TypeError) as error:
            raise EvidenceError(f"no referee writes that: {error!a:.100}") from None
        whole = {"format": FORMAT, "exchanges": exchanges, "result": canonical.decode(result)}
        verdict = check_game(canonical.encode(whole), self._trust)
        if (verdict.evidence.get("guilty") or "liar") != "liar":
            raise Framed(verdict.reasons[0].text)
        if not verdict.evidence["verifies"]:
            raise EvidenceError(verdict.reasons[0].text)


class QuestionReader:
    """Questions to a provider: what is signed, with the text as the referee writes it."""

    def __init__(self, run: Path, game: Path, store: Path) -> None:
        self._prover: SigningProver = LabProver(run)
        self._run, self._game, self._store, self._asked = run, game, store, 0

    def seeds(self) -> list[bytes]:
        """A question of each kind that the game asked."""
        kinds = {text.partition(" ")[0]: text for _, text, _ in _asked(self._game)}
        run = RunFolder(self._run, self._prover.key.verifying).manifest.run
        common = {"game": "00" * 32, "number": 0, "to": self._prover.key.verifying.key_id, "run": run}
        texts = [*kinds.values(), "result 1", "leaves 0", "block 1 0 weight/weight"]
        return [canonical.encode({**common, "text": text, "most": 1 << 22, "seconds": 9}) for text in texts]

    def read(self, data: bytes) -> None:
        """Ask; EvidenceError where it is refused, CallerError where no one may ask that."""
        envelope = seal(_QUESTION, canonical.decode(data), REFEREE)
        if self._asked % _CLEANED == 0:
            remove(self._store)
            run = RunFolder(self._run, self._prover.key.verifying)
            self._desk = desk_of(run, self._prover, self._store, [REFEREE.verifying])
        self._asked += 1
        reader = Reader(envelope, self._prover.key.verifying, 1 << 22)
        try:
            for piece in self._desk.take(envelope):
                reader.feed(piece)
        except DeviceError as error:  # what no law asks gets no signature, as what the machine cannot
            raise EvidenceError(str(error)) from None
        if reader.body() is None:
            raise EvidenceError("refused")


def _answered(application: Starlette, method: str, path: str, headers: Mapping[str, str], body: bytes) -> int:
    """The status of an application's answer to a request."""
    status: list[int] = []
    pieces = [body[at : at + 1000] for at in range(0, len(body), 1000)] or [b""]
    coming = iter([{"type": "http.request", "body": each, "more_body": True} for each in pieces])

    async def receive() -> dict[str, Any]:
        return next(coming, {"type": "http.request", "body": b"", "more_body": False})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(errors="replace"), "query_string": b"", "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
    }  # fmt: skip
    asyncio.run(application(scope, receive, send))
    return status[0]


def _words(told: object, name: str) -> str:
    """A text that an HTTP server lets through."""
    text = told.get(name, "") if isinstance(told, dict) else ""
    if not isinstance(text, str) or not text.isascii() or not text.isprintable():
        raise EvidenceError(f"no HTTP server lets that {name} through")
    return text


class DoorReader:
    """Requests to the inspectorate's door of rounds: method, path, headers, a lab's pass and a lab's message."""

    def __init__(self, folder: Path, lab: str, key: SigningKey, head: bytes) -> None:
        self._world, self._lab, self._key, self._head = World(folder, LabSide), lab, key, head
        telemetry = Telemetry("inspectorate", io.StringIO())
        self._application = door.application(self._world, INSPECTORATE, telemetry, lambda: None, seconds=0.5)

    def seeds(self) -> list[bytes]:
        """Heads as the lab sends them, and a request for a file."""
        body = {"kind": "heads", "predicate": {"heads": [self._head.decode()], "names": ["run"]}}
        asked = {"what": "heads", "until": 60, "start": 0, "run": "", "path": ""}
        common = {"method": "POST", "headers": {"host": "x"}, "sender": self._lab, "word": "", "more": ""}
        return [canonical.encode({**common, "path": "/messages", "pass": asked, "body": body})]

    def read(self, data: bytes) -> None:
        """Knock; EvidenceError where the door refuses."""
        told = canonical.decode(data, most=limits.BUNDLE_BYTES)
        if not isinstance(told, dict):
            raise EvidenceError("no such request can be made")
        method, path = _words(told, "method"), _words(told, "path")
        body, asked, headers = (told.get(name) for name in ("body", "pass", "headers"))
        if not isinstance(body, dict) or not isinstance(asked, dict) or not isinstance(headers, dict):
            raise EvidenceError("no such request can be made")
        announced = self._world.announcement(INSPECTORATE)
        assert announced is not None
        kind, predicate = _words(body, "kind"), body.get("predicate")
        content = canonical.encode(predicate)
        if isinstance(predicate, dict) and kind in ("heads", "answers", "openings", "results", "receipts", "draw"):
            content = sealed(kind, announced.digest, predicate, self._key)
        headers = {name: _words(headers, name) for name in list(headers)[:_HEADERS] if name.isascii()}
        headers[door.HEADER] = self._shown(told, asked, content)
        content += _words(told, "more").encode()
        try:
            status = _answered(self._application, method, path, headers, content)
        finally:
            for place in ("inbox", "held"):
                for each in (self._world.home(INSPECTORATE) / place).glob(f"{self._lab}/*"):
                    remove(each)
        if status not in _KNOWN:
            raise Framed(f"status {status}")
        if status != 200:
            raise EvidenceError(f"status {status}")

    def _shown(self, told: dict[str, Any], asked: dict[str, Any], content: bytes) -> str:
        """The header of a pass for these bytes, but where the input says otherwise, and another word in its place."""
        if word := _words(told, "word"):
            return word
        to = self._world.public(INSPECTORATE).key_id
        fields: dict[str, Any] = {"to": to, "sha256": hashlib.sha256(content).hexdigest(), "length": len(content)}
        fields |= {"nonce": os.urandom(16).hex(), "until": 0, **asked}
        if type(fields["until"]) is int:
            fields["until"] += int(time.time())
        return f"{_words(told, 'sender')} {base64.b64encode(seal(_PASS, fields, self._key)).decode()}"


class UploadReader:
    """A file that comes to a provider: the name in the path, then the body, which has to be the file of that name."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._content = folder, b"x" * 3000
        self._name = hashlib.sha256(self._content).hexdigest()
        self._application = routed(upload_route(self._wanted))

    def _wanted(self, name: str) -> tuple[Path, int] | None:
        return (self._folder / "wanted", len(self._content)) if name == self._name else None

    def seeds(self) -> list[bytes]:
        """The file."""
        return [f"/files/{self._name}\n".encode() + self._content]

    def read(self, data: bytes) -> None:
        """Send it; EvidenceError where it is refused. Nothing but the file that was asked for is left."""
        path, _, body = data.partition(b"\n")
        if not path.isascii():
            raise EvidenceError("no HTTP server lets that path through")
        self._folder.mkdir(exist_ok=True)
        status = _answered(self._application, "PUT", path.decode(), {}, body)
        left = sorted(self._folder.iterdir())
        kept = [each.read_bytes() for each in left]
        shutil.rmtree(self._folder)
        if status not in _KNOWN or kept not in ([], [self._content]):
            raise Framed(f"status {status}, and {[each.name for each in left]} is left")
        if status != 200:
            raise EvidenceError(f"status {status}")


class _Nothing:
    """A workshop that runs no task."""

    def carry_out(self, folder: Path) -> None:
        raise DeviceError("nothing is run here")

    def prover(self, folder: Path) -> tuple[RunFolder, SigningProver]:
        raise DeviceError("nothing was run here")


class TaskReader:
    """A task that a client orders: what it signs, and the question with which it comes."""

    def __init__(self, task: Path, folder: Path) -> None:
        self._task, self._folder = OrderFolder(task, CLIENT.verifying), folder

    def seeds(self) -> list[bytes]:
        """The task."""
        order = canonical.decode(self._task.envelope, most=limits.TRUST_BYTES)
        return [canonical.encode({"text": "", "order": _payload(order)})]

    def read(self, data: bytes) -> None:
        """Order it and send its files; EvidenceError where it is refused."""
        told = canonical.decode(data, most=limits.TRUST_BYTES)
        if not isinstance(told, dict) or not isinstance(told.get("text"), str):
            raise EvidenceError("no task")
        task = seal(ORDER, told.get("order"), CLIENT)
        name = hashlib.sha256(task).hexdigest()
        remove(self._folder)
        reception = Reception(
            self._folder / "tasks", self._folder / "store", PROVIDER, [CLIENT.verifying], Bounds(), _Nothing()
        )
        try:
            for number in range(3):
                self._ask(reception, told["text"] or f"task {name} {len(task)}", number)
                if number == 0 and (found := reception.wanted(name)) is not None:
                    found[0].write_bytes(task)
                for path in (self._task.folder / "files").iterdir():
                    if (found := reception.wanted(path.name)) is not None:
                        found[0].parent.mkdir(exist_ok=True)
                        shutil.copyfile(path, found[0])
        finally:
            reception.close()

    def _ask(self, reception: Reception, text: str, number: int) -> None:
        key = PROVIDER.verifying
        form = {"game": "00" * 32, "number": number, "to": key.key_id, "run": "", "text": text}
        envelope = seal(_QUESTION, {**form, "most": 1 << 22, "seconds": 9}, CLIENT)
        reader = Reader(envelope, key, 1 << 22)
        for piece in reception.take(envelope):
            reader.feed(piece)
        if reader.body() is None and "nothing is run here" not in str(reader.answer):
            raise EvidenceError("refused")


class _Over(Event):
    """Time passes at once."""

    def wait(self, timeout: float | None = None) -> bool:
        return False


class StandingReader:
    """What a provider says about a task, again and again; then it is gone."""

    def __init__(self, task: Path) -> None:
        self._task = OrderFolder(task, CLIENT.verifying)

    def seeds(self) -> list[bytes]:
        """A task that is sent, runs and is finished."""
        name, length = next(iter(self._task.order.files.items()))
        steps = len(self._task.order.steps)
        said = [("receiving", 0, [[name, length]]), ("running", 1, []), ("finished", steps, [])]
        form: dict[str, Any] = {"of": steps, "witnesses": []}
        return [canonical.encode([{**form, "state": state, "step": at, "needs": needs} for state, at, needs in said])]

    def read(self, data: bytes) -> None:
        """Deal with such a provider; EvidenceError where that fails."""
        told = canonical.decode(data, most=limits.BUNDLE_BYTES)
        bodies = iter(told if isinstance(told, list) else [])
        errand = Errand(
            party=Party(name="p", key=PROVIDER.verifying, transport=self),
            carrier=self,
            order=self._task,
            key=CLIENT,
            seconds=9,
            idle=9,
        )
        self._bodies, self._sent = bodies, 0
        errand.carry(lambda *_: None, _Over())

    def ask(self, envelope: bytes, reader: Reader, seconds: float) -> None:
        """Say the next thing."""
        try:
            body = canonical.encode(next(self._bodies))
        except StopIteration:
            raise Silence("it is gone") from None
        reader.feed(Answer.over(envelope, body).seal(PROVIDER) + b"\n" + body)

    def send(self, name: str, path: Path, seconds: float) -> None:
        """Take a file; no more of them than the task has, for each thing that it said."""
        self._sent += 1
        if self._sent > 50 * len(self._task.order.files):
            raise Framed("the client sends the same file for ever")
        assert path.is_file()


def _door(folder: Path) -> DoorReader:
    place = folder / f"door-{os.getpid()}"
    shutil.copytree(folder / "world", place)
    key = SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(folder / "run")))
    return DoorReader(place, "lab", key, (folder / "run" / MANIFEST).read_bytes())


class PartyReader(Protocol):
    """What a party reads that others send."""

    def seeds(self) -> list[bytes]:
        """Inputs that it accepts."""

    def read(self, data: bytes) -> None:
        """Read one; EvidenceError or CallerError where it is refused."""


READERS: Mapping[str, Callable[[Path], PartyReader]] = {
    "game": lambda folder: GameReader(folder / "loop", folder / "liar", folder / "played.json"),
    "game-evidence": lambda folder: EvidenceReader(folder / "played.json", folder / "loop", folder / "liar"),
    "question": lambda folder: QuestionReader(folder / "loop", folder / "played.json", folder / f"asked-{os.getpid()}"),
    "exchange": lambda folder: ExchangeReader(),
    "witness": lambda folder: WitnessReader(),
    "door": _door,
    "upload": lambda folder: UploadReader(folder / f"upload-{os.getpid()}"),
    "task": lambda folder: TaskReader(folder / "task", folder / f"tasks-{os.getpid()}"),
    "standing": lambda folder: StandingReader(folder / "task"),
}
"""By name, what reads it, with the folder in which ``prepare`` recorded."""
