"""A file while it comes: no longer than was signed, hashed piece by piece, kept where a connection breaks off."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from firmware_sim.errors import EvidenceError

__all__ = ["Arrival"]

_PIECE = 1 << 20


class Arrival:
    """Takes the bytes of a file of known length and SHA-256; until it is whole it lies at ``PATH.part``.

    Args:
        anew: forget what came in an earlier try.

    Attributes:
        received: bytes that have come, those of an earlier try among them.
    """

    def __init__(self, path: Path, length: int, sha256: str, *, anew: bool = False) -> None:
        self.path, self.length, self.sha256 = path, length, sha256
        self._part = path.with_name(f"{path.name}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._part, "wb" if anew else "ab")  # noqa: SIM115 - closed by ``close``
        self._hasher, self.received = hashlib.sha256(), 0
        with self._part.open("rb") as file:
            while piece := file.read(_PIECE):
                self._hasher.update(piece)
                self.received += len(piece)

    def feed(self, piece: bytes) -> bool:
        """Take what has come, and return False, as more may come; EvidenceError once it is longer than was signed."""
        if self.received + len(piece) > self.length:
            self.discard()
            raise EvidenceError(f"more bytes came than the signed length of {self.length}")
        self._file.write(piece)
        self._hasher.update(piece)
        self.received += len(piece)
        return False

    def finish(self) -> bool:
        """Give the file its name if it is whole, and keep what has come otherwise; False where that is too little.

        Raises:
            EvidenceError: it has another digest, and is deleted.
        """
        self.close()
        if self.received < self.length:
            return False
        if self._hasher.hexdigest() != self.sha256:
            self.discard()
            raise EvidenceError("a file that came does not have the signed digest")
        os.replace(self._part, self.path)
        return True

    def close(self) -> None:
        """Keep what has come for another try."""
        self._file.close()

    def discard(self) -> None:
        """Delete what has come."""
        self._file.close()
        self._part.unlink(missing_ok=True)
