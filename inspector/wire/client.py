"""Asks a party over HTTP: one deadline for the whole answer, one reader for its bytes, no encoding, no redirect."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import httpx2 as httpx

from firmware_sim.errors import CallerError
from firmware_sim.evidence import VerifyingKey
from inspector.wire import tls
from inspector.wire.messages import Declined, Reader, Silence

__all__ = ["BUSY", "UNREACHABLE", "Http", "Link", "Unproven", "address"]

_AGAIN = 0.2
"""Seconds after which a party that cannot be reached, or is busy, is asked again."""
_JUST = 0.05
BUSY, UNREACHABLE = 503, 0
"""HTTP status of a party that is to be asked again, and what takes its place where none came."""
_STATUS = {
    UNREACHABLE: "it broke off",
    403: "it has not asked for it",
    413: "it is too long",
    422: "it was altered on its way",
    507: "no space",
}
"""What the status says in answer to a file."""
_PIECE = 1 << 16


def address(url: str) -> str:
    """An address such as http://127.0.0.1:8443, without a path; CallerError for any other form."""
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port)
    except ValueError:
        is_one = False
    if not is_one or parts.path.strip("/") or parts.query:
        raise CallerError(f"{url!a:.200} is not the address of a party: write https://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}"


class Unproven(Silence):
    """What answers at an https:// address does not show, by its certificate, that it is the party's server."""


class Link:
    """A way to a party's server, for as long as an asynchronous ``with`` lasts.

    Args:
        url: as ``address`` takes it.
        key: of the party, which has to have signed the server's certificate where the address is https://.
        seconds: in which something has to come or go, else the connection is given up; None for any time.
        until: by ``time.monotonic()``, when a connection that is not there yet is given up. A task that is cancelled
            while it connects would leave its socket open.
    """

    def __init__(
        self, url: str, key: VerifyingKey, *, seconds: float | None = None, until: float | None = None
    ) -> None:
        self._url, self._seconds, self._until = address(url), seconds, until
        verify = tls.context_for(key)
        self._client = httpx.AsyncClient(verify=verify, trust_env=False, follow_redirects=False)

    async def __aenter__(self) -> Link:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(
        self,
        path: str,
        *,
        method: str = "POST",
        feed: Callable[[bytes], bool],
        content: bytes | AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """Send a request; status of the answer, or UNREACHABLE where no connection came about, or it broke off.

        Args:
            feed: takes the body of an answer with status 200 in pieces; True ends it.

        Raises:
            Silence: the answer is encoded, or leads elsewhere.
            Unproven: no certificate of the party.
        """
        headers = {"accept-encoding": "identity", "content-type": "application/json", **(headers or {})}
        connect = self._seconds if self._until is None else max(self._until - time.monotonic(), 0.001)
        limits, url = httpx.Timeout(self._seconds, connect=connect), self._url + path
        try:
            async with self._client.stream(method, url, content=content, headers=headers, timeout=limits) as response:
                if 300 <= response.status_code < 400 or "content-encoding" in response.headers:
                    raise Silence(f"HTTP status {response.status_code} instead of an unencoded answer")
                if response.status_code == 200:
                    async for piece in response.aiter_raw(_PIECE):
                        if feed(piece):
                            break
                return int(response.status_code)
        except (httpx.HTTPError, ssl.SSLError) as error:  # not there, or gone in the middle: it may be on its way back
            if isinstance(error, httpx.ConnectError) and (why := tls.reason(error)):
                raise Unproven(why) from None
            return UNREACHABLE


class Http:
    """A provider's server at an address such as http://127.0.0.1:8443; CallerError for any other form.

    Args:
        key: the provider's, as ``Link`` takes it.
    """

    def __init__(self, url: str, key: VerifyingKey) -> None:
        self._url, self._key = address(url), key

    def ask(self, envelope: bytes, reader: Reader, seconds: float) -> None:
        """Post the question until the party answers; the deadline ends all that is under way."""
        try:
            asyncio.run(asyncio.wait_for(self._asked(envelope, reader, _before(seconds)), seconds))
        except TimeoutError:
            raise Silence(f"no complete answer within {seconds:g} s") from None

    def send(self, name: str, path: Path, seconds: float) -> None:
        """Send a file that the party has asked for by its SHA-256; Silence where it does not take it."""
        try:
            asyncio.run(asyncio.wait_for(self._sent(name, path, _before(seconds)), seconds))
        except TimeoutError:
            raise Silence(f"it did not take a file within {seconds:g} s") from None

    async def _sent(self, name: str, path: Path, until: float) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            with path.open("rb") as file:
                while piece := file.read(_PIECE):
                    yield piece

        headers = {"content-length": str(path.stat().st_size)}
        async with Link(self._url, self._key, until=until) as link:
            status = await link.ask(
                f"/files/{name}", method="PUT", feed=lambda _: False, content=pieces(), headers=headers
            )
        if status != 200:
            why = _STATUS.get(status, f"HTTP status {status}")
            raise Silence(f"it does not take a file of the task: {why}")

    async def _asked(self, envelope: bytes, reader: Reader, until: float) -> None:
        def feed(piece: bytes) -> bool:
            reader.feed(piece)
            return reader.is_done

        async with Link(self._url, self._key, until=until) as link:
            while (status := await link.ask("/questions", feed=feed, content=envelope)) in (BUSY, UNREACHABLE):
                reader.restart()
                await asyncio.sleep(_AGAIN)
            if status != 200:
                raise Declined(f"HTTP status {status} instead of an unencoded answer")


def _before(seconds: float) -> float:
    """Just before a time that ends in so many seconds."""
    return time.monotonic() + seconds - _JUST
