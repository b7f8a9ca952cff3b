"""A lab's side of an inspection in rounds: what it alone can do there."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from firmware_sim.evidence import SigningKey
from monitor.lab.evidence import LiveChips, copy_run
from monitor.lab.prover import LabProver
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript.layout import MANIFEST
from monitor.transcript.manifest import Manifest

__all__ = ["LabSide"]


class LabSide:
    """A simulated lab's private side: its key, its chips, its runs.

    Args:
        runs: their folders, each with the lab's private folder next to it; at least one.
    """

    def __init__(self, runs: Sequence[Path]) -> None:
        self._runs = runs

    @cached_property
    def key(self) -> SigningKey:
        """With which the lab signs."""
        return SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(self._runs[0])))

    @cached_property
    def _chips(self) -> LiveChips:
        return LiveChips(lab_path(run) for run in self._runs)

    def ask(self, chip: str, nonce: bytes, verifier: str) -> dict[str, bytes]:
        """Let a chip answer a verifier's challenge, as ``LiveChips.ask`` does."""
        return self._chips.ask(chip, nonce, verifier)

    def still(self, run: Path, copy: Path) -> Path:
        """A run as its lab hands it over: of one that goes on a copy, since the head would be another by tomorrow."""
        if Manifest.open((run / MANIFEST).read_bytes(), self.key.verifying).finished:
            return run
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy_run(run, copy)
        return copy

    def prover(self, run: Path) -> LabProver:
        """Who answers a referee for a run."""
        return LabProver(run)
