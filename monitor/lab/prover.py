"""A lab's side of a dispute: it runs its steps again as it took them, its lie included."""

from __future__ import annotations

from pathlib import Path

from firmware_sim.errors import EvidenceError
from firmware_sim.evidence import SigningKey
from monitor.lab.lies import conduct
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.replay.prover import RunProver
from monitor.replay.reexecution import HONEST, Behaviour, TracedStep
from monitor.transcript import RunFolder

__all__ = ["LabProver", "OwnProver"]


class OwnProver(RunProver):
    """A party in this process that runs its own steps again, and signs what it answers."""

    def __init__(self, run: RunFolder, key: SigningKey, behaviour: Behaviour = HONEST) -> None:
        self.key = key
        super().__init__(run, behaviour)

    def _execute(self, step: int, *, capture: int | None) -> TracedStep:
        traced = super()._execute(step, capture=capture)
        if traced.leaf not in (None, self._leaves[step]):
            raise EvidenceError(f"step {step}, run again, does not give its committed state")
        return traced


class LabProver(OwnProver):
    """A lab in this process: its run folder, and its private side for running steps again as it did."""

    def __init__(self, folder: Path) -> None:
        config = SimulatedLab.read_config(lab_path(folder))
        self.folder = folder
        key = SimulatedLab.lab_key(config)
        super().__init__(RunFolder(folder, key.verifying), key, conduct(config.lie, config.lie_step))
