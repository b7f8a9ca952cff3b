"""The prover's side: numerics, presets, training on chips, transcript, disputes.

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from monitor.lab.prover import LabProver
    from monitor.lab.simulated_lab import LabConfig, SimulatedLab
    from monitor.presets import PRESETS
    from monitor.presets.task import Task
    from monitor.recording.model_initialisation import initialised
    from monitor.recording.options import RunConfig
    from monitor.recording.padding import padded
    from monitor.recording.recipes import resume, train
    from monitor.recording.recorder import Recorder
    from monitor.transcript import RunFolder

__all__ = [
    "PRESETS",
    "LabConfig",
    "LabProver",
    "Recorder",
    "RunConfig",
    "RunFolder",
    "SimulatedLab",
    "Task",
    "initialised",
    "padded",
    "resume",
    "train",
]

_HOMES = {
    "lab.prover": ("LabProver",),
    "lab.simulated_lab": ("LabConfig", "SimulatedLab"),
    "presets": ("PRESETS",),
    "presets.task": ("Task",),
    "recording.model_initialisation": ("initialised",),
    "recording.options": ("RunConfig",),
    "recording.padding": ("padded",),
    "recording.recipes": ("resume", "train"),
    "recording.recorder": ("Recorder",),
    "transcript": ("RunFolder",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"monitor.{home}"), name)
    raise AttributeError(f"module 'monitor' has no attribute {name!r}")
