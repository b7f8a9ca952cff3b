"""SHA-256 of many messages in one call that never holds the interpreter's lock.

Among several threads ``hashlib`` gives that lock back with each longer message, and waits for it again
as often. Here compiled code goes through all messages; the hash function is libcrypto's, which ``hashlib`` calls too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from llvmlite import binding  # type: ignore[import-untyped]

from firmware_sim.compilation import compiled as compiled_by_numba
from firmware_sim.compilation import numba
from firmware_sim.evidence.digest import sha256_of

__all__ = ["Messages", "compiled"]

_CONTEXT_BYTES = 256
"""More than libcrypto's 112 of an SHA-256 under way."""
_DIGEST_BYTES = 32
_FUNCTIONS = {"SHA256_Init": 1, "SHA256_Update": 3, "SHA256_Final": 2}
"""Functions of libcrypto, and how many addresses and lengths each takes."""


def _function(name: str) -> Any:
    signature = numba.types.int32(*[numba.types.uintp] * _FUNCTIONS[name])
    return numba.types.ExternalFunction(f"chipwitness_{name}", signature)


_begin, _update, _end = map(_function, _FUNCTIONS)


class Messages:
    """Messages of two parts each, made ready to be hashed again and again, whatever their memory holds then."""

    def __init__(self, messages: Sequence[tuple[bytes, memoryview]]) -> None:
        self._held = tuple(messages)
        self._table = np.array([(*_place(head), *_place(body)) for head, body in messages], np.uint64).reshape(-1, 4)

    def digests(self) -> list[bytes]:
        """Return SHA-256 of each message as it is now."""
        kernel = compiled()
        if kernel is None:
            return [sha256_of(head, body) for head, body in self._held]
        found = np.zeros((len(self._table), _DIGEST_BYTES), np.uint8)
        kernel(self._table, found)
        raw = found.tobytes()
        return [raw[start : start + _DIGEST_BYTES] for start in range(0, len(raw), _DIGEST_BYTES)]


def _go_through(table: Any, found: Any) -> None:
    """Hash the messages at the addresses of a table, of the lengths that it holds."""
    context = np.zeros(_CONTEXT_BYTES, np.uint8)
    for number in range(len(table)):
        _begin(context.ctypes.data)
        _update(context.ctypes.data, table[number, 0], table[number, 1])
        _update(context.ctypes.data, table[number, 2], table[number, 3])
        _end(found.ctypes.data + number * _DIGEST_BYTES, context.ctypes.data)


@cache
def compiled() -> Callable[[Any, Any], None] | None:
    """Compile what goes through a table of messages, or read it from the cache.

    None where libcrypto does not lie open, or does not hash as ``hashlib`` does.
    """
    places = _libcrypto()
    if places is None:
        return None
    for name, place in places.items():
        binding.add_symbol(f"chipwitness_{name}", place)
    kernel = compiled_by_numba(_go_through, nogil=True)
    return kernel if _agrees(kernel) else None


def _libcrypto() -> dict[str, int] | None:
    """Addresses of the functions, in the library that ``hashlib`` calls."""
    try:
        import _hashlib

        library = ctypes.CDLL(_hashlib.__file__)
        return {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS}
    except (ImportError, AttributeError, OSError):
        return None


def _agrees(kernel: Callable[[Any, Any], None]) -> bool:
    """Whether a kernel finds a known answer."""
    head, body, found = b"chip", memoryview(bytes(range(256))), np.zeros((1, _DIGEST_BYTES), np.uint8)
    kernel(np.array([(*_place(head), *_place(body))], np.uint64), found)
    return found.tobytes() == sha256_of(head, body)


def _place(part: bytes | memoryview) -> tuple[int, int]:
    """Address and length of memory that stays where it is while `part` is held."""
    if not len(part):
        return 0, 0
    return np.frombuffer(part, np.uint8).__array_interface__["data"][0], len(part)
