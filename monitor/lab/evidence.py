"""What a lab's chips say: at the end of a run, as it hands it over, and to whoever challenges them later."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from firmware_sim import Chip, ErrorCode, MailboxError, collect_evidence
from firmware_sim.errors import DeviceError, EvidenceError
from monitor.lab.simulated import SimulatedLab
from monitor.transcript.layout import chip_path

__all__ = ["LiveChips", "chip_evidence", "write_answers"]


def chip_evidence(
    lab: SimulatedLab, hand_over: Callable[[int, dict[str, bytes]], dict[str, bytes]]
) -> dict[str, bytes]:
    """Close the epochs of all chips and collect what they say, as ``hand_over(shard, evidence)`` gives it."""
    files = {}
    for shard, chip in enumerate(lab.chips):
        for name, content in hand_over(shard, _answer(chip, lab.config.nonce, lab.config.verifier)).items():
            files[chip_path(chip.chip_id, name)] = content
    return files


def write_answers(lab: SimulatedLab, run: Path) -> None:
    """Ask the chips that take no part in a run, and leave what they say in ``RUN.answers``."""
    run = run if run.name else run.resolve()
    for chip in lab.idle:
        folder = run.with_name(run.name + ".answers") / chip.chip_id
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in _answer(chip, lab.config.nonce, lab.config.verifier).items():
            (folder / name).write_bytes(content)


class LiveChips:
    """The chips of simulated labs, each of which is powered on to answer a challenge, and off again.

    Args:
        labs: their private folders (``RUN.lab``), which stand for whatever brings a verifier's question to a chip.

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
        """Challenge a chip, and return its four files by their names.

        Raises:
            CallerError: the chip is at work in another process.
            EvidenceError: there is no such chip, or it does not answer.
        """
        if chip not in self._labs:
            raise EvidenceError(f"no lab that was named holds chip {chip}")
        try:
            asked = SimulatedLab.power_on(self._labs[chip], chip)
            answer = _answer(asked, nonce, verifier)
            asked.power_off()
        except MailboxError as error:
            if error.code is ErrorCode.ALREADY_POWERED:
                raise
            raise EvidenceError(str(error)) from None
        except DeviceError as error:
            raise EvidenceError(str(error)) from None
        return answer


def _answer(chip: Chip, nonce: bytes, verifier: str) -> dict[str, bytes]:
    """The four files with which a chip answers a verifier's challenge."""
    evidence = collect_evidence(chip, nonce, verifier)
    return {
        "quote.json": evidence.quote,
        "log.bin": evidence.log,
        "chain.pem": evidence.chain,
        "epochs.json": evidence.epoch_keys,
    }
