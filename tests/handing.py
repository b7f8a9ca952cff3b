"""A lab hands over what lies in a run's folder: it signs for each file, as honest as the file is."""

from __future__ import annotations

from pathlib import Path

from firmware_sim.evidence import SigningKey
from monitor.lab.simulated_lab import SimulatedLab, lab_path
from monitor.transcript.export import export_path, signed_list
from monitor.transcript.reader import entry_of

__all__ = ["hand_over"]


def hand_over(run: Path, key: SigningKey | None = None, *, run_id: str = "") -> None:
    """Sign for every file of a folder that is no link out of it, in the name of its lab."""
    key = key or SimulatedLab.lab_key(SimulatedLab.read_config(lab_path(run)))
    paths = [path.relative_to(run).as_posix() for path in sorted(run.rglob("*"))]
    files = {path: entry for path in paths if (entry := entry_of(run, path)) is not None}
    export_path(run).write_bytes(signed_list(run_id, files, key))
