"""Canonical JSON: one value has one encoding, and only that encoding is accepted.

Keys sorted by code point, no white space, UTF-8 without escapes that UTF-8 does not need, integers in decimal,
floats as Python's shortest round-trip form (always with "." or "e", so 1 and 1.0 stay apart), no NaN, no infinity.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from firmware_sim import limits
from firmware_sim.errors import CallerError, EvidenceError
from firmware_sim.limits import Limit

__all__ = ["JsonObject", "decode", "encode", "loads", "parse"]

JsonObject = dict[str, Any]
"""An object of a parsed document: what lies under its keys is unknown until its reader has checked it."""

_NO_MARKS = bytes(set(range(256)) - set(b'[]{}"'))


def encode(obj: object) -> bytes:
    """Return the canonical encoding of `obj` (None, bool, int, finite float, str, list, tuple, dict with str keys).

    Law: `decode(encode(x)) == x` for every x without tuples; a tuple comes back as a list.

    Raises:
        CallerError: `obj` holds another type, a non-string key, a non-finite float, a lone surrogate, an integer beyond
            `limits.JSON_INTEGER_BITS`, or nests deeper than `limits.JSON_DEPTH`.
    """
    _check(obj, limits.JSON_DEPTH.most)
    try:
        text = json.dumps(
            obj, ensure_ascii=False, allow_nan=False, check_circular=False, sort_keys=True, separators=(",", ":")
        )
        return text.encode("utf-8")
    except ValueError as error:  # non-finite floats; lone surrogates; integers beyond the interpreter's digit limit
        raise CallerError(f"value has no canonical encoding: {error}") from None


def decode(data: bytes, *, most: Limit | None = None, items: Limit | None = None) -> Any:
    """Return the value whose canonical encoding is exactly `data`.

    Args:
        most: bytes that a document of this kind may have; `limits.JSON_BYTES` by default.
        items: values that it may hold; `limits.JSON_ITEMS` by default.

    Raises:
        EvidenceError: `data` is larger than these, is not JSON, or is not byte-equal to `encode` of its value (which
            covers duplicate keys, white space, a byte-order mark, other escapes and other number forms).
    """
    value = _parse(data, most or limits.JSON_BYTES, items or limits.JSON_ITEMS)
    try:
        again = encode(value)
    except CallerError as error:
        raise EvidenceError(f"JSON document is not canonical: {error}") from None
    if again != data:
        raise EvidenceError("JSON document is not byte-equal to its canonical encoding")
    return value


def parse(data: bytes, *, most: Limit) -> Any:
    """Return the value of a JSON document of any form, such as one that people edit.

    Raises:
        EvidenceError: not JSON, larger than `most` bytes, a key that an object has twice, or a value that has no
            canonical encoding.
    """
    value = _parse(data, most, limits.JSON_ITEMS, _once)
    try:
        _check(value, limits.JSON_DEPTH.most)
    except CallerError as error:
        raise EvidenceError(str(error)) from None
    return value


def loads(text: str | bytes | bytearray) -> Any:
    """Return the value of a JSON document of this side's own, which may be as long as its memory allows.

    Raises:
        ValueError: not JSON, or a key that an object has twice.
    """
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: list[tuple[str, Any]]) -> JsonObject:
    """An object whose keys differ: of two equal ones a reader would see the last, and a person the first."""
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r:.100} occurs twice")
    return made


def _parse(
    data: bytes, most: Limit, items: Limit, build: Callable[[list[tuple[str, Any]]], JsonObject] | None = None
) -> Any:
    data = bytes(data)
    most.check(len(data))
    if not data.isascii():
        limits.WIDE_TEXT_BYTES.check(len(data))
    values = items.check(1 + sum(data.count(mark) for mark in (b",", b":", b"[", b"{")))
    _check_depth(data, values)
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=build)
    except (ValueError, RecursionError) as error:
        raise EvidenceError(f"not a JSON document: {error}") from None


def _check_depth(data: bytes, values: int) -> None:
    """Find nesting before a parser that calls itself does: brackets outside texts cancel out, level by level."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = data.translate(None, _NO_MARKS)
    if marks.count(b'"') > 2 * values:
        raise EvidenceError("not a JSON document: it holds more strings than values")
    left = b"".join(marks.split(b'"')[::2])
    depth = 0
    while left:
        depth = limits.JSON_DEPTH.check(depth + 1)
        shorter = left.replace(b"[]", b"").replace(b"{}", b"")
        if len(shorter) == len(left):
            raise EvidenceError("not a JSON document: its brackets do not match")
        left = shorter


def _check(obj: Any, depth: int) -> None:
    """Containers first, and no call for each text and each small number: most values are such."""
    kind = type(obj)
    if depth and (kind is dict or kind is list or kind is tuple):
        if kind is dict:
            for key in obj:
                if type(key) is not str:
                    raise CallerError(f"value has no canonical encoding: key {key!r} is not a string")
        most = limits.JSON_INTEGER_BITS.most
        for value in obj.values() if kind is dict else obj:
            inner = type(value)
            if not (inner is str or (inner is int and value.bit_length() <= most)):
                _check(value, depth - 1)
    elif problem := _problem(obj, kind, depth):
        raise CallerError(f"value has no canonical encoding: {problem}")


def _problem(obj: Any, kind: type, depth: int) -> str:
    """Why a value has no encoding, where it is no container or lies too deep; empty where it has one."""
    if obj is None or kind is bool or kind is str:
        return ""
    if kind is int:
        bits = obj.bit_length()
        return f"an integer of {bits} bits" if bits > limits.JSON_INTEGER_BITS.most else ""
    if kind is float:
        return "" if math.isfinite(obj) else f"{obj}"
    return f"type {kind.__name__}" if depth else f"nested deeper than {limits.JSON_DEPTH.most}"
