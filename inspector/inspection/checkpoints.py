"""What an inspectorate signs after it has accepted: up to where each drawn chip may let its records go."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from firmware_sim.errors import EvidenceError, file_error
from firmware_sim.evidence import LogCheckpoint, SigningKey, Standing, seal_acceptance
from inspector.inspection.verdict import Outcome, Verdict
from monitor.files import write_whole
from monitor.transcript.layout import CHIP_CHECKPOINT

__all__ = ["sign_checkpoints"]


def sign_checkpoints(
    folder: Path, verdict: Verdict, prunable: Mapping[str, tuple[LogCheckpoint, Standing]], key: SigningKey
) -> dict[str, int]:
    """Write a checkpoint of each chip to ``folder/CHIP/checkpoint.json``, in place of an older one; only on ACCEPT.

    Args:
        prunable: as the inspection left it in its ``CaseFile``.
        key: of the inspectorate whom the chips were made to obey.

    Returns:
        Size of the log that was accepted, by chip; a chip whose log holds more runs than a checkpoint is left out.

    Raises:
        CallerError: the files cannot be written.
    """
    signed: dict[str, int] = {}
    if verdict.outcome is not Outcome.ACCEPT:
        return signed
    for chip, (checkpoint, standing) in sorted(prunable.items()):
        try:
            content = seal_acceptance(chip, checkpoint, standing, key)
        except EvidenceError:
            continue
        path = folder / chip / CHIP_CHECKPOINT
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
        except OSError as error:
            raise file_error(f"cannot write the checkpoint {path}", error) from None
        signed[chip] = checkpoint.size
    return signed
