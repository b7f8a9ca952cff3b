"""Canonical JSON: one value has one encoding, and only that encoding is accepted.

Keys sorted by code point, no white space, UTF-8 without escapes that UTF-8 does not need, integers in decimal,
floats as Python's shortest round-trip form (always with "." or "e", so 1 and 1.0 stay apart), no NaN, no infinity.
"""

from __future__ import annotations

import json
from typing import Any

from firmware_sim.errors import CallerError, EvidenceError

__all__ = ["MAX_BYTES", "MAX_DEPTH", "decode", "encode"]

MAX_DEPTH = 64
MAX_BYTES = 1 << 28


def encode(obj: object) -> bytes:
    """Return the canonical encoding of `obj` (None, bool, int, finite float, str, list, tuple, dict with str keys).

    Law: `decode(encode(x)) == x` for every x without tuples; a tuple comes back as a list.

    Raises:
        CallerError: `obj` holds another type, a non-string key, a non-finite float, a lone surrogate, or nests deeper
            than `MAX_DEPTH`.
    """
    _check(obj, MAX_DEPTH)
    try:
        text = json.dumps(
            obj, ensure_ascii=False, allow_nan=False, check_circular=False, sort_keys=True, separators=(",", ":")
        )
        return text.encode("utf-8")
    except ValueError as error:  # non-finite floats; lone surrogates; integers beyond the interpreter's digit limit
        raise CallerError(f"value has no canonical encoding: {error}") from None


def decode(data: bytes, *, max_bytes: int = MAX_BYTES) -> Any:
    """Return the value whose canonical encoding is exactly `data`.

    Raises:
        EvidenceError: `data` is longer than `max_bytes`, is not JSON, or is not byte-equal to `encode` of its value
            (which covers duplicate keys, white space, a byte-order mark, other escapes and other number forms).
    """
    if len(data) > max_bytes:
        raise EvidenceError(f"JSON document of {len(data)} bytes is longer than the limit of {max_bytes}")
    try:
        value = json.loads(bytes(data).decode("utf-8"))
        again = encode(value)
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"not a JSON document: {error}") from None
    except CallerError as error:
        raise EvidenceError(f"JSON document is not canonical: {error}") from None
    if again != data:
        raise EvidenceError("JSON document is not byte-equal to its canonical encoding")
    return value


def _check(obj: object, depth: int) -> None:
    kind = type(obj)
    if obj is None or kind in (bool, int, float, str):
        return
    if depth == 0:
        raise CallerError(f"value has no canonical encoding: nested deeper than {MAX_DEPTH}")
    if isinstance(obj, dict) and kind is dict:
        for key, value in obj.items():
            if type(key) is not str:
                raise CallerError(f"value has no canonical encoding: key {key!r} is not a string")
            _check(value, depth - 1)
    elif isinstance(obj, (list, tuple)) and kind in (list, tuple):
        for value in obj:
            _check(value, depth - 1)
    else:
        raise CallerError(f"value has no canonical encoding: type {kind.__name__}")
