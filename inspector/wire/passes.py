"""Which passes were shown already: each counts once, so that one that was read on its way is worth nothing."""

from __future__ import annotations

import contextlib
from pathlib import Path

from monitor.files import write_whole

__all__ = ["UsedPasses"]

_REST = 10.0
"""Seconds from one rewriting of a full file to the next, so that no flood of passes makes each cost one."""


class UsedPasses:
    """Remembers the nonces of one party's passes for as long as these are valid, also when the server is started anew.

    Args:
        most: nonces that are remembered at once; each takes some 150 bytes, and 50 on the disk.
        file: keeps them, a line for each.
        now: seconds, by the clock of ``use``.
    """

    def __init__(self, most: int, file: Path, now: float) -> None:
        self._most, self._file, self._first = most, file, 0.0
        self._until: dict[bytes, float] = {}
        lines = file.read_text().splitlines() if file.exists() else []
        for nonce, _, until in (line.partition(" ") for line in lines):
            with contextlib.suppress(ValueError):  # the last line of a server that was killed
                self._until[bytes.fromhex(nonce)] = float(until)
        self._forget(now)

    def use(self, nonce: str, until: float, now: float) -> bool | None:
        """Whether the pass is new; None where so many are remembered that it cannot be told later: it has to wait.

        Args:
            until: when the pass is void by the clock that says ``now``, in seconds.

        Raises:
            OSError: the pass cannot be noted, so that it does not count.
        """
        key = bytes.fromhex(nonce)
        if key in self._until:
            return False
        if len(self._until) >= self._most and now > self._first:
            self._forget(now)
        if len(self._until) >= self._most:
            return None
        with self._file.open("a") as file:
            file.write(f"\n{nonce} {until}\n")  # the line before may be torn
        self._until[key] = until
        return True

    def _forget(self, now: float) -> None:
        """Let go of what is void by now."""
        self._until = {each: end for each, end in self._until.items() if end >= now}
        self._first = max(min(self._until.values(), default=0.0), now + _REST)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._file, "".join(f"{each.hex()} {end}\n" for each, end in self._until.items()).encode())
