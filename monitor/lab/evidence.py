"""What a lab's chips say: at the end of a run, as it hands it over, and to a later challenge."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from firmware_sim import Chip, ErrorCode, MailboxError, collect_evidence
from firmware_sim.errors import CallerError, DeviceError, EvidenceError
from monitor.lab.desk import Desk, ask_lab, is_at_work
from monitor.lab.pruning import kept_checkpoint, prune_powered
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript.layout import CHIP_CHECKPOINT, chip_path

__all__ = ["LiveChips", "chip_evidence", "copy_run", "open_desk", "write_answers"]


def chip_evidence(
    lab: SimulatedLab, hand_over: Callable[[int, dict[str, bytes]], dict[str, bytes]]
) -> dict[str, bytes]:
    """Close the epochs of all chips and collect what they say, as ``hand_over(shard, evidence)`` gives it."""
    files = {}
    for shard, chip in enumerate(lab.chips):
        answer = _answer(chip, lab.folder, lab.config.nonce, lab.config.verifier)
        for name, content in hand_over(shard, answer).items():
            files[chip_path(chip.chip_id, name)] = content
    return files


def write_answers(lab: SimulatedLab, run: Path) -> None:
    """Ask the chips that take no part in a run, and leave what they say in ``RUN.answers``."""
    run = run if run.name else run.resolve()
    for chip in lab.idle:
        folder = run.with_name(run.name + ".answers") / chip.chip_id
        for name, content in _answer(chip, lab.folder, lab.config.nonce, lab.config.verifier).items():
            lab.files.write(str(folder / name), content)
        lab.files.flush(folder.parent.parent, [f"{folder.parent.name}/{folder.name}/"])


def open_desk(lab: SimulatedLab, run: Path) -> Desk:
    """From now on this process answers for the lab's chips, and for the run that it trains, between two steps."""
    chips = {chip.chip_id: chip for chip in (*lab.chips, *lab.idle)}

    def answer(chip: str, nonce: bytes, verifier: str) -> dict[str, bytes]:
        try:
            return _answer(chips[chip], lab.folder, nonce, verifier)
        except (MailboxError, DeviceError) as error:
            raise EvidenceError(str(error)) from None

    def prune(chip: str, signed: bytes) -> tuple[int, int]:
        try:
            return prune_powered(lab.folder, chips[chip], signed)
        except (CallerError, DeviceError) as error:
            raise EvidenceError(str(error)) from None

    return Desk(lab.folder, run, answer, prune)


def copy_run(run: Path, target: Path) -> None:
    """Copy a run folder as it is between two steps; EvidenceError where the process that trains does not let go."""
    if is_at_work(lab_path(run)):
        ask_lab(lab_path(run), {"copy": str(target.absolute())})
    else:
        shutil.copytree(run, target)


class LiveChips:
    """The chips of simulated labs: one at work answers between two steps, any other is powered on for it, and off.

    Args:
        labs: their private folders (``RUN.lab``), which simulate whatever brings a verifier's question to a chip.

    Raises:
        CallerError: one is no lab's folder.
    """

    def __init__(self, labs: Iterable[Path]) -> None:
        self._labs = {chip: lab for lab in labs for chip in SimulatedLab.silicon_of(lab)}

    @property
    def chips(self) -> list[str]:
        """Which chips there are."""
        return sorted(self._labs)

    def ask(self, chip: str, nonce: bytes, verifier: str) -> dict[str, bytes]:
        """Challenge a chip, and return its files by their names.

        Raises:
            CallerError: the chip is at work in another process.
            EvidenceError: there is no such chip, or it does not answer.
        """
        if chip not in self._labs:
            raise EvidenceError(f"no lab that was named holds chip {chip}")
        lab = self._labs[chip]
        if is_at_work(lab):
            return ask_lab(lab, {"chip": chip, "nonce": nonce.hex(), "verifier": verifier})
        try:
            asked = SimulatedLab.power_on(lab, chip)
            answer = _answer(asked, lab, nonce, verifier)
            asked.power_off()
        except MailboxError as error:
            if error.code is ErrorCode.ALREADY_POWERED:
                raise
            raise EvidenceError(str(error)) from None
        except DeviceError as error:
            raise EvidenceError(str(error)) from None
        return answer


def _answer(chip: Chip, lab: Path, nonce: bytes, verifier: str) -> dict[str, bytes]:
    """The files with which a chip of the lab with this folder answers a verifier's challenge."""
    evidence = collect_evidence(chip, nonce, verifier)
    kept = kept_checkpoint(lab, chip.chip_id, evidence.log)
    return {
        **({} if kept is None else {CHIP_CHECKPOINT: kept}),
        "quote.json": evidence.quote,
        "log.bin": evidence.log,
        "chain.pem": evidence.chain,
        "epochs.json": evidence.epoch_keys,
    }
