"""What a lab's chips say at the end of a run, as it hands it over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from firmware_sim import Chip, encode_epoch_keys
from monitor.lab.simulated import LabConfig, SimulatedLab
from monitor.transcript.layout import chip_path

__all__ = ["chip_evidence", "write_answers"]


def chip_evidence(
    lab: SimulatedLab, hand_over: Callable[[int, dict[str, bytes]], dict[str, bytes]]
) -> dict[str, bytes]:
    """Close the epochs of all chips and collect what they say, as ``hand_over(shard, evidence)`` gives it."""
    files = {}
    for shard, chip in enumerate(lab.chips):
        for name, content in hand_over(shard, _answer(chip, lab.config)).items():
            files[chip_path(chip.chip_id, name)] = content
    return files


def write_answers(lab: SimulatedLab, run: Path) -> None:
    """Ask the chips that take no part in a run, and leave what they say in ``RUN.answers``."""
    run = run if run.name else run.resolve()
    for chip in lab.idle:
        folder = run.with_name(run.name + ".answers") / chip.chip_id
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in _answer(chip, lab.config).items():
            (folder / name).write_bytes(content)


def _answer(chip: Chip, config: LabConfig) -> dict[str, bytes]:
    """The four files with which a chip answers the verifier's challenge."""
    chip.close_epoch()
    quote = chip.quote(bytes.fromhex(config.challenge), config.verifier)
    return {
        "quote.json": quote,
        "log.bin": chip.log_bytes(),
        "chain.pem": chip.certificate_chain(),
        "epochs.json": encode_epoch_keys(chip.reveal()),
    }
