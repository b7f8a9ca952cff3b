"""What a lab does with a checkpoint that an inspector signed: shows it to the chip, and keeps it for later inspections.

The chip goes by the checkpoint and keeps no signature, so that its lab has to hand the file over with each log that
begins there. It lies next to the chips, under the number of the log's first record; until the chip has let go of what
came before, it is a draft, which replaces it should this process die in between.
"""

from __future__ import annotations

import os
from pathlib import Path

from firmware_sim import Chip, MailboxError
from firmware_sim.errors import EvidenceError, file_error
from firmware_sim.evidence import NEWBORN, SignatureError, Standing, chips_part, log_extent, open_acceptance
from monitor.files import Files
from monitor.lab.desk import ask_lab, is_at_work
from monitor.lab.simulated_lab import SimulatedLab

__all__ = ["accepted_standing", "kept_checkpoint", "prune_chip", "prune_powered"]

_DRAFT = "draft.json"
_FILES = Files(sync=True)
"""If a power loss took such a file, the log could not be checked; there are few of them."""


def prune_chip(lab: Path, chip_id: str, signed: bytes) -> tuple[int, int]:
    """Let a chip of the lab with this folder release what lies before a checkpoint, and keep the file.

    A chip at work does so between two steps; any other is powered on for it, and off.

    Returns:
        Number of the first record that the chip still holds, and the bytes of its memory that are free.

    Raises:
        EvidenceError: this is no checkpoint file that an inspection will take, or a chip at work refuses it.
        MailboxError: the chip refuses it, or is at work elsewhere.
    """
    chips_part(signed)
    if is_at_work(lab):
        answer = ask_lab(lab, {"chip": chip_id, "checkpoint": signed.hex()})
        return int.from_bytes(answer["start"]), int.from_bytes(answer["free"])
    chip = SimulatedLab.power_on(lab, chip_id)
    try:
        return prune_powered(lab, chip, signed)
    finally:
        chip.power_off()


def prune_powered(lab: Path, chip: Chip, signed: bytes) -> tuple[int, int]:
    """``prune_chip`` with a chip that this process holds.

    The chip looks at its own part of the file alone, so the rest is checked before it lets go of anything.
    """
    _opened(lab, chip.chip_id, signed)
    folder, before = _folder(lab, chip.chip_id), _start(chip)
    draft, kept = folder / _DRAFT, folder / f"{before}.json"
    if before and draft.is_file() and not kept.exists():  # a process that died has left it: the chip had let go
        os.replace(draft, kept)
        _FILES.flush(folder)
    _write(draft, signed)
    try:
        free = chip.prune(chips_part(signed))
    except MailboxError:
        draft.unlink()
        raise
    start = _start(chip)
    os.replace(draft, folder / f"{start}.json")
    _FILES.flush(folder)
    kept.unlink(missing_ok=True)
    return start, free


def kept_checkpoint(lab: Path, chip_id: str, log: bytes) -> bytes | None:
    """The file behind which a chip's log begins; None where the log is whole, or the lab keeps no such file."""
    start = log_extent(log)[0] if log else 0
    if not start:
        return None
    for name in (f"{start}.json", _DRAFT):
        path = _folder(lab, chip_id) / name
        if path.is_file():
            return path.read_bytes()
    return None


def accepted_standing(lab: Path, chip_id: str, log: bytes) -> Standing:
    """A chip's host where its log begins; ``NEWBORN`` where the log is whole, or the lab keeps no checkpoint.

    Raises:
        EvidenceError: what the lab keeps is no checkpoint of this chip.
    """
    kept = kept_checkpoint(lab, chip_id, log)
    return NEWBORN if kept is None else _opened(lab, chip_id, kept)


def _opened(lab: Path, chip_id: str, signed: bytes) -> Standing:
    obeyed = SimulatedLab.obeyed_key(SimulatedLab.read_config(SimulatedLab.home_of(lab)))
    try:
        return open_acceptance(signed, chip_id, [obeyed])[1]
    except SignatureError:
        text = f"chip {chip_id}: its log checkpoint is not signed by the inspectorate that it obeys, {obeyed.key_id}"
        raise EvidenceError(text) from None


def _folder(lab: Path, chip_id: str) -> Path:
    return SimulatedLab.home_of(lab) / "checkpoints" / chip_id


def _start(chip: Chip) -> int:
    """Number of the first record that a chip holds, or of the next one where it holds none."""
    log = chip.log_bytes()
    return log_extent(log)[0] if log else chip.position[1]


def _write(path: Path, content: bytes) -> None:
    try:
        _FILES.write(str(path), content)
        _FILES.flush(path.parent)
    except OSError as error:
        raise file_error(f"cannot write {path}", error) from None
