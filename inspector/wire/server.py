"""HTTP as a door to a desk: POST /questions with a question's envelope; the answer is the desk's stream.

A connection's headers and a question's bytes have a deadline and a bound; a content-encoding is refused. Questions are
worked on one after another, and no more than a few wait.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from concurrent.futures import ThreadPoolExecutor

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from firmware_sim.errors import DeviceError
from inspector.wire.desk import Desk, Stranger
from inspector.wire.messages import ENVELOPE_BYTES

__all__ = ["application", "serve"]

_LOG = logging.getLogger("chipwitness.wire")
_SECONDS = 10
"""For a request's headers, and again for its body."""
_WAITING = 8
"""Questions that are worked on or wait; further ones get status 503."""


def application(desk: Desk, *, seconds: float = _SECONDS) -> Starlette:
    """The application; one thread works on all questions."""
    worker = ThreadPoolExecutor(1)
    waiting: set[object] = set()

    async def questions(request: Request) -> Response:
        refused = request.headers.get("content-encoding")
        if refused is not None:
            return PlainTextResponse("no content-encoding is accepted\n", 415)
        try:
            envelope = await asyncio.wait_for(_bounded(request), seconds)
        except (TimeoutError, ClientDisconnect):
            return PlainTextResponse(f"the question did not come within {seconds:g} s\n", 408)
        if envelope is None:
            return PlainTextResponse(f"a question has at most {ENVELOPE_BYTES.most} bytes\n", 413)
        if len(waiting) >= _WAITING:
            return PlainTextResponse("busy, ask again\n", 503)
        here = object()
        waiting.add(here)
        try:
            pieces = await asyncio.get_running_loop().run_in_executor(worker, desk.take, envelope)
        except Stranger as error:
            return PlainTextResponse(f"{error}\n", 403)
        except DeviceError as error:
            _LOG.warning("%s", error)
            return PlainTextResponse("this machine cannot answer now\n", 503)
        finally:
            waiting.discard(here)
        return StreamingResponse(pieces, media_type="application/octet-stream")

    return Starlette(routes=[Route("/questions", questions, methods=["POST"])])


async def _bounded(request: Request) -> bytes | None:
    """The body; None as soon as it is longer than a question may be."""
    held = bytearray()
    async for piece in request.stream():
        held += piece
        if len(held) > ENVELOPE_BYTES.most:
            return None
    return bytes(held)


def serve(desk: Desk, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; answers under way are finished first."""
    asyncio.run(_served(desk, host, port))


async def _served(desk: Desk, host: str, port: int) -> None:
    server = Server(
        application(desk),
        host,
        port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        websockets=False,
        http1_settings=HTTP1Settings(header_read_timeout=_SECONDS * 1000, max_buffer_size=1 << 16),
        log_enabled=False,
    )
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, server.stop)
    await server.serve()
