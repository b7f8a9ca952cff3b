"""A party's door: POST /messages takes a signed message of a round, and a lab gives POST /files what it has opened.

Each request shows a signed pass in its header, for this party and the bytes that follow. So a stranger gets nowhere
before its body is read, and what one party does with its own requests keeps no other one out. A pass counts once, also
for who has read it on its way; only a server that was started anew has forgotten those that are still valid.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from inspector.rounds.budget import Budget, OverBudget
from inspector.rounds.exchange import openings
from inspector.rounds.mail import accept, key_of
from inspector.rounds.world import CLUSTER, INSPECTORATE, World
from inspector.wire.arrival import Arrival
from inspector.wire.messages import Pass
from inspector.wire.passes import UsedPasses
from inspector.wire.server import SECONDS, refused_encoding, routed, takes_body
from inspector.wire.telemetry import Telemetry
from monitor.transcript.layout import JOURNAL, MANIFEST, is_allowed

__all__ = ["HEADER", "VALID", "application"]

HEADER = "chipwitness-pass"
VALID = 600
"""Seconds for which a pass is made; clocks of parties may differ by as much."""
_PIECE = 1 << 18
_SLOWEST = 1 << 20
"""Bytes a second that a long message has to come at."""
_STREAMS = 64
"""Files that one party may fetch at a time."""
_PASSES = {"file": 1 << 19, "message": 1 << 12}
"""Passes of one party that are remembered while they are valid: for files, and for messages, which are few."""


def application(
    world: World,
    party: str,
    telemetry: Telemetry,
    came: Callable[[], None],
    *,
    budget: Budget = Budget(),  # noqa: B008 - frozen
    seconds: float = SECONDS,
) -> Starlette:
    """The application of a party.

    Args:
        budget: of each lab that sends messages.
        came: is called after a message has been filed.
        seconds: for a message to come, and as much again for each ten megabytes of it.
    """
    door = _Door(world, party, telemetry, came, budget, seconds)
    return routed(Route("/messages", door.messages, methods=["POST"]), Route("/files", door.files, methods=["POST"]))


class _Door:
    def __init__(
        self,
        world: World,
        party: str,
        telemetry: Telemetry,
        came: Callable[[], None],
        budget: Budget,
        seconds: float,
    ) -> None:
        self._world, self._party, self._telemetry, self._came = world, party, telemetry, came
        self._budget, self._seconds = budget, seconds
        self._writing: set[str] = set()
        self._reading: dict[str, int] = {}
        self._used: dict[tuple[str, str], UsedPasses] = {}
        self._filing = asyncio.Lock()

    async def messages(self, request: Request) -> Response:
        """Take a message: 200 once it is filed, 503 to ask again, 409 about a round that is not known here."""
        shown = await self._shown(request)
        if isinstance(shown, Response):
            return shown
        sender, pass_ = shown
        if pass_.length > limits.BUNDLE_BYTES.most:
            return self._refuse(413, f"a message may have at most {limits.BUNDLE_BYTES.most} bytes", sender)
        if sender in self._writing:
            return self._refuse(503, "another message of yours is still arriving", sender)
        self._writing.add(sender)
        try:
            if sender not in (INSPECTORATE, CLUSTER):
                spending = await asyncio.to_thread(self._budget.spending, self._world, self._party, sender)
                spending.hold(pass_.length)
            arrival = Arrival(self._spool / f"{sender}.message", pass_.length, pass_.sha256, anew=True)
            try:
                return await self._taken(request, sender, pass_, arrival)
            finally:
                arrival.discard()
                arrival.path.unlink(missing_ok=True)
        except OverBudget as error:
            return self._refuse(413, str(error), sender)
        finally:
            self._writing.discard(sender)

    async def _taken(self, request: Request, sender: str, pass_: Pass, arrival: Arrival) -> Response:
        try:
            if not await takes_body(request, arrival.feed, self._seconds + pass_.length / _SLOWEST):
                return self._refuse(408, "the message did not come in time", sender)
            if not arrival.finish():
                return self._refuse(400, "fewer bytes came than the pass is for", sender)
            async with self._filing:  # one message is in memory at a time
                await asyncio.to_thread(self._file, sender, pass_.what, arrival.path)
        except EvidenceError as error:
            return self._refuse(422, str(error), sender)
        except CallerError as error:
            return self._refuse(409, str(error), sender)
        self._telemetry.count("messages", pass_.what)
        self._telemetry.count("bytes_received", by=pass_.length)
        self._telemetry.log("message", sender=sender, kind=pass_.what, sha256=pass_.sha256)
        self._came()
        return PlainTextResponse("filed\n")

    def _file(self, sender: str, kind: str, path: Path) -> None:
        accept(self._world, self._party, sender, kind, path.read_bytes())

    async def files(self, request: Request) -> Response:
        """Stream a file of a run that this lab has opened to the party that asks, from where that party has it."""
        shown = await self._shown(request)
        if isinstance(shown, Response):
            return shown
        reader, pass_ = shown
        path = await asyncio.to_thread(self._opened, reader, pass_)
        if path is None:
            return self._refuse(404, "no such file has been opened to you", reader)
        if self._reading.get(reader, 0) >= _STREAMS:
            return self._refuse(503, "too many files are being sent to you at the moment", reader)
        left = pass_.length - pass_.start
        headers = {"content-length": str(left)}
        return StreamingResponse(
            self._pieces(path, pass_.start, left, reader), media_type="application/octet-stream", headers=headers
        )

    def _opened(self, reader: str, pass_: Pass) -> Path | None:
        """Where a file lies that was opened in this round to the party; None if none was, or it is shorter."""
        if reader not in (INSPECTORATE, CLUSTER) or self._party in (INSPECTORATE, CLUSTER):
            return None
        if pass_.what != "file" or not (pass_.path in (MANIFEST, JOURNAL) or is_allowed(pass_.path)):
            return None
        for run in openings(self._world, reader).iterdir():
            with contextlib.suppress(OSError):
                if hashlib.sha256((run / MANIFEST).read_bytes()).hexdigest() == pass_.run:
                    path = run / pass_.path
                    return path if path.stat().st_size >= pass_.length else None
        return None

    async def _pieces(self, path: Path, start: int, left: int, reader: str) -> AsyncIterator[bytes]:
        self._reading[reader] = self._reading.get(reader, 0) + 1
        try:
            with path.open("rb") as file:
                file.seek(start)
                while left and (piece := await asyncio.to_thread(file.read, min(left, _PIECE))):
                    left -= len(piece)
                    self._telemetry.count("bytes_sent", by=len(piece))
                    yield piece
        finally:
            self._reading[reader] -= 1
            self._telemetry.count("files_sent")

    async def _shown(self, request: Request) -> tuple[str, Pass] | Response:
        """Who asks, with what pass; a refusal where it has none."""
        refused = refused_encoding(request)
        if refused is not None:
            self._telemetry.count("refusals", str(refused.status_code))
            return refused
        name, _, envelope = request.headers.get(HEADER, "").partition(" ")
        try:
            key = await asyncio.to_thread(key_of, self._world, name)
            pass_ = Pass.open(envelope, key)
            if pass_.to != key_of(self._world, self._party).key_id:
                raise EvidenceError("the pass is for another party")
            now, ends = time.time(), pass_.until + VALID
            if not now <= ends <= now + 3 * VALID:
                raise EvidenceError("by this party's clock, the pass is not valid now")
            kind = "file" if pass_.what == "file" else "message"
            is_new = self._passes(name, kind, now).use(pass_.nonce, ends, now)
            if is_new is False:
                raise EvidenceError("this pass was used before, and each pass can be used only once")
        except EvidenceError as error:
            return self._refuse(403, str(error), "")
        except OSError as error:
            return self._refuse(503, f"the pass cannot be noted: {error.strerror}", name)
        if is_new is None:
            return self._refuse(503, f"{_PASSES[kind]} passes of yours are still valid: ask again later", name)
        return name, pass_

    def _passes(self, name: str, kind: str, now: float) -> UsedPasses:
        if (name, kind) not in self._used:
            file = self._world.home(self._party) / "passes" / f"{name}-{kind}"
            self._used[name, kind] = UsedPasses(_PASSES[kind], file, now)
        return self._used[name, kind]

    def _refuse(self, status: int, text: str, sender: str) -> Response:
        self._telemetry.count("refusals", str(status))
        self._telemetry.log("refused", status=status, sender=sender, why=text)
        return PlainTextResponse(f"{text}\n", status)

    @property
    def _spool(self) -> Path:
        return self._world.home(self._party) / "incoming"
