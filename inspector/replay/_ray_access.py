"""Which Ray cluster may be asked: one of this machine, or one that asks for a token."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

from firmware_sim.errors import CallerError

__all__ = ["has_token", "is_here", "read_address", "require_token"]

_SECONDS = 10.0


def read_address(address: str) -> tuple[str, int]:
    """Host and port of a cluster's head; CallerError where it is no HOST:PORT, or no process answers there."""
    found = re.fullmatch(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})", address)
    if found is None:
        raise CallerError(
            f"--ray takes HOST:PORT of a cluster's head, as `ray start --head` prints it, not {address!a}"
        )
    host, port = found["host"].strip("[]"), int(found["port"])
    try:
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise CallerError(f"there is no Ray cluster at {address}: {error}") from None
    return host, port


def is_here(host: str) -> bool:
    """Whether a host's name or address is one of this machine's: one can only listen at one's own."""
    try:
        places = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, place in places:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(place)
    except OSError:
        return False
    return bool(places)


def has_token() -> bool:
    """Whether this process gives a token, and asks for one, as Ray looks for it."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return False
    if os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return True
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    try:
        return bool((Path(path) if path else Path.home() / ".ray" / "auth_token").read_text().strip())
    except (OSError, ValueError, RuntimeError):
        return False


def require_token(host: str) -> None:
    """CallerError where a machine of the cluster is not this one and no token was given."""
    if not is_here(host) and not has_token():
        text = "set RAY_AUTH_MODE=token, with the token in ~/.ray/auth_token or the file that RAY_AUTH_TOKEN_PATH names"
        raise CallerError(f"{host} is another machine: {text}")
