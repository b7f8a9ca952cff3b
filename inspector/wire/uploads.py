"""PUT /files/SHA256: a file that a party has asked for, hashed while it comes, and kept only if it is that one."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from inspector.wire.server import refused_encoding

__all__ = ["Wanted", "upload_route"]

Wanted: TypeAlias = Callable[[str], "tuple[Path, int] | None"]
"""By a SHA-256 in hex: the place and the length of the file that is asked for; None where none is."""
_LOG = logging.getLogger("chipwitness.wire")
_SECONDS = 60
_SLOWEST = 1 << 16
"""Bytes a second: a file that comes more slowly is dropped."""


class _Refused(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def upload_route(wanted: Wanted) -> Route:
    """The route; no signature is asked for, since nothing but what an accepted order names by digest is kept."""

    async def files(request: Request) -> Response:
        encoded = refused_encoding(request)
        if encoded is not None:
            return encoded
        found = wanted(request.path_params["name"])
        if found is None:
            return PlainTextResponse("no such file is asked for\n", 403)
        place, length = found
        try:
            await asyncio.wait_for(_kept(request, place, length), _SECONDS + length / _SLOWEST)
        except _Refused as refused:
            return PlainTextResponse(f"{refused}\n", refused.status)
        except (TimeoutError, ClientDisconnect):
            return PlainTextResponse("the file did not come in time\n", 408)
        except OSError as error:
            _LOG.warning("%s", error)
            return PlainTextResponse(_put(error), 507)
        return PlainTextResponse("", 200)

    return Route("/files/{name}", files, methods=["PUT"])


def _put(error: OSError) -> str:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return "the disk is full\n" if full else "the file cannot be written here\n"


async def _kept(request: Request, place: Path, length: int) -> None:
    """Write the file under another name, and give it its own if it is as long and has the digest."""
    place.parent.mkdir(parents=True, exist_ok=True)
    draft = place.with_name(f".{place.name}.{secrets.token_hex(8)}")
    hasher, received = hashlib.sha256(), 0
    try:
        with draft.open("xb") as file:
            async for piece in request.stream():
                received += len(piece)
                if received > length:
                    raise _Refused(413, f"the file should have {length} bytes, but more came")
                hasher.update(piece)
                file.write(piece)
        if received != length or hasher.hexdigest() != request.path_params["name"]:
            raise _Refused(422, "the file does not have this digest: it was altered on its way")
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)
