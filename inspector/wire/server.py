"""HTTP as a door: POST /questions leads to a desk; its answer is the desk's stream. Parties of rounds use it too.

A connection's headers and a request's bytes have a deadline and a bound; encodings and bodies without a stated length
are refused. Questions are worked on one after another, and no more than a few wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from firmware_sim.errors import DeviceError
from firmware_sim.evidence import SigningKey
from inspector.wire.desk import Counter, Stranger
from inspector.wire.messages import ENVELOPE_BYTES
from inspector.wire.tls import Certificate, certificate

__all__ = ["SECONDS", "application", "door", "refused_encoding", "routed", "serve", "signalled", "takes_body"]

_LOG = logging.getLogger("chipwitness.wire")
SECONDS = 10
"""For a request's headers, and again for its body."""
_WAITING = 8
"""Questions that are worked on or wait; further ones get status 503."""
_DRAINED = 0.2
"""Seconds in which threads of a server that has stopped end: one that is left aborts the process when Python ends."""
_CONNECTIONS = 4096
"""That a server holds at once: the slow ones among them end after ``SECONDS``, and keep no one else out till then."""


def application(
    desk: Counter, *, seconds: float = SECONDS, others: Sequence[Route] = (), workers: int = 1
) -> Starlette:
    """The application, with other routes and that of questions; so many threads work on all questions."""
    worker = ThreadPoolExecutor(workers)
    waiting: set[object] = set()

    async def questions(request: Request) -> Response:
        refused = refused_encoding(request)
        if refused is not None:
            return refused
        held = bytearray()

        def feed(piece: bytes) -> bool:
            held.extend(piece)
            return len(held) > ENVELOPE_BYTES.most

        if not await takes_body(request, feed, seconds):
            return PlainTextResponse(f"the question did not come within {seconds:g} s\n", 408)
        if len(held) > ENVELOPE_BYTES.most:
            return PlainTextResponse(f"a question has at most {ENVELOPE_BYTES.most} bytes\n", 413)
        if len(waiting) >= _WAITING + workers - 1:
            return PlainTextResponse("busy, ask again\n", 503)
        here = object()
        waiting.add(here)
        try:
            pieces = await asyncio.get_running_loop().run_in_executor(worker, desk.take, bytes(held))
        except Stranger as error:
            return PlainTextResponse(f"{error}\n", 403)
        except DeviceError as error:
            _LOG.warning("%s", error)
            return PlainTextResponse("this machine cannot answer now\n", 503)
        finally:
            waiting.discard(here)
        return StreamingResponse(pieces, media_type="application/octet-stream")

    return routed(Route("/questions", questions, methods=["POST"]), *others)


def routed(*routes: Route) -> Starlette:
    """An application with these paths alone: no other one leads to them by a redirect, which would name any host."""
    found = Starlette(routes=routes)
    found.router.redirect_slashes = False
    return found


def refused_encoding(request: Request) -> Response | None:
    """The answer to a request whose body is encoded, or has no stated length; None to any other.

    A body in chunks is refused, since a proxy in front could go by a length that is stated in addition (RFC 9112, 6.1).
    """
    if "content-encoding" in request.headers:
        return PlainTextResponse("no content-encoding is accepted\n", 415)
    if "transfer-encoding" in request.headers:
        return PlainTextResponse("no transfer-encoding is accepted: state a content-length\n", 411)
    return None


async def takes_body(request: Request, feed: Callable[[bytes], bool], seconds: float) -> bool:
    """Take a request's body in pieces, until one makes ``feed`` return True; False where it does not come in time."""
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.stream():
                if feed(piece):
                    break
    except (TimeoutError, ClientDisconnect):
        return False
    return True


def serve(
    desk: Counter,
    host: str,
    port: int,
    *,
    others: Sequence[Route] = (),
    tls: SigningKey | None = None,
    workers: int = 1,
) -> None:
    """Serve until SIGINT or SIGTERM, as ``door`` does; answers under way are finished first."""

    async def served() -> None:
        async with door([(application(desk, others=others, workers=workers), host, port, tls)]):
            await signalled().wait()

    asyncio.run(served())


def signalled() -> asyncio.Event:
    """An event that SIGINT and SIGTERM set, in place of what they do otherwise."""
    event = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


@contextlib.asynccontextmanager
async def door(places: Sequence[tuple[Starlette, str, int, SigningKey | None]]) -> AsyncIterator[None]:
    """Serve applications, each at a host and port, as long as this lasts; answers under way are finished at its end.

    Args:
        places: applications with host and port, and with the party's key where TLS is spoken there.

    Raises:
        DeviceError: a port cannot be had.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.ExitStack() as files:
        shown = [None if key is None else files.enter_context(certificate(key)) for *_, key in places]
        servers = [_server(app, host, port, each) for (app, host, port, _), each in zip(places, shown, strict=True)]
        running = [asyncio.create_task(each.serve()) for each in servers]
        pairs = [(each, server) for each, server in zip(shown, servers, strict=True) if each is not None]
        renewing = [asyncio.create_task(_renew(*pair)) for pair in pairs]
        try:
            await asyncio.sleep(0)  # each has its port now, or none
            for task, (_, host, port, _) in zip(running, places, strict=True):
                if task.done():
                    raise DeviceError(f"cannot serve on {host}:{port}: {task.exception()}")
            yield
        finally:
            for each in renewing:
                each.cancel()
            for server in servers:
                server.stop()  # type: ignore[no-untyped-call]
            await asyncio.gather(*running, *renewing, return_exceptions=True)
            await asyncio.sleep(_DRAINED)


async def _renew(shown: Certificate, server: Server) -> None:
    """Make new certificates as long as a server runs; answers under way are finished under the old one."""
    seconds = shown.lasts
    while True:
        await asyncio.sleep(seconds)
        try:
            shown.renew(datetime.now(UTC))
        except OSError as error:
            _LOG.warning("the server's certificate could not be renewed: %s", error)
            seconds = shown.lasts / 20
            continue
        seconds = shown.lasts
        server.reload()  # type: ignore[no-untyped-call]


def _server(app: Starlette, host: str, port: int, shown: Certificate | None) -> Server:
    return Server(
        app,
        host,
        port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        websockets=False,
        backlog=1024,
        backpressure=_CONNECTIONS,
        http1_settings=HTTP1Settings(header_read_timeout=SECONDS * 1000, max_buffer_size=1 << 16),
        log_enabled=False,
        ssl_cert=None if shown is None else shown.files[0],
        ssl_key=None if shown is None else shown.files[1],
    )
