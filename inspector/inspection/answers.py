"""What chips say outside of any run: idle ones in a folder for each, and drawn ones when they are challenged live.

A live challenge is a nonce that did not exist before the draw, so its answer is newer than all that a lab committed to.
Nothing here is signed by a lab: a chip's quote vouches for its own log, and only for that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from firmware_sim.errors import CallerError, EvidenceError, Unreadable, foreign
from monitor.transcript.journal import file_size
from monitor.transcript.layout import CHIP_FILES
from monitor.transcript.listing import CHIP_FILE_BYTES

__all__ = ["Answers", "Ask", "EvidenceSource"]

Ask = Callable[[str, bytes, str], Mapping[str, bytes]]
"""Challenges a chip, with a nonce, in a verifier's name (`Chip.challenge`), and returns its files at once.

EvidenceError where it does not answer.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceSource:
    """Where a chip's evidence lies: a run of the chip's own lab or, under the name and id "", outside of any run.

    ``read`` returns one of the chip's files; EvidenceError where it cannot. ``nonce`` is what the quote must
    answer: of a live answer the fresh one, and None for the trust file's; what is ``deposited`` answered a registry.
    """

    name: str
    read: Callable[[str], bytes]
    nonce: bytes | None = None
    run_id: str = ""
    deposited: bool = False

    @property
    def place(self) -> str:
        """The source in words."""
        if self.deposited:
            return "what the registry keeps of it"
        if self.nonce is not None:
            return "its answer to a live challenge"
        return self.name or "its answer outside of any run"


class Answers:
    """Evidence of chips that lies in no run.

    Args:
        folders: each holds a folder for each chip that answered.

    Raises:
        CallerError: a folder is not there.
    """

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        for folder in folders:
            if not folder.is_dir():
                raise CallerError(f"there is no folder {folder} with chips' answers")
        self._folders = tuple(folders)
        self._live: dict[str, EvidenceSource] = {}

    def challenge(
        self, chips: Iterable[str], ask: Ask, verifier: str, nonces: Callable[[str], bytes] = lambda _: os.urandom(32)
    ) -> None:
        """Ask each chip now, with a fresh nonce; one that does not answer has refused, whatever else lies about."""
        for chip in chips:
            nonce = nonces(chip)
            try:
                read = partial(_file_of, chip, dict(ask(chip, nonce, verifier)))
            except EvidenceError as error:
                read = partial(_refuse, chip, str(error))
            self._live[chip] = EvidenceSource(name="", read=read, nonce=nonce)

    def sources(self, chip: str) -> list[EvidenceSource]:
        """Where evidence of the chip lies, a live answer first."""
        live = [self._live[chip]] if chip in self._live else []
        return live + ([EvidenceSource(name="", read=partial(self.read, chip))] if self.holds(chip) else [])

    def holds(self, chip: str) -> bool:
        """Tell whether the chip's answer lies in a folder."""
        try:
            return any(file_size(folder, f"{chip}/{CHIP_FILES[0]}") is not None for folder in self._folders)
        except Unreadable:
            return True  # as who reads it will find

    def read(self, chip: str, name: str) -> bytes:
        """Return one of the chip's files; EvidenceError if it is missing, a link, or too large."""
        for folder in self._folders:
            size = file_size(folder, f"{chip}/{name}")
            if size is not None:
                CHIP_FILE_BYTES[name].check(size)
                with foreign(f"{name} of chip {chip}'s answer"):
                    return (folder / chip / name).read_bytes()
        raise EvidenceError(f"chip {chip}: its answer does not contain {name}")


def _file_of(chip: str, answer: Mapping[str, bytes], name: str) -> bytes:
    content = answer.get(name)
    if type(content) is not bytes:
        raise EvidenceError(f"chip {chip}: its answer to a live challenge does not contain {name}")
    CHIP_FILE_BYTES[name].check(len(content))
    return content


def _refuse(chip: str, why: str, name: str) -> bytes:
    raise EvidenceError(f"chip {chip} did not answer a live challenge, and a refusal counts as a failure: {why}")
