"""Evidence of registered chips that take part in no run: a folder for each, with the chip's four files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from firmware_sim.errors import CallerError, EvidenceError
from monitor.transcript.layout import CHIP_FILES
from monitor.transcript.lengths import CHIP_FILE_BYTES

__all__ = ["Answers"]


class Answers:
    """Evidence of idle chips.

    Nothing here is signed by a lab: a chip's quote vouches for its own log, and only for that.

    Args:
        folders: each holds a folder for each chip that answered.

    Raises:
        CallerError: a folder is not there.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise CallerError(f"there is no folder {folder} with chips' answers")
        self._folders = tuple(folders)

    def holds(self, chip: str) -> bool:
        """Tell whether the chip answered."""
        return any((folder / chip / CHIP_FILES[0]).is_file() for folder in self._folders)

    def read(self, chip: str, name: str) -> bytes:
        """Return one of ``CHIP_FILES`` of the chip; EvidenceError if it is missing, a link, or too large."""
        for folder in self._folders:
            path = folder / chip / name
            if path.is_symlink() or not path.is_file():
                continue
            CHIP_FILE_BYTES[name].check(path.stat().st_size)
            try:
                return path.read_bytes()
            except OSError as error:
                raise EvidenceError(f"chip {chip}: cannot read its answer's {name}: {error.strerror}") from None
        raise EvidenceError(f"chip {chip}: its answer holds no {name}")
