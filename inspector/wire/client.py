"""Asks a party over HTTP: one deadline for the whole answer, one reader for its bytes, no encoding, no redirect."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import httpx2 as httpx

from firmware_sim.errors import CallerError
from inspector.wire.messages import Reader, Silence

__all__ = ["Http"]

_AGAIN = 0.2
"""Seconds after which a party that cannot be reached, or is busy, is asked again."""
_BUSY = 503
_PIECE = 1 << 16


class Http:
    """A party's server at an address such as http://127.0.0.1:8443; CallerError for any other form."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise CallerError(f"{url!a:.200} is no address of a provider: write http://HOST:PORT")
        self._url = f"{parts.scheme}://{parts.netloc}/questions"

    def ask(self, envelope: bytes, reader: Reader, seconds: float) -> None:
        """Post the question until the party answers; the deadline ends all that is under way."""
        try:
            asyncio.run(asyncio.wait_for(self._asked(envelope, reader), seconds))
        except TimeoutError:
            raise Silence(f"no whole answer within {seconds:g} s") from None

    async def _asked(self, envelope: bytes, reader: Reader) -> None:
        async with httpx.AsyncClient(timeout=None, trust_env=False, follow_redirects=False) as client:
            while not await self._was_answered(client, envelope, reader):
                await asyncio.sleep(_AGAIN)

    async def _was_answered(self, client: httpx.AsyncClient, envelope: bytes, reader: Reader) -> bool:
        """False where a party cannot be reached, breaks off, or says that it is busy."""
        headers = {"accept-encoding": "identity", "content-type": "application/json"}
        try:
            async with client.stream("POST", self._url, content=envelope, headers=headers) as response:
                if response.status_code == _BUSY:
                    return False
                if response.status_code != 200 or "content-encoding" in response.headers:
                    raise Silence(f"HTTP status {response.status_code} in place of an answer without encoding")
                async for piece in response.aiter_raw(_PIECE):
                    reader.feed(piece)
                    if reader.is_done:
                        break
        except httpx.HTTPError:  # not there, or gone in the middle: it may be on its way back
            reader.restart()
            return False
        return True
